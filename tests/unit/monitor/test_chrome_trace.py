"""Conversion of recorded steps to the Chrome trace format, without a training."""

import json
from pathlib import Path

import pytest
import torch

from lightning_zenflow.cli import main
from lightning_zenflow.monitor.timeline import STEP_LANE, chrome_trace
from lightning_zenflow.native.protocol import ThreadSpan
from lightning_zenflow.telemetry.counters import Completion
from lightning_zenflow.telemetry.tracing import MAX_WORKER_LANES, Tracer


def test_many_threads_share_lanes() -> None:
    tracer = Tracer(torch.device("cpu"), worker_threads=40)
    recording = tracer.record(skip=1, steps=1)
    tracer.begin_step(1)
    for block, n_threads in ((0, 40), (1, 3)):
        start_ns = 1000 * block
        threads = [ThreadSpan(begin_ns=start_ns + 100 + t, end_ns=start_ns + 500 + t) for t in range(n_threads)]
        completion = Completion(job_id=1, start_ns=start_ns, wait_ns=100, busy_ns=400, threads=threads)
        tracer.add_job(block, completion)
    tracer.begin_step(2)
    events = chrome_trace(recording.steps)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values())[:4] == [
        STEP_LANE,
        "worker threads 0 to 1",
        "worker threads 2 to 4",
        "worker threads 5 to 6",
    ]
    assert len(names) == 1 + MAX_WORKER_LANES
    spans = [s for s in recording.steps[0].spans() if s.threads == range(2, 5)]
    assert [(s.name, s.begin_ns, s.end_ns) for s in spans] == [("block 0", 102, 504), ("block 1", 1102, 1502)]
    assert len([e for e in events if e["name"] == "block 1"]) == 2, "three threads of forty are in two lanes"


def test_files_that_are_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    for content, message in (("{", "must be a JSON file"), (json.dumps({"a": 1}), "without a list `traceEvents`")):
        other.write_text(content)
        with pytest.raises(SystemExit):
            main(["timeline", str(other), "--png", str(tmp_path / "out.png")])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["timeline", str(tmp_path / "missing.json"), "--png", str(tmp_path / "out.png")])
    assert "missing.json" in capsys.readouterr().err
