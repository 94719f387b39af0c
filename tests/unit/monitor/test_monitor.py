"""Metrics of an interval, the summary and its sentence of advice, and the conversion to the Chrome trace format; by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_zenflow import ZenFlowConfig
from lightning_zenflow.monitor.metrics import METRICS, interval_metrics
from lightning_zenflow.monitor.summary import Situation, advice, quantile, summary
from lightning_zenflow.monitor.timeline import STEP_LANE, chrome_trace
from lightning_zenflow.schedule.auto_policy import relative_cost
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.telemetry.counters import Completion, Reading
from lightning_zenflow.telemetry.tracing import Span, StepTrace, Tracer

FIXED = ZenFlowConfig(update_interval=4, publish_lag=1, select_interval=50)


def reading(**values: Any) -> Reading:
    zeros = dict.fromkeys(Reading.__dataclass_fields__, 0)
    return Reading(**{**zeros, "host_stall_s": {}, "device_stall_s": {}, **values})


def test_names_have_a_group_and_a_unit_or_are_counts() -> None:
    units = ("_ms", "_percent", "_steps", "_model_sizes", "_GB_per_s", "_GB")
    for name in METRICS:
        prefix, group, metric = name.split("/")
        assert (prefix, group in {"stall", "overlap", "traffic", "selection", "memory"}) == ("zenflow", True)
        assert metric.endswith(units) or metric == "worker_restarts", name


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
    span = Span(lane="d2h copies", name="gradient", begin_ns=0, end_ns=500_000_000, n_bytes=2_000_000_000)
    trace = StepTrace(step=13, begin_ns=0, end_ns=2_000_000_000, host_spans=[span])
    metrics = interval_metrics(before, now, seconds=8.0, trace=trace)
    expected = {
        "stall/device_percent": 6,
        "stall/host_percent": 2.5,
        "stall/worker_percent": 2,
        "stall/select_percent": 3.75,
        "stall/other_percent": 0.25,
        "stall/flush_percent": 0,
        "stall/device_copy_ms": 0,
        "overlap/step_ms": 2000,
        "overlap/worker_busy_percent": 25,
        "traffic/d2h_model_sizes": 1,
        "traffic/h2d_model_sizes": 0.125,
        "traffic/d2h_GB_per_s": 4,
        "selection/device_owned_percent": 25,
        "memory/arena_GB": 3,
    }
    assert {name: metrics[f"zenflow/{name}"] for name in expected} == pytest.approx(expected)
    unknown = {"traffic/h2d_GB_per_s", "selection/device_squared_norm_percent", "overlap/late_blocks_percent"}
    assert set(METRICS) - set(metrics) == {f"zenflow/{name}" for name in unknown}


def schedule(s: int, d: int) -> UpdateSchedule:
    return UpdateSchedule(update_interval=s, publish_lag=d)


CALM = Situation(
    config=FIXED,
    schedule=schedule(4, 1),
    step_s=1.0,
    stall_s={"publish_wait": 0.005, "select": 0.001},
    worker_busy_s=0.5,
    worker_cores=10,
    skipped_share=0.0,
)
SLOW = replace(CALM, step_s=1.4, stall_s={"publish_wait": 0.4, "select": 0.0}, worker_busy_s=1.2)
AUTO = replace(SLOW, config=ZenFlowConfig())
IMMEDIATE = replace(SLOW, config=ZenFlowConfig(update_interval=4, publish_lag=0), schedule=schedule(4, 0))
WAITS = "29% of the time is spent waiting for the CPU"


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (CALM, None),
        (replace(CALM, stall_s={"reserve": 0.3, "flush": 0.01}), None),
        (SLOW, "The CPU needs 1.2 steps per update: raise update_interval to 9 or give the worker 5 more cores."),
        # The largest S that `auto` may take.
        (
            replace(AUTO, worker_busy_s=1.0, schedule=schedule(16, 2)),
            "The CPU needs 1.0 steps per update: raise max_update_interval to 64 or give the worker 2 more cores.",
        ),
        # It may take a larger one.
        (replace(AUTO, worker_cores=2), "The CPU needs 1.2 steps per update: give the worker 1 more core."),
        (
            replace(SLOW, worker_busy_s=9.0, worker_cores=1),
            "The CPU needs 9.0 steps per update: give the worker 10 more cores.",
        ),
        (IMMEDIATE, f"{WAITS}, since publish_lag is 0: set it to 1, or to auto if runs need not repeat."),
        (
            replace(IMMEDIATE, late_share=0.2),
            f"{WAITS}: 20% of the blocks were not updated when backward ended. Set publish_lag to 1, or if runs need not repeat, tail to"
            " device, or publish_lag to auto.",
        ),
        (
            replace(IMMEDIATE, config=ZenFlowConfig(overlap_step=False)),
            f"{WAITS}, since overlap_step is false: set it to true.",
        ),
        (
            replace(SLOW, worker_busy_s=0.6),
            f"{WAITS}, although it needs only 0.6 steps per update: raise publish_lag to 2 or keep other processes off the worker's cores.",
        ),
        (
            replace(CALM, stall_s={"publish_wait": 0.1, "flush": 0.2}),
            "20% of the time is spent completing updates before validations and checkpoints: have fewer of them.",
        ),
        (
            replace(CALM, stall_s={"reserve": 0.3, "select": 0.1}),
            "10% of the time is spent selecting columns: raise select_interval.",
        ),
        # "auto" selects ever less often.
        (replace(CALM, config=ZenFlowConfig(), stall_s={"select": 0.1}), None),
        (
            replace(SLOW, skipped_share=0.5),
            "50% of the steps were skipped because their gradient was not finite: lower the learning rate or train in bf16.",
        ),
    ],
)
def test_advice(situation: Situation, expected: str | None) -> None:
    assert advice(situation) == expected


def test_the_advised_interval_hides_the_work_and_none_below_does() -> None:
    present = relative_cost(4)
    assert 1.2 * relative_cost(9) / present <= 0.85 < 1.2 * relative_cost(8) / present


def test_summary_by_hand() -> None:
    now = reading(
        steps=5,
        host_stall_s={"publish_wait": 0.2},
        device_stall_s={"publish_wait": 0.04},
        worker_busy_s=2.0,
        d2h_bytes=400,
        h2d_bytes=100,
        model_bytes=100,
        update_interval=4,
        publish_lag=1,
    )
    text = summary([0.5, 0.5, 0.5, 2.5], reading(steps=1), now, config=FIXED, worker_cores=2)
    assert text.splitlines() == [
        "ZenFlow: 5 steps; the averages leave out the first one",
        "step, median and p99  500 and 2500 ms",
        "waits                 device 1.0%, training thread 5.0% of the time",
        "CPU work              500 ms a step, 98.0% hidden",
        "copies a step         d2h 1.00, h2d 0.25 model sizes",
        "schedule at the end   update_interval=4, publish_lag=1",
    ]
    now = replace(now, device_stall_s={"publish_wait": 1.0}, worker_busy_s=4.0)
    text = summary([0.5, 0.5, 0.5, 2.5], reading(steps=1), now, config=FIXED, worker_cores=2)
    assert text.splitlines()[-1].startswith("The CPU needs 1.3 steps per update: raise update_interval to ")


def test_quantiles() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([7.0], 0.99)) == (50, 99, 7)


def test_a_job_of_the_worker_in_a_chrome_trace() -> None:
    tracer = Tracer(torch.device("cpu"))
    recording = tracer.record(skip=1, steps=1)
    tracer.begin_step(1)
    tracer.add_job(3, Completion(job_id=1, start_ns=1000, wait_ns=2000, busy_ns=4000))
    tracer.begin_step(2)
    assert recording.complete
    *metadata, wait, block, step = chrome_trace(recording.steps, worker_cores=[5])["traceEvents"]
    names = [e["args"]["name"] for e in metadata if "name" in e["args"]]
    assert names == ["training, worker on cores [5]", STEP_LANE, "worker"]
    assert (wait["name"], wait["ts"], wait["dur"], wait["cat"]) == ("wait for gradients", 0, 2, "wait")
    assert (block["name"], block["ts"], block["dur"], block["cat"]) == ("block 3", 2, 4, "worker")
    assert step["name"] == "step 1" and block["args"] == {"step": 1}
