"""On a CUDA device: order between streams, and between device, host and worker. Delays anywhere change no bit."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks import At
from gpu_cases import MILLISECOND, RACES, device
from harness import Case, Run, run_here, workers
from lightning_zenflow.core.step_inputs import step_word
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.offload.columns import DeviceColumns
from lightning_zenflow.offload.fill import Fill
from lightning_zenflow.offload.in_flight import JobsInFlight
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.worker.process import SupervisedWorker
from same_bits import assert_same_state
from worker_killer import seen

pytestmark = pytest.mark.gpu


class SlowBackward(pl.Callback):
    """The device sleeps before a gradient is there."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parameters = list(pl_module.parameters())[::3]
        self._hooks = [p.register_hook(lambda _: torch.cuda._sleep(MILLISECOND)) for p in parameters]

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()


def stop_worker(trainer: pl.Trainer) -> None:
    """For a third of a second, in two steps."""
    if trainer.global_step in (5, 9):
        (pid,) = workers()
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (pid, signal.SIGCONT)).start()


def late(owner: type, method: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Has the device sleep, on the stream that is current there, before the work that a method enqueues; in every third call."""

    # Here, so that a name that is gone is noticed where there is no GPU too.
    original = getattr(owner, method)

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        calls = itertools.count()

        def slow(*args: Any, **kwargs: Any) -> Any:
            if next(calls) % 3 == 0:
                torch.cuda._sleep(2 * MILLISECOND)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, slow)

    return install


def published_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every due job is waited for in backward, and the device sleeps before its weights arrive."""
    monkeypatch.setattr(SupervisedWorker, "has_answered", lambda self, job: seen(self, job, True))
    late(JobsInFlight, "_copy")(monkeypatch)


def published_after_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is seen to be done before the step's end."""
    monkeypatch.setattr(SupervisedWorker, "has_answered", lambda self, job: seen(self, job, False))


DELAYS: dict[str, Callable[[pytest.MonkeyPatch], None] | pl.Callback] = {
    "backward": SlowBackward(),
    "worker": At("on_train_batch_start", stop_worker),
    "reduced gradients": late(Fill, "_route_rectangles"),
    "copies to the host": late(Kernels, "route"),
    "sums of gradients": late(Fill, "finish"),
    "the step's number": late(JobQueue, "seal"),
    "the device's update": late(DeviceColumns, "step"),
    "copies from the host": late(JobQueue, "publish"),
    "copies from the host, in backward": published_in_backward,
    "copies from the host, after backward": published_after_backward,
    "the device's weights": late(DeviceColumns, "write_weights"),
}


def digests_of(case: Case, *callbacks: pl.Callback) -> tuple[Run, Tensor]:
    """A run, and one number of every parameter after every step: the sum of its bits as integers. Nothing waits for the device before the
    end.
    """
    digests = list[Tensor]()

    def digest(trainer: pl.Trainer) -> None:
        parameters = trainer.lightning_module.parameters()
        digests.append(torch.stack([p.detach().view(torch.int16).sum(dtype=torch.int64) for p in parameters]))

    run = run_here(case, callbacks=[At("on_train_batch_end", digest), *callbacks])
    assert len(digests) == case.steps * case.accumulate
    return run, torch.stack(digests).cpu()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[Run, Tensor]]:
    """Runs in which the device is waited for before and after every step's phases, so that nothing can overtake anything."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, method in (
            (Fill, "_route_rectangles"),
            (JobQueue, "seal"),
            (JobQueue, "publish"),
            (DeviceColumns, "step"),
        ):
            original = getattr(owner, method)

            def waited_for(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                torch.cuda.synchronize()
                result = _original(*args, **kwargs)
                torch.cuda.synchronize()
                return result

            patch.setattr(owner, method, waited_for)
        return {name: digests_of(case) for name, case in RACES.items()}


def test_a_word_is_seen_behind_what_was_copied_before_it() -> None:
    """By a host that polls and does not wait for the device, as the worker: see protocol.h on what is assumed of the bus."""
    numel, n_steps = 2**20, 20_000
    host = torch.empty(numel, dtype=torch.int32, pin_memory=True)
    words = torch.zeros(4, 16, dtype=torch.int32, pin_memory=True)[:, :4]
    factors, steps = words.view(torch.float32)[:, 0], words.view(torch.int64)[:, 1]
    values, factor = torch.zeros(numel, dtype=torch.int32, device=device()), torch.ones((), device=device())
    places = torch.tensor([0, numel // 3, numel - 1])
    for step in range(1, n_steps + 1):
        values.fill_(step)
        factor.fill_(step)
        host.copy_(values, non_blocking=True)
        words[step % 4].copy_(step_word(factor, step), non_blocking=True)
        deadline = time.monotonic() + 60
        while int(steps[step % 4]) != step:
            assert time.monotonic() < deadline
        assert host[places].tolist() == [step] * 3
        assert float(factors[step % 4]) == step


@pytest.mark.parametrize("delay", [None, *DELAYS])
@pytest.mark.parametrize("name", RACES)
def test_delays_change_no_bit(
    name: str, delay: str | None, undisturbed: dict[str, tuple[Run, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = DELAYS[delay] if delay else None
    if callable(slow):
        slow(monkeypatch)
    run, digests = digests_of(RACES[name], *([slow] if isinstance(slow, pl.Callback) else []))
    expected_run, expected = undisturbed[name]
    different = (digests != expected).nonzero()
    assert different.numel() == 0, f"weights first differ in (micro-batch, parameter) {different[0].tolist()}"
    assert_same_state(run, expected_run)
