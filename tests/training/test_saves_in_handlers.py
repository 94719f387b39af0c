"""Saves and stops in a signal's handler, at any Python call of a batch: a file is the state after a whole step, and the run goes on.

SLURM's warning signal comes so (`SLURMEnvironment(auto_requeue=True)`).
"""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector
from typing_extensions import override

from callbacks import After, At
from harness import make_trainer
from lightning_zenflow import ZenFlowStrategy
from networks import SmallNet

FIRST, BATCHES = 3, 12
"""Batch of the first signal, and of a fit."""
EXACT: dict[str, Any] = {"update_interval": 1, "publish_lag": 0, "topk_ratio": 0.0}
LATE: dict[str, Any] = {"update_interval": 4, "publish_lag": 1, "topk_ratio": 0.3}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "S = 1": (EXACT, {}),
    "micro-batches in host memory": ({**EXACT, "accumulate_on": "host"}, {"accumulate_grad_batches": 2}),
    "parameters on the host": ({**EXACT, "stage": 3, "offload_parameters": True}, {}),
    # Here a save changes what later forward passes see.
    "S = 4": (LATE, {}),
    "S = 4, stage 3": ({**LATE, "stage": 3}, {}),
}

SHORT: dict[str, Any] = {"max_epochs": None, "max_steps": FIRST + 5}
"""A window more than what is disturbed."""

all_calls = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(36_000)])], ids=["", "every call"]
)
"""A sample of a batch's calls; or all of them, which takes hours."""


class Rings(pl.Callback):
    """Sends a signal at a Python call of some batches, from the begin of each.

    Args:
        at: the call, by batch.
        handler: of the signal.

    Attributes:
        n_calls: the most of a batch from the first with a signal on.
        n_rung: signals so far.
    """

    def __init__(self, at: dict[int, int], handler: Callable[[pl.Trainer], None] = lambda _: None) -> None:
        self._at, self._handler = at, handler
        self.n_calls = self.n_rung = 0
        self.losses: list[float] = []

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._at and batch_idx not in self._at:
            return
        calls, at = count(), self._at.get(batch_idx, -1)
        before = signal.signal(signal.SIGUSR1, lambda *_: self._handler(trainer))

        def profile(frame: FrameType, event: str, _: Any) -> None:
            # A generator expression is also entered to be closed, where Python drops exceptions; no signal's handler runs there.
            if event == "call" and frame.f_code.co_name != "<genexpr>":
                n = next(calls)
                if batch_idx >= FIRST:
                    self.n_calls = max(self.n_calls, n)
                if n == at:
                    sys.setprofile(None)
                    self.n_rung += 1
                    try:
                        signal.raise_signal(signal.SIGUSR1)
                    finally:
                        signal.signal(signal.SIGUSR1, before)

        sys.setprofile(profile)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        sys.setprofile(None)
        self.losses.append(float(outputs["loss"]))


def saves(folder: Path, *steps: int) -> After:
    """Saves after these steps."""
    return After(steps, lambda t: t.save_checkpoint(folder / f"{t.global_step}.ckpt"))


def fit(name: str, *callbacks: pl.Callback, **more: Any) -> pl.Trainer:
    keys, options = CASES[name]
    strategy = ZenFlowStrategy(**keys, checkpoint_format="lightning", worker_cores=1)
    options = {"max_epochs": 1, "limit_train_batches": BATCHES, **options, **more}
    trainer = make_trainer(strategy, callbacks=list(callbacks), **options)
    trainer.fit(SmallNet(length=BATCHES, accumulate=options.get("accumulate_grad_batches", 1)))
    return trainer


def state_of(path: Path, *, after_exception: bool = False) -> tuple[int, Any]:
    """Steps of a file, and its weights and moments. An exception may come between a step and the Trainer's count of it."""
    content = torch.load(path, weights_only=True)
    (optimizer,) = content["optimizer_states"]
    (step,) = {int(state["step"]) for state in optimizer["state"].values()}
    assert step - content["global_step"] in ((0, 1) if after_exception else (0,))
    return step, [dict(content["state_dict"]), optimizer["state"]]


