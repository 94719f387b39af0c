"""On a CUDA device: the step-time benchmark's measure of copies, by what each method is known to copy."""

import pytest

from benchmarks.step_run import StepResult, StepSpec
from benchmarks.step_time import run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_cuda")]


@pytest.mark.parametrize(
    ("method", "down", "up"),
    # ZeRO-Offload copies fp32 gradients; both of ours a quarter of the weights, and state of columns after a selection.
    [("none", 0, 0), ("zero_offload", 2, 1), ("torchao", 1, 1), ("zenflow", 1, 0.25), ("zenflow_no_stand_in", 1, 0.25)],
)
def test_what_is_copied(method: str, down: float, up: float) -> None:
    spec = StepSpec(device="cuda", method=method, params=25e6, batch=1, tokens=64, compute_s=0, warm_up=6, steps=8)
    result = run(spec, timeout=250)
    assert isinstance(result, StepResult), result
    assert result.copied_sizes == [pytest.approx(down, abs=0.05), pytest.approx(up, abs=0.05)]
    if result.schedule:
        assert result.counted_sizes == [pytest.approx(down, abs=0.05), pytest.approx(up, abs=0.2)]
