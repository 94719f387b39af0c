"""Fetches of parameters in host memory behind the worker's updates: nothing reads stale weights, nothing waits before it must."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from typing_extensions import override

from callbacks import At
from harness import make_trainer, optimizer_of, weights_of
from interrupts import Interrupt, strides, sweep
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deepspeed.fetch import FetchCoordinator
from lightning_zenflow.worker.process import JobMessage, Submission, SupervisedWorker
from networks import Deep

WIDTH, STEPS = 64, 5
OPTIONS: dict[str, Any] = {"n_layers": 5, "width": WIDTH, "used_again": True}


def fit(
    *callbacks: pl.Callback, model: Deep | None = None, offload_parameters: bool = True, max_steps: int = STEPS
) -> Deep:
    """A training whose parameters are partitioned one by one, with prefetches."""
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu" if offload_parameters else "none"},
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 2 * WIDTH * WIDTH,
        "reduce_bucket_size": WIDTH * WIDTH,
    }
    keys = {"update_interval": 1, "publish_lag": 0, "topk_ratio": 0, "worker_cores": 1, "stall_monitor": False}
    strategy, model = ZenFlowStrategy({"zero_optimization": zero}, **keys), model or Deep(**OPTIONS)
    trainer = make_trainer(strategy, max_steps=max_steps, callbacks=list(callbacks))
    trainer.fit(model)
    return model


class SleepingWorker(pl.Callback):
    """The worker sleeps but while the training thread waits for it, and counts as not done until then."""

    def __init__(self) -> None:
        self.pid = 0  # during training
        self.doing: Any = None
        self.waits: list[tuple[Any, set[int]]] = []
        """Waits for a sleeping worker: "step", the module whose weights were fetched, or None; and the blocks."""
        self.blocks: dict[nn.Module, set[int]] = {}
        """Of each layer."""
        hooks = {
            "on_before_backward": "backward",
            "on_before_optimizer_step": "step",
            "on_train_batch_end": "between steps",
        }
        for hook, doing in hooks.items():
            setattr(self, hook, lambda *_, doing=doing: setattr(self, "doing", doing))

    @contextmanager
    def sleeps(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Context of the training."""
        wait_for, has_answered = SupervisedWorker.wait_for, SupervisedWorker.has_answered
        fetch_module = FetchCoordinator.fetch_sub_module

        def wakes(worker: SupervisedWorker, *submissions: Submission) -> None:
            waits = self.pid and not any(s.is_answered for s in submissions)
            if waits:
                os.kill(self.pid, signal.SIGCONT)
                jobs = [s.message for s in submissions if isinstance(s.message, JobMessage)]
                self.waits.append((self.doing, {job.block for job in jobs}))
            wait_for(worker, *submissions)
            if waits:
                os.kill(self.pid, signal.SIGSTOP)

        def watched_fetch(coordinator: FetchCoordinator, module: nn.Module, forward: bool) -> None:
            before, self.doing = self.doing, module if forward else self.doing
            fetch_module(coordinator, module, forward)
            self.doing = before

        with monkeypatch.context() as patch:
            patch.setattr(SupervisedWorker, "wait_for", wakes)
            patch.setattr(SupervisedWorker, "has_answered", lambda w, s: not self.pid and has_answered(w, s))
            patch.setattr(FetchCoordinator, "fetch_sub_module", watched_fetch)
            yield

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = optimizer_of(trainer)
        blocks = optimizer.training.parts.rank.blocks
        for layer, parameter in zip(pl_module.layers, pl_module.parameters(), strict=True):
            index = optimizer.training.slice_of[parameter]
            self.blocks[layer] = {block.number for block in blocks.of_slice[index]}
        # Where it is used outside of its module, DeepSpeed fetches it for the module that does.
        self.blocks[pl_module] = self.blocks[pl_module.layers[0]]

        worker = optimizer.training.parts.rank.worker
        assert worker is not None
        self.pid = worker.current.pid
        os.kill(self.pid, signal.SIGSTOP)

    @override
    def on_train_end(self, *_: Any) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.pid = 0


