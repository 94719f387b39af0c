"""On a CUDA device: the step-time benchmark's count of copies, against the known traffic of each method."""

import pytest

from benchmarks.common.processes import run_process
from benchmarks.step_time.run import StepSpec, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_cuda")]


@pytest.mark.parametrize(
    ("method", "d2h", "h2d"),
    # ZeRO-Offload copies fp32 gradients; `ZenFlowStrategy` a quarter of the weights, and state of columns after a selection.
    [
        ("none", 0, 0),
        ("zero_offload", 2, 1),
        ("torchao", 1, 1),
        ("zenflow", 1, 0.25),
        ("zenflow_no_provisional", 1, 0.25),
    ],
)
def test_copied_bytes(method: str, d2h: float, h2d: float) -> None:
    if method == "torchao":
        pytest.importorskip("torchao")
    spec = StepSpec(device="cuda", method=method, params=25e6, tokens=64, warm_up=6, steps=8)
    result = run_process(run, spec, timeout=250)
    assert result.copied_sizes == [pytest.approx(d2h, abs=0.05), pytest.approx(h2d, abs=0.05)]
    if result.schedule:
        assert result.counted_sizes == [pytest.approx(d2h, abs=0.05), pytest.approx(h2d, abs=0.2)]
