"""Metrics of an interval, the summary and its sentence of advice, by hand; waits are counted, and torch's profiler shows them."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import profile

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.monitor.summary import METRICS, advice, interval_metrics, summary
from lightning_zenflow.telemetry import Reading, Telemetry
from recorded_device.device import RecordedEvent
from recorded_device.watch import recorded_device


def reading(**values: Any) -> Reading:
    zeros = dict.fromkeys(Reading.__dataclass_fields__, 0)
    return Reading(**{**zeros, "host_stall_s": {}, "device_stall_s": {}, **values})


def test_metrics_by_hand() -> None:
    before = reading(steps=10, host_stall_s={"flush": 1.0}, worker_busy_s=2.0, d2h_bytes=100)
    now = reading(
        steps=14,
        host_stall_s={"flush": 1.0, "publish_wait": 0.2},
        device_stall_s={"publish_wait": 0.1, "slot": 0.06, "select": 0.3, "reserve": 0.02},
        worker_busy_s=4.0,
        d2h_bytes=500,
        h2d_bytes=50,
        model_bytes=100,
        owned_share=0.25,
        owned_norm_share=float("nan"),
        arena_bytes=3_000_000_000,
    )
    metrics = interval_metrics(before, now, seconds=8.0)
    expected = {
        "stall/device_percent": 6,
        "stall/host_percent": 2.5,
        "stall/worker_percent": 2,
        "stall/select_percent": 3.75,
        "stall/other_percent": 0.25,
        "stall/flush_percent": 0,
        "overlap/step_ms": 2000,
        "overlap/worker_busy_percent": 25,
        "traffic/d2h_model_sizes": 1,
        "traffic/h2d_model_sizes": 0.125,
        "selection/device_owned_percent": 25,
        "memory/arena_GB": 3,
    }
    assert {name: metrics[f"zenflow/{name}"] for name in expected} == pytest.approx(expected)
    unknown = {"selection/device_squared_norm_percent", "overlap/late_blocks_percent"}
    assert set(METRICS) - set(metrics) == {f"zenflow/{name}" for name in unknown}


AUTO, FIXED = ZenFlowConfig(), ZenFlowConfig(update_interval=2, publish_lag=0)
TRUE_FACTORS = ZenFlowConfig(update_interval=1, publish_lag=0, clip_prediction=False)
SLOW_CPU: Any = ({"publish_wait": 0.2}, 0.96)
MORE_CORES, ALONE = "give the worker more cores", "keep other processes off the worker's cores"


@pytest.mark.parametrize(
    ("waits", "worker", "options", "config", "expected"),
    [
        ({"publish_wait": 0.03, "select": 0.001}, 0.5, {}, FIXED, None),
        ({"reserve": 0.3, "flush": 0.01}, 0.5, {}, FIXED, None),
        (*SLOW_CPU, {}, FIXED, f"The CPU needs 1.2 steps per update: {MORE_CORES}, or raise update_interval."),
        # What `auto` raises by itself is not advised.
        (*SLOW_CPU, {}, AUTO, f"The CPU needs 1.2 steps per update: {MORE_CORES}."),
        (
            *SLOW_CPU,
            {"longest": True},
            AUTO,
            f"The CPU needs 1.2 steps per update: {MORE_CORES}, or raise max_update_interval.",
        ),
        *(
            (
                {"slot": 0.2},
                0.4,
                {"skipped": 0.01},
                config,
                f"20% of the time is spent waiting for the CPU, although it needs only 0.5 steps per update: {ALONE}{end}.",
            )
            for config, end in ((FIXED, ", or raise publish_lag"), (AUTO, ""))
        ),
        (
            {"publish_wait": 0.1, "flush": 0.2, "reserve": 0.3},
            0.5,
            {},
            AUTO,
            "20% of the time is spent completing updates before validations and checkpoints: have fewer of them.",
        ),
        (
            {"flush": 0.2},
            0.5,
            {"followed": 0.9},
            AUTO,
            "20% of the time is spent completing updates, as weights are written in place: write them in fewer steps.",
        ),
        # A worker that computes next to nothing does not lack cores.
        ({"publish_wait": 0.2}, 0.0004, {}, FIXED, None),
        (
            {"publish_wait": 0.1, "correction": 0.2},
            0.5,
            {"at_end": 0.4, "clips": True},
            TRUE_FACTORS,
            "20% of the time is spent waiting for the CPU, because the update begins in about 40% of the steps when the norm of their"
            " gradients is known: clip to a larger norm, or allow predicted factors (clip_prediction=True).",
        ),
        (
            {"publish_wait": 0.2},
            0.5,
            {"at_end": 1.0},
            TRUE_FACTORS,
            "20% of the time is spent waiting for the CPU, because the update begins at the end of about 100% of the steps: in manual"
            " optimization, run the backward pass in the closure of `optimizer.step`; else allow predicted factors"
            " (clip_prediction=True).",
        ),
        *(
            (
                *SLOW_CPU,
                {"skipped": 0.5, "fp16": fp16},
                AUTO,
                f"50% of the steps were skipped because their gradient was not finite: lower the learning rate{end}.",
            )
            for fp16, end in ((True, " or train in bf16"), (False, ", or look for NaN in the loss"))
        ),
    ],
)
def test_advice(
    waits: dict[str, float], worker: float, options: dict[str, Any], config: ZenFlowConfig, expected: str | None
) -> None:
    assert advice(waits, config, **{"worker": worker, "skipped": 0.0, **options}) == expected


def test_summary_by_hand() -> None:
    now = reading(
        steps=5,
        host_stall_s={"publish_wait": 0.2},
        device_stall_s={"publish_wait": 0.044},
        worker_busy_s=2.0,
        d2h_bytes=400,
        h2d_bytes=100,
        model_bytes=100,
        update_interval=4,
        publish_lag=1,
        in_backward_jobs=10,
        late_jobs=1,
    )
    shown = "copies a step: d2h 1.00, h2d 0.25 model sizes; update_interval=4, publish_lag=1"

    def lines(now: Reading) -> list[str]:
        return summary([0.5, 0.5, 0.5, 2.5], reading(steps=1), now, AUTO, fp16=False).splitlines()

    assert lines(now) == [
        "ZenFlow: 5 steps, median 500 ms, p99 2500 ms; waits of the device 1.1%, of the training thread 5.0%",
        f"CPU work 500 ms a step, 98% hidden; {shown}; 10.0% of the blocks late",
    ]
    # Of work and waits below 1 % of a step nothing is said that sounds like a fault.
    assert lines(replace(now, device_stall_s={"publish_wait": 0.01}, worker_busy_s=0.01)) == [
        "ZenFlow: 5 steps, median 500 ms, p99 2500 ms; waits of the device 0.2%, of the training thread 5.0%",
        f"CPU work 2.5 ms a step; {shown}",
    ]
    # Nor is a low share of what is hidden, as long as the waits for it are not worth advice.
    for waited, said in ((0.12, ""), (0.2, ", 0% hidden")):
        found = lines(replace(now, device_stall_s={"flush": waited}, worker_busy_s=0.13))
        assert found[1].startswith(f"CPU work 32.5 ms a step{said}; copies")
    late = lines(replace(now, device_stall_s={"publish_wait": 1.0}, worker_busy_s=4.0, update_interval=16))
    assert late[-1].endswith(", or raise max_update_interval.")
    counts = {
        "steps_in_backward": 3,
        "corrected_steps": 1,
        "update_interval": 1,
        "publish_lag": 0,
        "in_backward_jobs": 0,
    }
    true_factors = summary([0.5, 0.5, 0.5, 2.5], reading(steps=1), replace(now, **counts), TRUE_FACTORS, fp16=False)
    assert true_factors.splitlines()[1].endswith(
        "publish_lag=0; update in backward in 50.0% of the steps, corrected in 25.0%"
    )


def test_waits_are_counted_and_profiled() -> None:
    stalls = Telemetry(torch.device("cpu"))
    with profile() as profiler, stalls.measure("flush"):
        pass
    (wait,) = [event for event in profiler.events() if event.name == "zenflow wait: flush"]
    assert 1e-6 * wait.cpu_time_total <= stalls.seconds["flush"] == stalls.device_s


def test_events_of_waits_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On most ranks nobody reads the times."""
    kept: weakref.WeakSet[RecordedEvent] = weakref.WeakSet()
    record = RecordedEvent.record

    def noted(event: RecordedEvent, *stream: object) -> None:
        kept.add(event)
        record(event, *stream)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordedEvent, "record", noted)
    with recorded_device(events_are_reached=True):
        stalls = Telemetry(torch.device("cpu"))
        for _ in range(20):
            with stalls.measure("publish_wait"):
                pass
            assert len(kept) <= 2
