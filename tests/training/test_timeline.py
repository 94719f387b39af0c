"""The timeline of a training: a valid Chrome trace with the right lanes, spans and waits."""

import json
import logging
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness import fit
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.monitor.timeline import STEP_LANE
from lightning_zenflow.telemetry.tracing import LANES
from networks import SmallNet

FIRST, LAST = 5, 9


def train(path: Path, *, steps: int, **keys: Any) -> None:
    given = {"update_interval": 4, "publish_lag": 1, "worker_cores": 1, "select_interval": 0, "timeline": path}
    strategy = ZenFlowStrategy(**{**given, **keys})
    fit(SmallNet(length=2 * steps), strategy, steps=steps, accumulate_grad_batches=2)


Lanes = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("timeline") / "logs" / "timeline.json"
    train(path, steps=12, timeline_steps=[FIRST, LAST])
    return list(json.loads(path.read_text())["traceEvents"])


@pytest.fixture(scope="module")
def lanes(events: list[dict[str, Any]]) -> Lanes:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: Lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[names[event["pid"], event["tid"]]].append(event)
    return spans


def test_is_a_chrome_trace(events: list[dict[str, Any]]) -> None:
    """The keys that the format asks of metadata and of complete events, with their types; in the order of time."""
    for event in events:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
        else:
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["cat"], str)
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert times == sorted(times)


def test_lanes(lanes: Lanes) -> None:
    # Where the CPU trains, the device's waits are the training thread's; it may have none.
    others = {"waits of the device", "waits of the training thread", "worker"}
    assert set(lanes) - others == {STEP_LANE, *LANES} - others
    assert [event["name"] for event in lanes[STEP_LANE]] == [f"step {step}" for step in range(FIRST, LAST + 1)]
    n_steps = LAST - FIRST + 1
    assert len(lanes["forward"]) == len(lanes["backward"]) == 2 * n_steps, "two micro-batches a step"
    assert len(lanes["exact step"]) == n_steps
    # One block's window closes in each step, and its job waits for its data before it computes.
    assert len(lanes["worker"]) == 2 * n_steps
    assert {event["name"] for event in lanes["worker"]} == {"wait for gradients", *(f"block {i}" for i in range(4))}


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    starts, ends = outer["ts"] - 1e-3, outer["ts"] + outer["dur"] + 1e-3
    return bool(starts <= inner["ts"] and inner["ts"] + inner["dur"] <= ends)


def test_spans_lie_within_their_step_one_after_the_other(lanes: Lanes) -> None:
    steps = {event["args"]["step"]: event for event in lanes[STEP_LANE]}
    for name, spans in lanes.items():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(spans)), name
        assert name == "worker" or all(inside(span, steps[span["args"]["step"]]) for span in spans), name


def test_copies_have_their_bytes(lanes: Lanes) -> None:
    parameters = list(SmallNet(length=1).parameters())
    n_bytes = 4 * sum(p.numel() for p in parameters)
    late = [span["args"] for span in lanes["d2h copies"] if not any(inside(span, outer) for outer in lanes["backward"])]
    # Those of biases and norms, together.
    vectors = 4 * sum(p.numel() for p in parameters if p.dim() < 2)
    assert [(args["step"], args["bytes"]) for args in late] == [(step, vectors) for step in range(FIRST, LAST + 1)]
    for step in range(FIRST, LAST + 1):
        assert sum(e["args"]["bytes"] for e in lanes["d2h copies"] if e["args"]["step"] == step) == n_bytes
    h2d = sum(event["args"]["bytes"] for event in lanes["h2d copies"] if event["args"]["step"] < FIRST + 4)
    assert h2d == n_bytes, "every block once in S steps"


def test_waits_are_red(lanes: Lanes) -> None:
    for name, spans in lanes.items():
        for span in spans:
            is_wait = name.startswith("waits") or span["name"].startswith("wait for")
            assert (span.get("cname"), span["cat"] == "wait") == (("terrible", True) if is_wait else (None, False))


@pytest.mark.parametrize(
    ("name", "steps", "message"),
    [
        ("short.json", 6, "timeline of steps 5 to 6 in "),
        ("none.json", 3, "none.json': training ended before step 5"),
        ("/proc/no/such/timeline.json", 10, "timeline='/proc/no/such/timeline.json' could not be written"),
    ],
)
def test_a_training_that_ends_early_and_a_path_that_cannot_be_written(
    name: str, steps: int, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train(tmp_path / name, steps=steps)
    assert any(message in logged for logged in caplog.messages)
    assert (tmp_path / name).exists() == (name == "short.json")
