"""The stall metrics that a training logs: names, values, loggers, the summary, and how the callback is attached."""

import csv
import json
import logging
import math
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from between_steps import Does
from callbacks import At
from harness import fit
from lightning_zenflow import StallMonitor, ZenFlowStrategy, telemetry
from lightning_zenflow.step_meter import METRICS
from models import LinearLossModule
from networks import SmallNet
from side_by_side import Net

IN_BACKWARD = {"zenflow/overlap/late_blocks_percent", "zenflow/overlap/clip_prediction_error_percent"}

ROOT = Path(__file__).parents[2]


def logged(
    folder: Path, strategy: ZenFlowStrategy, *, steps: int, every: int, **options: Any
) -> list[dict[str, float]]:
    """Rows with our metrics that a run with a CSV logger wrote."""
    model = options.pop("model", None) or SmallNet(length=steps * options.get("accumulate_grad_batches", 1))
    logger = CSVLogger(folder)
    fit(model, strategy, steps=steps, logger=logger, log_every_n_steps=every, **options)
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "zenflow/overlap/step_ms" in row]


def fixed(**keys: Any) -> ZenFlowStrategy:
    return ZenFlowStrategy(worker_cores=1, **{"update_interval": 4, "publish_lag": 1, "select_interval": 8, **keys})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("rows")
    profiler = PyTorchProfiler(dirpath=folder, filename="profile", export_to_chrome=True)
    rows = logged(folder, fixed(offload_ratio=0.5), steps=40, every=10, profiler=profiler)
    (path,) = folder.glob("*.json")
    names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
    assert {f"zenflow {phase}" for phase in ("reduce", "update", "select", "submit", "publish", "gather")} <= names
    return rows


def test_the_documented_names_are_those_that_are_logged(rows: list[dict[str, float]]) -> None:
    """With Lightning's own metrics of the step."""
    table = re.findall(r"^\| `(zenflow/\S+)` \| (.+) \|$", (ROOT / "docs" / "tuning.md").read_text(), re.MULTILINE)
    assert [name for name, _ in table] == list(METRICS)
    assert all(re.fullmatch(r"[\w/. -]+", name) for name in METRICS)  # what MLflow allows
    logged = {name for row in rows for name in row} - {"step"}
    assert logged <= set(METRICS) - IN_BACKWARD
    # What is zero in all of a run has no chart, but for the waits themselves.
    assert all(any(row.get(name) for row in rows) for name in logged - {"zenflow/stall/device_percent"})
    assert not logged & {"zenflow/stall/worker_restarts", "zenflow/stall/skipped_steps"}
    assert {"zenflow/stall/host_percent", "zenflow/overlap/step_ms", "zenflow/overlap/publish_lag_steps"} <= logged
    assert [row["step"] for row in rows] == [9, 19, 29, 39]
    # A twentieth of the columns, selected by squared norm: their share of it is larger. The training thread is the device.
    for row in rows:
        assert row["zenflow/selection/device_squared_norm_percent"] > 5
        assert row["zenflow/stall/host_percent"] == pytest.approx(row["zenflow/stall/device_percent"])
        assert row["zenflow/overlap/worker_busy_percent"] > 0
        assert 40 < row["zenflow/selection/resident_percent"] < 60


def test_a_program_reads_the_metrics_behind_fit() -> None:
    """Without logger and progress bar. What monitors the model's own results in training does not see them."""
    seen: list[set[str]] = []
    sees = At("on_train_batch_end", lambda trainer: seen.append(set(trainer.callback_metrics)))
    trainer = fit(SmallNet(length=6), fixed(), steps=6, callbacks=[sees], log_every_n_steps=6)
    assert seen == [set()] * 6
    ours = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert set(ours) == set(METRICS) - IN_BACKWARD - {"zenflow/selection/resident_percent"}
    assert ours["zenflow/overlap/update_interval_steps"] == 4 and ours["zenflow/overlap/step_ms"] > 0


def test_weights_that_are_written_time_and_again(caplog: pytest.LogCaptureFixture) -> None:
    """A line says why each step waits for its updates, and the summary takes it for the cause."""
    strategy = ZenFlowStrategy(update_interval=1, publish_lag=0, worker_cores=1)
    with caplog.at_level(logging.INFO):
        trainer = fit(SmallNet(length=20), strategy, steps=20, callbacks=[Does("clamped")])
    assert caplog.text.count("weights are written in place time and again") == 1
    assert trainer.strategy.zenflow_optimizer.training.telemetry.counts.followed_steps >= 17


def test_every_step_with_predicted_clip_factors(tmp_path: Path) -> None:
    """Logged once an optimizer step, not once a micro-batch."""
    strategy = fixed(update_interval=1, publish_lag=0, select_interval=0)
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01}
    first, *rows = logged(tmp_path, strategy, steps=8, every=1, **options)
    assert [row["step"] for row in (first, *rows)] == list(range(8))
    assert 0 < rows[-1]["zenflow/overlap/clip_prediction_error_percent"] < 100
    # Not logged where no block has been late.
    assert 0 <= rows[-1].get("zenflow/overlap/late_blocks_percent", 0.0) <= 100


