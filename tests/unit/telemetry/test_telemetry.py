"""Waits are counted, and torch's profiler shows them."""

import weakref

import pytest
import torch
from torch.profiler import profile

from lightning_zenflow.telemetry import Telemetry
from recorded_device.device import RecordedEvent
from recorded_device.watch import recorded_device


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