def test_each_layer_waits_for_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the end of a step, nor a prefetch of other layers."""
    expected = fit(offload_parameters=False)
    worker = SleepingWorker()
    with worker.sleeps(monkeypatch):
        model = fit(worker)
    assert model.losses == expected.losses
    # In backward for slots, of which there are not enough for a whole step; between steps for the exact state at the end of fit.
    assert {module for module, _ in worker.waits if isinstance(module, str)} == {"backward", "between steps"}
    by_layer = [(module, blocks) for module, blocks in worker.waits if not isinstance(module, str)]
    assert len(by_layer) >= 2 * (STEPS - 1)
    assert [b - worker.blocks[m] for m, b in by_layer if b - worker.blocks[m]] == []


def reads(read: Callable[[Any], Tensor], found: list[Tensor]) -> At:
    """Reads the first layer's weights, which the worker is given last, right after each step."""
    first = lambda trainer: trainer.lightning_module.layers[0].weight  # noqa: E731
    return At("on_train_batch_end", lambda trainer: found.append(read(first(trainer)).clone().view(WIDTH, WIDTH)))


def gathered(weight: nn.Parameter) -> Tensor:
    with GatheredParameters([weight]):
        return weight.detach().clone()


def gathered_alone(weight: Any) -> Tensor:
    weight.all_gather()
    found = weight.detach().clone()
    weight.partition()
    return found


READERS: list[Callable[[Any], Tensor]] = [
    gathered,
    gathered_alone,
    lambda weight: weight.ds_tensor + 0,
    lambda weight: torch.clone(input=weight.ds_tensor),
    safe_get_full_fp32_param,
]


def test_stale_weights_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another one of the readers behind each step."""
    expected, found = list[Tensor](), list[Tensor]()
    fit(reads(gathered, expected), offload_parameters=False)
    worker, readers = SleepingWorker(), iter(READERS)
    with worker.sleeps(monkeypatch):
        fit(worker, reads(lambda weight: next(readers)(weight), found))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Interrupted(Deep):
    """Interrupts a forward pass, in which answers are awaited."""

    context: Interrupt

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx < STEPS - 1:
            optimizer = optimizer_of(self.trainer)
            self.step, self.context.records = optimizer.training.steps, optimizer.training.parts.rank.records
            return super().training_step(batch, batch_idx)
        with self.context:
            super().training_step(batch, batch_idx)
        raise KeyboardInterrupt


@cache
def before_the_last_step() -> list[Tensor]:
    """All weights."""
    return weights_of(fit(max_steps=STEPS - 1))


@strides(30, 5)
def test_interrupted_forward_passes(stride: int) -> None:
    """The weights are then those of the steps before, wherever they are read, and the model trains on."""
    expected = before_the_last_step()

    def interrupted(context: Interrupt) -> str:
        model = Interrupted(**OPTIONS)
        model.context = context
        with pytest.raises(SystemExit):
            fit(model=model)
        assert not model.step.is_exact or all(map(torch.equal, weights_of(model), expected))
        return "whole" if model.step.is_exact else "lost"

    assert sweep(interrupted, stride=stride) > 100 / stride


class Fails(Deep):
    """Fails in the middle of the last forward pass, when the next layers are being prefetched."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx < STEPS - 1:
            return super().training_step(batch, batch_idx)
        for layer in self.layers[:3]:
            layer(torch.ones(1, WIDTH))
        raise ValueError("in a forward pass")


@pytest.mark.parametrize("where", ["in host memory", "on the device"])
def test_nothing_stays_gathered_after_an_error(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And weights in host memory are those of the last whole step, which the worker had not written all."""
    expected, worker, model = before_the_last_step(), SleepingWorker(), Fails(**OPTIONS)
    statuses: list[ZeroParamStatus] = []

    def ends(trainer: pl.Trainer) -> None:
        """Notes what is gathered of the weights when training has ended with the error."""
        pid, worker.pid = worker.pid, 0

        def wake() -> None:
            # It may have been killed.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        threading.Timer(0.5, wake).start()
        optimizer_of(trainer).training.end()
        statuses.extend(p.ds_status for p in model.parameters())

    with worker.sleeps(monkeypatch), pytest.raises(ValueError, match="in a forward pass"):
        fit(worker, At("on_exception", ends), model=model, offload_parameters=where != "on the device")
    assert set(statuses) == {ZeroParamStatus.NOT_AVAILABLE}
    if where != "on the device":
        assert all(map(torch.equal, weights_of(model), expected))
