"""Waits are counted, and traced where that is asked for."""

import weakref

import pytest
import torch

from benchmarks.recorded_device.device import RecordedEvent
from benchmarks.recorded_device.watch import recorded_device
from lightning_zenflow.telemetry.telemetry import Telemetry


def test_waits_are_counted_and_traced() -> None:
    telemetry = Telemetry.create(torch.device("cpu"))
    recording = telemetry.tracer.record(skip=1)
    telemetry.tracer.begin_step(1)
    with telemetry.stalls.measure("flush"):
        pass
    telemetry.tracer.begin_step(2)
    (span,) = recording.steps[0].spans()
    assert (span.name, span.waits) == ("flush", True)
    assert telemetry.stalls.seconds == {"flush": pytest.approx(span.seconds)}


def test_events_of_waits_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On most ranks nobody reads the times."""
    kept: weakref.WeakSet[RecordedEvent] = weakref.WeakSet()
    record = RecordedEvent.record

    def noted(event: RecordedEvent, *stream: object) -> None:
        kept.add(event)
        record(event, *stream)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordedEvent, "record", noted)
    with recorded_device(events_are_reached=True):
        stalls = Telemetry.create(torch.device("cpu")).stalls
        for _ in range(20):
            with stalls.measure("publish_wait"):
                pass
            assert len(kept) <= 2
