"""`Telemetry`, and `AsyncHostCopy` on a CPU device."""

import dataclasses
import weakref

import pytest
import torch

from benchmarks.recorded_device.device import RecordedEvent
from benchmarks.recorded_device.watch import recorded_device
from lightning_zenflow.core.device import AsyncHostCopy
from lightning_zenflow.telemetry.counters import Traffic
from lightning_zenflow.telemetry.telemetry import Telemetry


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry.create(torch.device("cpu"))


def test_waits_are_counted_and_traced(telemetry: Telemetry) -> None:
    recording = telemetry.tracer.record(skip=1, steps=1)
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


def test_the_record_is_frozen_and_its_traffic_is_its_own(telemetry: Telemetry) -> None:
    telemetry.traffic.d2h_bytes += 3
    assert Telemetry.create(torch.device("cpu")).traffic == Traffic()
    with pytest.raises(dataclasses.FrozenInstanceError):
        telemetry.traffic = Traffic()  # type: ignore[misc]


def test_the_copy_is_complete_at_once_and_does_not_alias() -> None:
    source = torch.tensor([1.0, 2.0], dtype=torch.float64)
    copy = AsyncHostCopy(source)
    source.fill_(7)
    assert copy.arrived
    assert copy.read().tolist() == [1.0, 2.0] and copy.read().dtype == torch.float64
