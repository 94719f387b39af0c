from collections.abc import Iterator

import pytest
import torch

from kernel_cases import ALL, Implementation, parameter


@pytest.fixture(params=[parameter(implementation) for implementation in ALL])
def on(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    """An implementation on a device; every one of them unless a test chooses."""
    implementation: Implementation = request.param
    if implementation.name == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    if (implementation.device_type == "cuda") != torch.cuda.is_available() and (
        implementation.device_type == "cuda" or implementation.is_interpreted
    ):
        pytest.skip("needs a CUDA device; Triton's interpreter needs a machine without")
    before = torch.get_num_threads()
    torch.set_num_threads(implementation.threads)
    yield implementation
    torch.set_num_threads(before)
