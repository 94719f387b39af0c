"""The stall metrics: what is logged, under which names, and that the numbers are right."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from harness import Case, fit, run_here
from lightning_zenflow import StallMonitor, ZenFlowStrategy
from lightning_zenflow.auto_schedule import Pace
from lightning_zenflow.metrics import METRICS, CopySample, Reading, hidden_share, interval_metrics
from lightning_zenflow.prediction import momentum_steps
from lightning_zenflow.selection import owned_energy
from lightning_zenflow.stalls import CAUSES
from models import LinearLossModule, OptimizerOptions
from networks import SmallNet

ROOT = Path(__file__).parent.parent


def logged(
    folder: Path, strategy: ZenFlowStrategy, *, steps: int, every: int, **options: Any
) -> list[dict[str, float]]:
    """What a run with a CSV logger wrote, one dict for each row of ours."""
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
    return logged(tmp_path_factory.mktemp("rows"), fixed(), steps=40, every=10)


def test_the_documented_names_are_those_that_are_logged(rows: list[dict[str, float]]) -> None:
    table = re.findall(r"^\| `(zenflow/\S+)` \| (.+) \|$", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert dict(table) == METRICS
    assert {name for row in rows for name in row} - {"step"} == set(METRICS)


def test_names_have_a_group_and_a_unit_or_are_counts() -> None:
    counts = {"skipped_steps", "worker_restarts", "selections"}
    units = ("_ms", "_percent", "_steps", "_bytes", "_model_sizes", "_GB_per_s", "_GB")
    for name in METRICS:
        prefix, group, metric = name.split("/")
        assert prefix == "zenflow"
        assert group in {"stall", "overlap", "traffic", "selection", "memory"}
        assert metric.endswith(units) or metric in counts, name


def test_logged_with_lightnings_own_metrics_of_the_step(rows: list[dict[str, float]]) -> None:
    assert [row["step"] for row in rows] == [9, 19, 29, 39]


def test_traffic_is_one_model_down_and_a_window_th_of_it_up(rows: list[dict[str, float]]) -> None:
    model = SmallNet(length=1)
    n_bytes = 4 * sum(p.numel() for p in model.parameters())
    # Behind the gradients a factor of 4 bytes and a step number of 8.
    assert all(row["zenflow/traffic/down_bytes"] == n_bytes + 12 for row in rows)
    assert rows[-1]["zenflow/traffic/down_model_sizes"] == pytest.approx(1, abs=0.001)
    # Published weights, and 12 bytes for each entry that changed its owner in this period of one selection or two.
    owned = sum(row["zenflow/selection/device_owned_percent"] for row in rows) / 100 / len(rows)
    for row in rows[1:]:
        assert -0.02 <= row["zenflow/traffic/up_model_sizes"] - 0.25 <= 2 * 3 * owned / 10 + 0.02


def test_schedule_and_staleness(rows: list[dict[str, float]]) -> None:
    last = rows[-1]
    assert last["zenflow/overlap/update_interval_steps"] == 4
    assert last["zenflow/overlap/publish_lag_steps"] == 1
    beta1 = fmean(group.beta1 for group in OptimizerOptions().groups(0))
    ahead = momentum_steps(Pace(update_interval=4, publish_lag=1), beta1)
    assert last["zenflow/overlap/look_ahead_steps"] == pytest.approx(ahead)
    # Published d = 1 step after the hand-over, a window's gradients are 1, 2, 3 and 4 steps old.
    assert last["zenflow/overlap/staleness_steps"] == pytest.approx(2.5)


def test_selection(rows: list[dict[str, float]]) -> None:
    assert [row["zenflow/selection/selections"] for row in rows] == [2, 3, 4, 5]
    for row in rows:
        assert 0 <= row["zenflow/selection/overlap_percent"] <= 100
        # Columns are chosen for their energy, so their share of it is larger than their share of the weights.
        assert row["zenflow/selection/device_energy_percent"] > row["zenflow/selection/device_owned_percent"] > 4


def test_parts_add_up(rows: list[dict[str, float]]) -> None:
    for row in rows:
        for who in ("host", "device"):
            by_cause = [row[f"zenflow/stall/{who}_{cause}_ms"] for cause in CAUSES]
            assert sum(by_cause) == pytest.approx(row[f"zenflow/stall/{who}_ms"])
            share = row[f"zenflow/stall/{who}_ms"] / row["zenflow/overlap/step_ms"]
            assert row[f"zenflow/stall/{who}_percent"] == pytest.approx(100 * share)
        assert row["zenflow/memory/trainer_GB"] > 0.05
        assert 0 < row["zenflow/memory/worker_GB"] < 0.2
        assert row["zenflow/overlap/worker_busy_ms"] > 0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_step_and_every_micro_batch(accumulate: int, tmp_path: Path) -> None:
    """Logged once an optimizer step; without staleness a gradient is visible in its own step."""
    strategy = fixed(update_interval=1, publish_lag=0)
    rows = logged(tmp_path, strategy, steps=5, every=1, accumulate_grad_batches=accumulate)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["zenflow/overlap/staleness_steps"] == 0 for row in rows)
    assert all("zenflow/traffic/down_GB_per_s" in row for row in rows)


def test_validation_is_not_part_of_a_step_but_its_flush_is_waiting(tmp_path: Path) -> None:
    rows = logged(tmp_path, fixed(), steps=8, every=4, limit_val_batches=1, val_check_interval=2)
    assert all(row["zenflow/stall/device_flush_ms"] > 0 for row in rows)
    assert all(row["zenflow/stall/device_ms"] < row["zenflow/overlap/step_ms"] for row in rows)


def test_offloaded_columns_are_counted(tmp_path: Path) -> None:
    resident = logged(tmp_path / "1", fixed(select_interval=0), steps=12, every=6)[-1]
    visiting = logged(tmp_path / "2", fixed(select_interval=0, offload=True), steps=12, every=6)[-1]
    numel = sum(p.numel() for p in SmallNet(length=1).parameters())
    owned = round(visiting["zenflow/selection/device_owned_percent"] / 100 * numel)
    for way in ("down", "up"):
        more = visiting[f"zenflow/traffic/{way}_bytes"] - resident[f"zenflow/traffic/{way}_bytes"]
        assert more == pytest.approx(12 * owned)


def test_sums_over_micro_batches_in_host_memory_are_counted(tmp_path: Path) -> None:
    options = {"steps": 12, "every": 6, "accumulate_grad_batches": 3}
    device = logged(tmp_path / "1", fixed(select_interval=0, accumulate_on="device"), **options)[-1]
    host = logged(tmp_path / "2", fixed(select_interval=0, accumulate_on="host"), **options)[-1]
    for way in ("down", "up"):
        # Of three micro-batches the first two leave a sum, which the next one takes.
        more = host[f"zenflow/traffic/{way}_model_sizes"] - device[f"zenflow/traffic/{way}_model_sizes"]
        assert more == pytest.approx(2)


class Diverging(LinearLossModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if batch_idx in (2, 5) else loss


def test_skipped_steps(tmp_path: Path) -> None:
    rows = logged(tmp_path, fixed(), steps=8, every=2, model=Diverging(length=8))
    assert [row["zenflow/stall/skipped_steps"] for row in rows] == [0, 1, 2, 2]


def test_monitoring_changes_no_bit(tmp_path: Path) -> None:
    case = Case(model="SmallNet", precision="bf16-true", steps=10, strategy_options={"select_interval": 3})
    plain = run_here(replace(case, strategy_options={**case.strategy_options, "stall_monitor": False}))
    model = case.make_model()
    options = {"precision": case.precision, "logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    fit(model, case.make_strategy(), steps=case.steps, **options)
    weights = [p for parameters in model.parameter_groups() for p in parameters]
    assert all(torch.equal(a, b.detach()) for a, b in zip(plain.weights, weights, strict=True))


class TestTheCallback:
    def monitors(self, strategy: Any, **options: Any) -> list[StallMonitor]:
        trainer = fit(LinearLossModule(length=4), strategy, steps=2, **options)
        trainer.fit(LinearLossModule(length=4))
        return [callback for callback in trainer.callbacks if isinstance(callback, StallMonitor)]

    def test_is_added_once(self) -> None:
        assert len(self.monitors(fixed())) == 1

    def test_is_not_added_where_it_is_not_wanted(self) -> None:
        assert self.monitors(fixed(stall_monitor=False)) == []

    def test_the_users_own_is_kept(self) -> None:
        own = StallMonitor(summary=False)
        assert self.monitors(fixed(), callbacks=[own]) == [own]

    def test_the_models_own_is_kept(self) -> None:
        own = StallMonitor()

        class Model(LinearLossModule):
            def configure_callbacks(self) -> list[pl.Callback]:
                return [own]

        trainer = fit(Model(length=4), fixed(), steps=2)
        assert [callback for callback in trainer.callbacks if isinstance(callback, StallMonitor)] == [own]

    def test_checkpoints_stay_last(self, tmp_path: Path) -> None:
        trainer = fit(
            LinearLossModule(length=4), fixed(), steps=2, enable_checkpointing=True, default_root_dir=tmp_path
        )
        assert isinstance(trainer.callbacks[-1], ModelCheckpoint)

    def test_another_strategy(self) -> None:
        with pytest.raises(MisconfigurationException, match="StallMonitor: strategy=.*: allowed is ZenFlowStrategy"):
            fit(LinearLossModule(length=4), "auto", callbacks=[StallMonitor()])

    def test_the_progress_bar_shows_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        fit(LinearLossModule(length=4), fixed(), steps=4, log_every_n_steps=2, enable_progress_bar=True)
        assert "stall_%" in capsys.readouterr().out


def reading(**values: Any) -> Reading:
    zeros = dict.fromkeys(Reading.__dataclass_fields__, 0)
    return Reading(**{**zeros, "host_stall_s": {}, "device_stall_s": {}, **values})


class TestArithmetic:
    def test_by_hand(self) -> None:
        before = reading(steps=10, host_stall_s={"flush": 1.0}, worker_busy_s=2.0, down_bytes=100, gradients=4)
        now = reading(
            steps=14,
            host_stall_s={"flush": 1.0, "publish_wait": 0.2},
            device_stall_s={"publish_wait": 0.1, "select": 0.3},
            worker_busy_s=4.0,
            down_bytes=500,
            up_bytes=50,
            model_bytes=100,
            gradients=8,
            age_steps=10,
            owned_share=0.25,
            owned_energy=0.5,
            selection_overlap=None,
            arena_bytes=3_000_000_000,
        )
        copies = CopySample(down=(2_000_000_000, 0.5), up=(0, 0.0), late_up_s=0.0)
        metrics = interval_metrics(before, now, seconds=8.0, copies=copies)
        expected = {
            "stall/host_ms": 50,
            "stall/host_percent": 2.5,
            "stall/host_flush_ms": 0,
            "stall/device_ms": 100,
            "stall/device_percent": 5,
            "stall/device_select_ms": 75,
            "stall/device_copy_ms": 0,
            "overlap/step_ms": 2000,
            "overlap/worker_busy_ms": 500,
            "overlap/worker_busy_percent": 25,
            "overlap/hidden_percent": 95,
            "overlap/staleness_steps": 2.5,
            "traffic/down_bytes": 100,
            "traffic/down_model_sizes": 1,
            "traffic/up_model_sizes": 0.125,
            "traffic/down_GB_per_s": 4,
            "selection/device_owned_percent": 25,
            "selection/device_energy_percent": 50,
            "memory/arena_GB": 3,
        }
        for name, value in expected.items():
            assert metrics[f"zenflow/{name}"] == pytest.approx(value), name
        assert "zenflow/selection/overlap_percent" not in metrics
        assert "zenflow/traffic/up_GB_per_s" not in metrics

    def test_an_energy_that_is_not_finite_is_left_out(self) -> None:
        now = reading(steps=1, owned_energy=float("nan"))
        metrics = interval_metrics(reading(), now, seconds=1.0, copies=None)
        assert "zenflow/selection/device_energy_percent" not in metrics

    @pytest.mark.parametrize(("busy", "wait", "share"), [(2.0, 0.5, 0.75), (1.0, 3.0, 0.0), (0.0, 0.0, 1.0)])
    def test_hidden_share(self, busy: float, wait: float, share: float) -> None:
        assert hidden_share(busy, {"flush": wait / 2, "publish_wait": wait / 2, "select": 9.0}) == share

    def test_owned_energy(self) -> None:
        energies = [torch.tensor([1.0, 2.0, 3.0]), torch.empty(0), torch.tensor([4.0])]
        owned = [torch.tensor([0, 2]), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)]
        assert float(owned_energy(energies, owned)) == pytest.approx(0.4)
