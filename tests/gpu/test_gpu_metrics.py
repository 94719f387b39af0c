"""On a CUDA device: monitoring waits for nothing, its numbers arrive, and the timeline has the device's own times on the host's clock."""

import csv
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from test_gpu_memory import WAITING, Profile

from gpu_cases import RACES
from harness import APPROXIMATE, fit
from lightning_zenflow.monitor.metrics import METRICS
from lightning_zenflow.monitor.timeline import STEP_LANE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_cuda", "no_worker_is_left")]

OPTIONS = {**APPROXIMATE, "reduce_bucket_size": 400_000}
CASE = replace(RACES["a network"], steps=24, update_interval=4, publish_lag=1, strategy_options=OPTIONS)


def train(case: Any, **options: Any) -> None:
    trainer_options = {"accelerator": "gpu", "precision": case.precision, **options}
    fit(case.make_model(), case.make_strategy(), steps=case.steps, **trainer_options)


def test_monitored_steps_do_not_wait_and_all_metrics_are_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    profiled = Profile(first=8, last=16)
    reselecting = replace(CASE, strategy_options={**OPTIONS, "select_interval": 18})
    train(reselecting, logger=logger, log_every_n_steps=2, callbacks=[profiled])
    waits = [name for name in profiled.calls if name in WAITING]
    assert not waits and not profiled.places, f"{sorted(set(waits))}; called at {sorted(set(profiled.places))}"
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        last = {name: float(value) for name, value in list(csv.DictReader(file))[-1].items() if value}
    assert set(METRICS) <= set(last)
    assert last["zenflow/memory/device_peak_GB"] > 0
    assert last["zenflow/traffic/d2h_GB_per_s"] > 0.1
    assert 0 <= last["zenflow/stall/device_percent"] <= 100


def test_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    train(replace(CASE, strategy_options={**OPTIONS, "timeline": path, "timeline_steps": [9, 14]}))
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[names[event["pid"], event["tid"]]].append(event)
    assert {
        "forward",
        "backward",
        "exact step",
        "d2h copies",
        "h2d copies",
        "waits of the device",
        "worker",
    } <= set(lanes)
    for name, spans in lanes.items():
        if name != STEP_LANE:
            for before, after in pairwise(spans):
                # Events are exact to half a microsecond.
                assert before["ts"] + before["dur"] <= after["ts"] + 2, name
    # The worker computes only what has arrived: the gradients of the step before the one that publishes it, and those before.
    arrived: dict[int, float] = defaultdict(float)
    for event in lanes["d2h copies"]:
        arrived[event["args"]["step"]] = max(arrived[event["args"]["step"]], event["ts"] + event["dur"])
    for event in lanes["worker"]:
        if event["cat"] != "wait" and event["args"]["step"] > 9:
            assert event["ts"] + 100 >= arrived[event["args"]["step"] - 1]
