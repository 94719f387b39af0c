"""The estimate beside measurements: by hand, and that the document has what the committed results give."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import estimate_check
from benchmarks.documents import RESULTS
from benchmarks.estimate_check import check_kernel, tables
from benchmarks.step_run import StepResult, StepSpec

KERNEL = {
    "hardware": "2 cores x86_64",
    # 40 GB/s: 28 bytes in 1.4 ns are half of it.
    "share": {"DeepSpeedCPUAdam": [0.5, 0.5]},
    "ns": {"DeepSpeedCPUAdam": [1.4, 1.4], "replay, S=1": [0.7, 0.7], "replay, S=8": [0.26, 0.26], "torch": [1.0, 1.0]},
}


def written(*, hardware: str = "2 cores x86_64", device: str = "simulated", **step_s: float) -> dict[str, object]:
    """One repeat with a run of each method."""
    runs = []
    for method, seconds in step_s.items():
        spec = StepSpec(
            device=device,  # type: ignore[arg-type]
            method=method,
            params=1e8,
            batch=1,
            tokens=16,
            compute_s=0.5,
            warm_up=1,
            steps=2,
        )
        ours = {"schedule": [4, 1], "worker_s": [0.04, 0.06]} if method.startswith("zenflow") else {}
        result = StepResult(spec=spec, step_s=[seconds, seconds], n_params=10**8, **ours)  # type: ignore[arg-type]
        runs.append(dataclasses.asdict(result))
    return {"hardware": hardware, "runs": [runs]}


def rows_of(text: str, first: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if line[0] == first]


def test_kernels_by_hand() -> None:
    adamw, one, eight = check_kernel(KERNEL, cores=2)
    assert (adamw.of, adamw.predicted, adamw.error) == (
        "DeepSpeedCPUAdam",
        pytest.approx(42 / 40),
        pytest.approx(-0.25),
    )
    assert one.predicted == pytest.approx(28 / 40)
    # 42 bytes are faster read than two cores count.
    assert eight.predicted == pytest.approx((1 + 0.2 * 8) / 2 / 8)


def test_steps_by_hand() -> None:
    text = tables(KERNEL, {"a": written(floor=1.0, zero_offload=1.2, zenflow=1.25, deepspeed_zenflow=2.0)}, None)
    offload, ours = rows_of(text, "a")
    # 42 bytes a parameter at 40 GB/s are 105 ms.
    assert offload[2:7] == ["", "1000 (floor)", "1105", "1200", "-8%"]
    # One of the two cores: 1.8 ns a parameter and round, every fourth step.
    assert ours[2:] == ["4, 1", "1000 (floor)", "1000", "1250", "-20%", "45", "50", "-10%"]
    assert "Error of the predicted steps: -20% to -8%." in text


def test_in_training_on_the_cpu_our_step_is_not_predicted() -> None:
    text = tables(KERNEL, {"a": written(device="cpu", none=1.0, zero_offload=1.2, zenflow=1.25)}, None)
    offload, ours = rows_of(text, "a")
    assert offload[4:7] == ["1105", "1200", "-8%"]
    assert ours[4:] == ["", "", "", "45", "50", "-10%"]


def test_what_is_left_out() -> None:
    files = {
        "without": written(zenflow=1.0),
        "elsewhere": written(hardware="12 cores x86_64", none=1.0, zenflow=1.0),
        "gpu": written(hardware="some GPU, 2 cores x86_64", device="cuda", none=1.0, zenflow=1.0),
    }
    text = tables(KERNEL, files, None)
    assert not any(rows_of(text, name) for name in files)
    for reason in (
        "without: no run shows what a step takes without offload",
        "elsewhere: it is of another machine than the bandwidth",
        "gpu: PCIe's speed was not given",
    ):
        assert reason in text
    ((*_, predicted, measured, error, _, _, _),) = rows_of(tables(KERNEL, files, 0.5), "gpu")
    # 50 MB of weights come up at 0.5 GB/s; the gradients' 200 MB hide behind backward.
    assert (predicted, measured, error) == ("1100", "1000", "+10%")


def test_the_document_has_what_the_results_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in [RESULTS / "kernel.json", *RESULTS.glob("step_time_*.json")]:
        (tmp_path / path.name).write_text(path.read_text())
    assert estimate_check.main(["--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.strip()
    assert (tmp_path / "estimate_check.md").read_text().strip() == printed
    document = (estimate_check.records.ROOT / "docs" / "estimate.md").read_text()
    assert printed in document, "run python -m benchmarks.estimate_check"
    assert json.loads((RESULTS / "kernel.json").read_text())["hardware"]