def test_the_layout_of_tensorboards_charts(tmp_path: Path) -> None:
    """Each chart shows one metric of a run that submits in backward, with clipping and selections; the most telling come first."""
    logger = TensorBoardLogger(tmp_path)
    strategy = fixed(publish_lag=0, offload_ratio=0.5)
    fit(SmallNet(length=16), strategy, steps=16, logger=logger, log_every_n_steps=4, gradient_clip_val=1.0)
    events = EventAccumulator(logger.log_dir).Reload()
    event = events.Tensors(metadata.CONFIG_SUMMARY_TAG)[-1]
    shown = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in shown.category] == [
        "ZenFlow overview",
        "ZenFlow overlap",
        "ZenFlow selection",
        "ZenFlow stall",
    ]
    shown_names = [chart.title for category in shown.category for chart in category.chart]
    assert shown_names[:2] == ["zenflow/stall/device_percent", "zenflow/overlap/step_ms"]
    assert {*shown_names} == {name for name in events.Tags()["scalars"] if name.startswith("zenflow/")}
    for category in shown.category:
        for chart in category.chart:
            (tag,) = chart.multiline.tag
            assert len([name for name in events.Tags()["scalars"] if re.match(tag, name)]) == 1, chart.title


def test_the_callback_is_added_once_where_it_is_wanted_and_none_is_there(tmp_path: Path) -> None:
    """In front of checkpoints, which Lightning keeps last."""
    own, models = StallMonitor(), StallMonitor()

    class Model(LinearLossModule):
        def configure_callbacks(self) -> list[pl.Callback]:
            return [models]

    def monitors(model: LinearLossModule, strategy: Any, **options: Any) -> list[StallMonitor]:
        saving = {"enable_checkpointing": True, "default_root_dir": tmp_path}
        trainer = fit(model, strategy, steps=2, **saving, **options)
        assert isinstance(trainer.callbacks[-1], ModelCheckpoint)
        return [callback for callback in trainer.callbacks if isinstance(callback, StallMonitor)]

    assert len(monitors(LinearLossModule(length=4), fixed())) == 1
    assert monitors(LinearLossModule(length=4), fixed(stall_monitor=False)) == []
    assert monitors(LinearLossModule(length=4), fixed(), callbacks=[own]) == [own]
    assert monitors(Model(length=4), fixed()) == [models]


@pytest.mark.parametrize("summary", [True, False])
def test_messages_of_the_start_and_the_end(
    summary: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"log_every_n_steps": 2, "enable_progress_bar": True, "callbacks": [StallMonitor(summary=summary)]}
    with caplog.at_level(logging.INFO):
        trainer = fit(LinearLossModule(length=6), ZenFlowStrategy(worker_cores=1, publish_lag=1), steps=6, **options)
    start, *end = [message for message in caplog.messages if message.startswith("ZenFlow: ")]
    pattern = (
        r"ZenFlow: [\d,]+ parameters on this rank; update_interval=1 \(auto\), publish_lag=1, offload_ratio=1 \(auto\);"
        r" worker on cores \[\d+\]"
        r"; \d+\.\d\d GiB of shared host memory"
    )
    assert re.fullmatch(pattern, start)
    assert ["ZenFlow: 6 steps, median " in message for message in end] == [True] * summary
    assert "stall_%" in capsys.readouterr().out and "stall_%" not in trainer.callback_metrics


def test_a_plain_fit_says_at_most_four_lines_more_than_under_auto(caplog: pytest.LogCaptureFixture) -> None:
    """With validation, test and predict, and metrics of epochs: no advice on several devices, and nothing twice."""

    def lines(strategy: str) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            options = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
            trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, **options)
            model = Net(length=60)
            trainer.fit(model)
            for evaluate in (trainer.validate, trainer.test, trainer.predict):
                evaluate(model)
        said = [*caplog.messages, *(str(warning.message) for warning in warned)]
        return [line for message in said for line in message.splitlines()]

    of_auto, ours = lines("auto"), lines("zenflow")
    more = list((Counter(ours) - Counter(of_auto)).elements())
    assert len(ours) <= len(of_auto) + 4, more
    start, *_ = [line for line in more if line.startswith("ZenFlow")]
    assert len(start) < 200


@pytest.mark.parametrize(("precision", "expected"), [("32-true", ["ZenFlow: 1 of 3 steps"]), ("16-true", [])])
def test_skipped_steps_are_counted_and_warned_of(
    precision: Any, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, although all from the third on are; and not in fp16, whose loss scale is found by skipped steps."""
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)
    said: list[str] = []
    monkeypatch.setattr(telemetry, "rank_zero_warn", said.append)
    model = LinearLossModule(factors=dict.fromkeys(range(2, 10), math.nan))
    trainer = fit(model, fixed(), steps=10, precision=precision, log_every_n_steps=5)
    assert trainer.callback_metrics["zenflow/stall/skipped_steps"] == 8 or not expected
    assert [message.partition(" so far")[0] for message in said] == expected