def test_slurm_ends_the_job_behind_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch, where the save must wait, and behind it."""
    for name, value in {"JOB_ID": "7", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    requeued: list[Any] = []

    def scontrol(command: list[str]) -> int:
        assert command == ["scontrol", "requeue", "7"]
        requeued.extend(state_of(path)[0] for path in tmp_path.iterdir())
        return 0

    monkeypatch.setattr(signal_connector, "call", scontrol)

    def rings(trainer: pl.Trainer) -> None:
        if trainer.global_step == FIRST:
            signal.raise_signal(signal.SIGUSR1)

    for hook, saved in (("on_after_backward", FIRST + 1), ("on_train_batch_end", FIRST)):
        fit("S = 4", At(hook, rings), plugins=[SLURMEnvironment()], default_root_dir=tmp_path, **SHORT)
        assert requeued.pop() == saved and not requeued
        (tmp_path / "hpc_ckpt_1.ckpt").unlink()


def chosen(n_calls: int, every: bool, *, sample: int) -> list[int]:
    """Calls of a batch: all, or about as many as `sample`."""
    assert n_calls > 300
    stride = 1 if every else n_calls // sample
    return list(range(stride // 3, n_calls, stride))


def calls_of(name: str, every: bool, *, sample: int) -> list[int]:
    watch = Rings({})
    fit(name, watch, **SHORT)
    return chosen(watch.n_calls, every, sample=sample)


@pytest.mark.parametrize("name", CASES)
@all_calls
def test_a_save_is_the_state_after_a_step(name: str, every: bool, tmp_path: Path) -> None:
    """Of a signal in each batch from the first on; and the run goes on as with saves by a hook behind the same steps."""
    batches, names = range(FIRST, BATCHES), count()
    points = calls_of(name, every, sample=len(batches))
    while points:
        at, points = dict(zip(batches, points, strict=False)), points[len(batches) :]
        rings = Rings(at, lambda trainer: trainer.save_checkpoint(tmp_path / f"handler{next(names)}.ckpt"))
        fit(name, rings)
        found = [state_of(path) for path in tmp_path.glob("handler*")]
        # Not all batches have as many calls.
        assert len(found) == rings.n_rung > len(at) / 2
        undisturbed = Rings({})
        fit(name, undisturbed, saves(tmp_path, *(step for step, _ in found)))
        assert rings.losses == undisturbed.losses, at
        for step, state in found:
            expected = state_of(tmp_path / f"{step}.ckpt")
            torch.testing.assert_close((step, state), expected, rtol=0, atol=0, msg=lambda m, at=at: f"{at}: {m}")
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.parametrize("name", ["S = 4, stage 3"])
@all_calls
def test_a_stop(name: str, every: bool, tmp_path: Path) -> None:
    """By an exception, with a save before it."""

    def leave(trainer: pl.Trainer) -> None:
        cut.append(trainer.strategy.zenflow_optimizer.training.parts.rank.records.is_broken)
        trainer.save_checkpoint(tmp_path / "handler.ckpt")
        sys.exit(7)

    for step in (FIRST, FIRST + 1):
        fit(name, saves(tmp_path, step), max_epochs=None, max_steps=step)
    for point in calls_of(name, every, sample=2):
        cut: list[bool] = []
        rings = Rings({FIRST: point}, leave)
        with suppress(SystemExit):
            fit(name, rings)
            assert not rings.n_rung
        # An exception may come between two records of what the worker has been given: the state is lost, and a warning says so.
        assert (tmp_path / "handler.ckpt").exists() == (cut == [False])
        if cut == [False]:
            step, state = state_of(tmp_path / "handler.ckpt", after_exception=True)
            torch.testing.assert_close((step, state), state_of(tmp_path / f"{step}.ckpt"), rtol=0, atol=0)
            (tmp_path / "handler.ckpt").unlink()


def test_hooks_run_for_the_call_and_for_the_file(tmp_path: Path) -> None:
    """Those for the file see the state that is in it, also of a save between the backward pass and the step."""
    calls = count(1)

    class Exports(pl.Callback):
        @override
        def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
            checkpoint["exported"] = (next(calls), trainer.global_step, weights)

    save = lambda t: t.global_step == FIRST and t.save_checkpoint(tmp_path / "hook.ckpt")  # noqa: E731
    fit("S = 4", At("on_after_backward", save), Exports())
    content = torch.load(tmp_path / "hook.ckpt", weights_only=True)
    n_calls, step, weights = content["exported"]
    assert (n_calls, step, content["global_step"]) == (2, FIRST + 1, FIRST + 1)
    torch.testing.assert_close(weights, dict(content["state_dict"]), rtol=0, atol=0)


@all_calls
def test_a_save_during_a_save(every: bool, tmp_path: Path) -> None:
    """Or a validation's flush, or the end of training."""

    def flush_and_save(trainer: pl.Trainer) -> None:
        if trainer.global_step == FIRST + 1:
            trainer.strategy.flush()
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    # Before `Rings` is at the batch's end.
    busy, watch, short = At("on_train_batch_end", flush_and_save), Rings({FIRST: -1}), {**SHORT, "max_steps": FIRST + 2}
    fit("S = 4", busy, watch, **short)
    for point in chosen(watch.n_calls, every, sample=12):
        rings = Rings({FIRST: point}, lambda trainer: trainer.save_checkpoint(tmp_path / "handler.ckpt"))
        fit("S = 4", busy, rings, **short)
        if rings.n_rung:
            handler, saved = (state_of(tmp_path / f"{name}.ckpt") for name in ("handler", "saved"))
            torch.testing.assert_close(handler, saved, rtol=0, atol=0)
            (tmp_path / "handler.ckpt").unlink()
