"""Names and arithmetic of the metrics of an interval."""

from typing import Any

import pytest
import torch

from lightning_zenflow.monitor.metrics import METRICS, CopySample, hidden_share, interval_metrics
from lightning_zenflow.monitor.tensorboard import CHARTS
from lightning_zenflow.telemetry.counters import Reading
from lightning_zenflow.topk.importance import owned_norm_share


def test_names_have_a_group_and_a_unit_or_are_counts() -> None:
    counts = {"skipped_steps", "worker_restarts", "selections"}
    units = ("_ms", "_percent", "_steps", "_bytes", "_model_sizes", "_GB_per_s", "_GB")
    for name in METRICS:
        prefix, group, metric = name.split("/")
        assert prefix == "zenflow"
        assert group in {"stall", "overlap", "traffic", "selection", "memory"}
        assert metric.endswith(units) or metric in counts, name


def test_charts_show_metrics() -> None:
    names = [f"zenflow/{name}" for charts in CHARTS.values() for name in charts.values()]
    assert set(names) <= set(METRICS)
    assert len(names) == len(set(names))


def reading(**values: Any) -> Reading:
    zeros = dict.fromkeys(Reading.__dataclass_fields__, 0)
    return Reading(**{**zeros, "host_stall_s": {}, "device_stall_s": {}, **values})


class TestArithmetic:
    def test_by_hand(self) -> None:
        before = reading(steps=10, host_stall_s={"flush": 1.0}, worker_busy_s=2.0, d2h_bytes=100, gradients=4)
        now = reading(
            steps=14,
            host_stall_s={"flush": 1.0, "publish_wait": 0.2},
            device_stall_s={"publish_wait": 0.1, "select": 0.3},
            worker_busy_s=4.0,
            d2h_bytes=500,
            h2d_bytes=50,
            model_bytes=100,
            gradients=8,
            age_steps=10,
            owned_share=0.25,
            owned_norm_share=0.5,
            selection_overlap=None,
            arena_bytes=3_000_000_000,
        )
        copies = CopySample(d2h=(2_000_000_000, 0.5), h2d=(0, 0.0), exposed_h2d_s=0.0)
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
            "traffic/d2h_bytes": 100,
            "traffic/d2h_model_sizes": 1,
            "traffic/h2d_model_sizes": 0.125,
            "traffic/d2h_GB_per_s": 4,
            "selection/device_owned_percent": 25,
            "selection/device_squared_norm_percent": 50,
            "memory/arena_GB": 3,
        }
        for name, value in expected.items():
            assert metrics[f"zenflow/{name}"] == pytest.approx(value), name
        assert "zenflow/selection/overlap_percent" not in metrics
        assert "zenflow/traffic/h2d_GB_per_s" not in metrics

    def test_a_norm_that_is_not_finite_is_left_out(self) -> None:
        now = reading(steps=1, owned_norm_share=float("nan"))
        metrics = interval_metrics(reading(), now, seconds=1.0, copies=None)
        assert "zenflow/selection/device_squared_norm_percent" not in metrics

    @pytest.mark.parametrize(("busy", "wait", "share"), [(2.0, 0.5, 0.75), (1.0, 3.0, 0.0), (0.0, 0.0, 1.0)])
    def test_hidden_share(self, busy: float, wait: float, share: float) -> None:
        assert hidden_share(busy, {"flush": wait / 2, "publish_wait": wait / 2, "select": 9.0}) == share

    def test_owned_share_of_the_squared_norm(self) -> None:
        column_norms = torch.tensor([1.0, 2.0, 3.0, 4.0])
        owned = torch.tensor([True, False, True, False])
        assert float(owned_norm_share(column_norms, owned)) == pytest.approx(0.4)
