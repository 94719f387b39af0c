"""The estimate beside measurements: its arithmetic."""

import dataclasses

import pytest

from benchmarks.estimate.__main__ import tables, timeline_table
from benchmarks.estimate.check import check_kernel
from benchmarks.estimate.published import FIGURES
from benchmarks.recorded_device.prediction import Prediction, Setting
from benchmarks.step_time.run import StepResult, StepSpec
from docs import quote_tables

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
        spec = StepSpec(device=device, method=method, params=1e8, compute_s=0.5, warm_up=1, steps=2)  # type: ignore[arg-type]
        zenflow = {"schedule": [4, 1], "worker_s": [0.04, 0.06]} if method.startswith("zenflow") else {}
        result = StepResult(spec=spec, step_s=[seconds, seconds], n_params=10**8, **zenflow)  # type: ignore[arg-type]
        runs.append(dataclasses.asdict(result))
    return {"hardware": hardware, "runs": [runs]}


def rows_of(text: str, name: str) -> list[list[str]]:
    """The rows of the second table that begin with `name`."""
    _, steps = text.split("Time of a step in ms:")
    return [list(row.values()) for row in quote_tables.rows_of(steps) if row["measurement"] == name]


def test_kernels_by_hand() -> None:
    checked = check_kernel(KERNEL, cores=2)
    assert list(checked) == ["DeepSpeedCPUAdam", "replay, S=1", "replay, S=8"]
    adamw = checked["DeepSpeedCPUAdam"]
    assert (adamw.predicted, adamw.error) == (pytest.approx(42 / 40), pytest.approx(-0.25))
    assert checked["replay, S=1"].predicted == pytest.approx(28 / 40)
    # Two cores compute longer than 42 bytes take.
    assert checked["replay, S=8"].predicted == pytest.approx((0.1 + 0.42 * 8) / 2 / 8)


def test_steps_by_hand() -> None:
    text = tables(KERNEL, {"a": written(floor=1.0, zero_offload=1.2, zenflow=1.25, deepspeed_zenflow=2.0)}, None)
    offload, zenflow = rows_of(text, "a")
    # 42 bytes a parameter at 40 GB/s are 105 ms.
    assert offload[2:7] == ["", "1000 (floor)", "1105", "1200", "-8%"]
    # One of the two cores: 1.78 ns a parameter and round, every fourth step.
    assert zenflow[2:] == ["4, 1", "1000 (floor)", "1000", "1250", "-20%", "44", "50", "-11%"]
    assert "Error of the predicted steps: -20% to -8%." in text


def test_zenflow_steps_on_the_cpu_are_not_predicted() -> None:
    text = tables(KERNEL, {"a": written(device="cpu", none=1.0, zero_offload=1.2, zenflow=1.25)}, None)
    offload, zenflow = rows_of(text, "a")
    assert offload[4:7] == ["1105", "1200", "-8%"]
    assert zenflow[4:] == ["", "", "", "44", "50", "-11%"]


def test_excluded_results() -> None:
    files = {
        "without": written(zenflow=1.0),
        "elsewhere": written(hardware="12 cores x86_64", none=1.0, zenflow=1.0),
        "gpu": written(hardware="some GPU, 2 cores x86_64", device="cuda", none=1.0, zenflow=1.0),
    }
    text = tables(KERNEL, files, None)
    assert not any(rows_of(text, name) for name in files)
    assert (
        "without: no run shows a step without offload; elsewhere: the bandwidth was measured on another machine" in text
    )
    assert "gpu: the bandwidth of PCIe was not given" in text
    ((*_, predicted, measured, error, _, _, _),) = rows_of(tables(KERNEL, files, 0.5), "gpu")
    # 50 MB of weights come up at 0.5 GB/s; the gradients' 200 MB hide behind backward.
    assert (predicted, measured, error) == ("1100", "1000", "+10%")


def test_a_predicted_timeline_by_hand() -> None:
    """S = 4, d = 1 on the machine with PCIe 25 GB/s: of the weights one block of four comes up behind the step; jobs hide."""
    setting = Setting(device="4090", params=1e9, tokens=1024, update_interval=4, publish_lag=1)
    timeline = Prediction(
        setting=setting, step_s=1.25, alone_s=1.0, model_s=1.0, other_s=0.0, worker_s=0.5, idle_s={"copies": 0.25}
    )
    (row,) = quote_tables.rows_of(timeline_table([timeline]).split("ms:")[1])
    # 2 GB / 4 at 25 GB/s are 20 ms; 34 + 10 bytes a parameter and job at 66.4 GB/s, of a quarter of them, are 166 ms.
    assert [*row.values()] == ["4090", "1B", "1024", "4, 1", "1000", "1020", "1250", "-18%", "-67%"]


def test_offload_is_estimated_slower_than_none_and_faster_than_published() -> None:
    """Formulas are of full bandwidth."""
    for figure in FIGURES:
        assert figure.without_s < figure.predict() < figure.with_s
