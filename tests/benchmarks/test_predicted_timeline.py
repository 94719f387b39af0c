"""Timelines predicted from recordings: their rules by hand, and what they say about the order of a real training."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.recorded_device.clocks import HOST, MAIN, WORKER, Operation
from benchmarks.recorded_device.prediction import Setting, predict, without_limits
from benchmarks.recorded_device.rates import DEVICES, Rates, Scale
from benchmarks.recorded_device.recording import Recording, record_gpt
from benchmarks.recorded_device.timeline import Timeline, end_of_backward, run, traces
from lightning_zenflow.deferred.publish import Publisher
from lightning_zenflow.monitor.plot import lanes
from lightning_zenflow.monitor.timeline import chrome_trace

RATES = Rates(matmul=1, memory=1, pcie=1, worker=1, call_s=0, launch_s=0)
SCALE = Scale(
    params=1, tokens=1, recorded_params=1, recorded_matrices=1, recorded_tokens=1, recorded_flops=1, matrix_numel=1
)
SETTING = Setting(device="h200", params=1.45e9, tokens=8192, update_interval=4, publish_lag=1)


def work(kind: str, seconds: int, actor: str = MAIN) -> Operation:
    """An operation that takes so many seconds by `RATES` and `SCALE`."""
    return Operation(kind=kind, actor=actor, n_bytes=seconds, numel=seconds, place="package")


def times(operations: Sequence[Operation], rates: Rates = RATES) -> tuple[list[tuple[float, float]], Timeline]:
    timeline = run(operations, rates, SCALE)
    return [(t.begin, t.end) for t in timeline.timed], timeline


def on_event(kind: str, event: int, actor: str = MAIN) -> Operation:
    return Operation(kind=kind, actor=actor, event=event)


def test_streams_share_engines() -> None:
    """One for computation, one for each direction; what is enqueued later fills gaps."""
    found, timeline = times(
        [
            work("launch", 2),
            on_event("record", 1),
            on_event("wait", 1, "a"),
            work("d2h", 5, "a"),
            work("h2d", 3, "b"),
            on_event("record", 2, "a"),
            on_event("wait", 2),
            work("launch", 2),
            work("launch", 4, "b"),
            work("launch", 2, "c"),
        ]
    )
    assert found == [(0, 2), (2, 7), (0, 3), (7, 9), (3, 7), (9, 11)]
    assert timeline.idle(0, 11) == {"launches": 0, "copies": 1, "worker": 0, "latency": 0}


def test_the_host_enqueues() -> None:
    found, timeline = times(
        [work("launch", 1), Operation(kind=HOST, actor=HOST), work("launch", 1)], replace(RATES, call_s=3)
    )
    assert found == [(3, 4), (9, 10)]
    assert timeline.idle(0, 10)["launches"] == 8


def test_the_worker_waits_for_its_word_and_the_host_for_the_worker() -> None:
    job = Operation(kind="replay", actor=WORKER, event=7, n_bytes=5)
    word = [work("launch", 1), work("d2h", 2), Operation(kind="submit", actor=HOST, event=7, after=1)]
    found, timeline = times([*word, job, work("launch", 1), Operation(kind="step", actor=HOST, event=1)])
    assert timeline.jobs == [(7, 3, 8)]
    assert found[-1] == (8, 9)
    assert timeline.ends == {1: 9}
    assert timeline.idle(0, 9) == {"launches": 0, "copies": 2, "worker": 5, "latency": 0}


@pytest.fixture(scope="module")
def recording() -> Recording:
    """S = 4, d = 1, with clipping; six layers."""
    return record_gpt(update_interval=4, publish_lag=1, model=25e6)


def share_in_backward(recording: Recording) -> list[float]:
    """For each settled step the share of published bytes that are in the model before backward ends, with jobs that are done in time."""
    scale = recording.scale(SETTING.params, SETTING.tokens)
    timeline = run(recording.operations, replace(SETTING.rates, worker=float("inf")), scale)
    shares = []
    for step in recording.steps:
        copies = [t for t in timeline.of_step[step] if t.operation.kind == "h2d"]
        end = end_of_backward(timeline.of_step[step])
        early = [t for t in copies if t.end <= end]
        shares.append(sum(t.operation.n_bytes for t in early) / sum(t.operation.n_bytes for t in copies))
    return shares


def test_published_weights_come_up_in_backward(recording: Recording) -> None:
    """All but the block of the first layers, whose gradients come last, though the host enqueues them at the end of the step."""
    assert sorted(share_in_backward(recording))[1:] == [1, 1, 1]


def test_weights_behind_the_whole_step_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: Publisher, job: object, name: str) -> int:
        job.unread.clear()  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(Publisher, "_copy_unread", forgets)
    assert max(share_in_backward(record_gpt(update_interval=4, publish_lag=1, model=25e6))) == 0


def test_an_ideal_machine_takes_the_models_time(recording: Recording) -> None:
    rates = without_limits()
    prediction = predict(SETTING, recording, rates)
    matmul_s = 6 * SETTING.params * SETTING.tokens / rates.matmul
    assert prediction.step_s == pytest.approx(matmul_s)
    assert prediction.alone_s == pytest.approx(matmul_s)
    assert sum(prediction.idle_s.values()) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_work_and_idle_time(recording: Recording, device: str) -> None:
    prediction = predict(replace(SETTING, device=device), recording)
    accounted = prediction.model_s + prediction.other_s + sum(prediction.idle_s.values())
    # Work at the end of a step may be enqueued in the next one, on a stream of its own.
    assert accounted == pytest.approx(prediction.step_s, rel=0.02)
    assert prediction.step_s > prediction.alone_s


def test_the_timeline_is_one_of_the_monitor(recording: Recording) -> None:
    timeline = run(recording.operations, SETTING.rates, recording.scale(SETTING.params, SETTING.tokens))
    trace = chrome_trace(traces(timeline, recording.steps))
    assert {"steps", "forward", "backward", "exact step", "provisional update", "d2h copies", "h2d copies"} <= {
        *lanes(trace).values()
    }
    steps = [e for e in trace["traceEvents"] if e.get("cat") == "step"]
    assert [e["args"]["step"] for e in steps] == list(recording.steps)
