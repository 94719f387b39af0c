"""A plain loop of `OffloadAdamW` on a device that runs behind the host, recorded: nothing races, the host does not wait between steps, and
planted errors are found.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zenflow.between_steps.served_gradients import ServedGradient
from lightning_zenflow.optimizer.engine import OptimizerEngine
from plain_loops import Loop, batch, close, make_loop
from recorded_device.clocks import HOST
from recorded_device.device import RecordedDevice
from recorded_device.tensors import DEVICE
from recorded_device.watch import recorded_device

Body = Callable[[Loop, int], object]


def steps(**options: Any) -> Body:
    """Those of `Loop.train`."""
    return lambda loop, _: loop.train(1, **options)


plain = steps()


def scaled(loop: Loop, step: int) -> None:
    loop.scaler = loop.scaler or torch.amp.GradScaler("cpu", init_scale=64.0)
    loop.train(1, max_norm=lambda _: 1.0)


def dropped(loop: Loop, step: int) -> None:
    loop.backward(100 + step)
    loop.optimizer.zero_grad()
    plain(loop, step)


def read(loop: Loop, step: int) -> None:
    loop.backward(step)
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.abs().sum()
    loop.end_step()


def saved(loop: Loop, step: int) -> None:
    plain(loop, step)
    if step % 3 == 1:
        state = loop.optimizer.state_dict()
        assert all(value["exp_avg"].count_nonzero() for value in state["state"].values())


def loaded(loop: Loop, step: int) -> None:
    plain(loop, step)
    if step == 3:
        model = {name: value.clone() for name, value in loop.model.state_dict().items()}
        loop.model.load_state_dict(model)
        loop.optimizer.load_state_dict(loop.optimizer.state_dict())


def flushed(loop: Loop, step: int) -> None:
    plain(loop, step)
    if step in (2, 3, 6):
        loop.optimizer.flush()  # type: ignore[attr-defined]  # ours


def divided(loop: Loop, step: int) -> None:
    """By one tensor of the device, gradient by gradient."""
    loop.backward(step)
    divisor = torch.full((), 2.0, device=DEVICE, dtype=torch.bfloat16)
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.div_(divisor)
    loop.end_step()


def accumulated(in_fifth: int = 3) -> Body:
    """Of three micro-batches, or another number in one step."""
    return steps(micro_batches=lambda step: in_fifth if step == 5 else 3, max_norm=lambda _: 1e3)


CASES: dict[str, tuple[Body, dict[str, Any]]] = {
    "plain": (plain, {}),
    "known": (plain, {"accumulation_steps": 1}),
    "bfloat16": (steps(max_norm=lambda _: 1.0), {"dtype": torch.bfloat16}),
    "unclipped": (steps(max_norm=lambda _: 1e3), {"accumulation_steps": 1}),
    "seldom clipped": (steps(max_norm=lambda step: 1e3 if step % 3 else 0.5), {}),
    "always clipped": (steps(max_norm=lambda _: 0.5), {}),
    "on the device": (accumulated(), {"accumulate_on": "device"}),
    "on the host": (accumulated(), {"accumulate_on": "host"}),
    "fewer": (accumulated(2), {"accumulate_on": "host"}),
    "predicted": (steps(max_norm=lambda step: 1e3 if step == 5 else 0.5), {"clip_prediction": True}),
    "scaler": (scaled, {}),
    "scaler, predicted": (scaled, {"clip_prediction": True}),
    "dropped": (dropped, {}),
    "read": (read, {"accumulation_steps": 1}),
    "saved": (saved, {}),
    "loaded": (loaded, {}),
    "flushed": (flushed, {}),
    "divided": (divided, {}),
}


FAST = ("known", "seldom clipped", "predicted", "on the host", "scaler, predicted")


def record(
    name: str, *, events_are_reached: bool = False, begin: Callable[[RecordedDevice], None] = lambda _: None
) -> tuple[RecordedDevice, dict[str, int], list[str]]:
    """Trains, and returns the races and the waits of the host until the last step's end."""
    body, keys = CASES[name]
    with recorded_device(events_are_reached=events_are_reached) as device:
        begin(device)
        loop = make_loop("ours", device=DEVICE, scheduled=False, **keys)
        loop.batch_of = lambda number: device.from_page_locked(batch(number))
        try:
            for step in range(8):
                body(loop, step)
                device.note("step", HOST, event=step)
            found = dict(device.order.races), device.waits()
            assert torch.stack(loop.losses).isfinite().all()
        finally:
            close(loop)
    return device, *found


