"""Training by torch's and Triton's passes, which run on a GPU: the state is AdamW's in the same sense, and shown weights hardly differ."""

from dataclasses import replace

import pytest
import torch

from harness import APPROXIMATE, Case, run_here
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.kernels.torch import TorchKernels


@pytest.mark.parametrize(("name", "precision"), [("torch", "32-true"), ("torch", "bf16-true"), ("triton", "bf16-true")])
def test_the_state_is_adamws(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        topk_ratio=0.3,
        precision=precision,
        max_norm=1.0,
        accumulate=2,
        strategy_options={**APPROXIMATE, "select_interval": 3},
    )
    kernels: Kernels = TorchKernels()
    if name == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
        if torch.cuda.is_available():
            pytest.skip("Triton's interpreter needs a machine without a CUDA device")
        from lightning_zenflow.kernels.triton import TritonKernels

        kernels = TritonKernels()
        # The interpreter is slow.
        case = replace(case, model_options={"shapes": ((31, 29), (8, 3, 3, 5), (37,))})
    compiled = run_here(case)
    monkeypatch.setattr("lightning_zenflow.zero.build.kernels_for", lambda device: kernels)
    ours = run_here(case)
    # By the same passes: the clip coefficient is then the same.
    exact = run_here(case.exact())
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for a, b, c in zip(getattr(ours, kind), getattr(exact, kind), getattr(compiled, kind), strict=True):
            assert torch.equal(a, b), kind
            torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