IN_CLIPPED = {"in_flight.await_buffer"}
"""Where more blocks are submitted at the end than there are publish buffers."""
IN_FLUSHES = {*IN_CLIPPED, "jobs._forget_words", "step._flush", "uses._numbers"}
IN_SAVES = {*IN_FLUSHES, "step.state_dict"}
WAITS: dict[str, set[str]] = {
    "bfloat16": IN_CLIPPED,
    "seldom clipped": IN_CLIPPED,
    "always clipped": IN_CLIPPED,
    "fewer": IN_CLIPPED,
    # Of torch itself.
    "scaler": {*IN_CLIPPED, ""},
    "scaler, predicted": {""},
    "divided": IN_CLIPPED,
    "dropped": IN_FLUSHES,
    "read": {"fill.gradient", "fill.<listcomp>", "full_state._whole"},
    "saved": IN_SAVES,
    "loaded": {
        *IN_SAVES,
        *("uses.<dictcomp>", "uses.take_over", "moments.write", "training.continue_from", "step._change_trained"),
    },
    "flushed": IN_FLUSHES,
}
"""Where the host must wait; nowhere in the others, between the fourth step and the last."""


def some(names: Any, fast: tuple[str, ...]) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "events_are_reached", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["late", "early"]
)
@pytest.mark.parametrize("name", some(CASES, FAST))
def test_every_access_is_ordered(name: str, events_are_reached: bool) -> None:
    """And the host waits where it must only."""
    _, races, waits = record(name, events_are_reached=events_are_reached)
    assert not races
    assert {*waits} <= WAITS.get(name, set())


class OtherStream:
    """Runs every second hook on a stream of its own, as autograd does where the forward pass had one.

    Args:
        patch: lasts as long as the training.
        allocates: whether gradients are in memory of that stream, as FSDP2's, and not of the training's.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, allocates: bool) -> None:
        self._arrived, self._end = OptimizerEngine.arrived, OptimizerEngine._end_backward
        self._allocates, self._calls = allocates, itertools.count()
        patch.setattr(OptimizerEngine, "arrived", lambda engine, p: self.arrived(engine, p))
        patch.setattr(OptimizerEngine, "_end_backward", lambda engine: self.end(engine))

    def begin(self, device: RecordedDevice) -> None:
        self._device, self._stream = device, device.new_stream()

    def arrived(self, engine: OptimizerEngine, parameter: Tensor) -> None:
        if next(self._calls) % 2:
            self._arrived(engine, parameter)
            return
        self._stream.wait_stream(self._device.main)
        given = parameter.grad
        with self._device.on(self._stream):
            if self._allocates and not isinstance(given, ServedGradient):
                assert given is not None
                parameter.grad = given.clone()
                given.record_stream(self._stream)  # type: ignore[arg-type]  # recorded
            self._arrived(engine, parameter)

    def end(self, engine: OptimizerEngine) -> None:
        # As autograd at the end of a backward pass, of the streams of leaves; and FSDP2.
        self._device.main.wait_stream(self._stream)
        self._end(engine)


@pytest.mark.parametrize("allocates", [False, True])
@pytest.mark.parametrize("name", some(["known", "seldom clipped", "on the device", "on the host", "saved"], ("known",)))
def test_hooks_on_another_stream(name: str, allocates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, races, waits = record(name, begin=OtherStream(monkeypatch, allocates=allocates).begin)
    assert not races
    assert {*waits} <= WAITS.get(name, set())


PLANTED = {
    "hooks' streams without order": (OptimizerEngine, "_follow_stream", "known", "in step_inputs.up_to"),
    "memory of the training's stream reused in a hook's": (
        RecordedDevice,
        "keep_for",
        "on the device",
        "read by copy_ in fill.add on stream",
    ),
}
"""What then does nothing, the case that finds the error, and what is found. Others: tests/training/test_device_order.py."""


@pytest.mark.parametrize("error", some(PLANTED, tuple(PLANTED)[:1]))
def test_planted_errors_of_streams_are_found(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, name, found = PLANTED[error]
    begin = OtherStream(monkeypatch, allocates=False).begin
    monkeypatch.setattr(owner, method, lambda *_: None)
    _, races, _ = record(name, begin=begin)
    assert any(found in race for race in races), races
