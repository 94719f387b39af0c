"""From setup to the end of training, whatever that is: what evaluation and checkpoints see, and what is left behind."""

import contextlib
import dataclasses
import gc
import io
import math
import os
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from harness import Case, fit, make_trainer, run_here, workers
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.kernels import TorchKernels
from models import LinearLossModule, OptimizerOptions, SmallNet, TestModule
from reference import AdamWState, adamw_reference

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


def linear(**options: Any) -> LinearLossModule:
    return LinearLossModule(shapes=((7, 5), (3,)), **options)


def exact_state(case: Case, steps: int) -> AdamWState:
    weights, gradients, groups = dataclasses.replace(case, steps=steps).fixed_gradients()
    return adamw_reference(weights, gradients, groups, max_norm=case.max_norm or 0.0)


def assert_equals(ours: list[Tensor], exact: list[Tensor]) -> None:
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


CASE = Case(steps=11, topk_ratio=0.05, update_interval=4, publish_lag=1, max_norm=1.0)


def case_trainer(steps: int, **options: Any) -> pl.Trainer:
    return make_trainer(CASE.make_strategy(), max_steps=steps, gradient_clip_val=CASE.max_norm, **options)


def parameters_of(model: TestModule) -> list[Tensor]:
    return [p.detach() for group in model.parameter_groups() for p in group]


@pytest.mark.parametrize("same_trainer", [False, True])
def test_fit_twice(same_trainer: bool) -> None:
    """A second fit starts from the weights that the first one left, with fresh moments and hooks."""
    model = linear()
    trainer = fit(model, steps=4)
    middle = [p.clone() for p in parameters_of(model)]
    if same_trainer:
        trainer.fit_loop.epoch_loop.max_steps = 10
        trainer.fit(model)
    else:
        fit(model, steps=10)
    # The data is a function of `global_step`, which goes on in the same trainer.
    case = Case(steps=10, model_options={"shapes": ((7, 5), (3,))}, optimizer=model.optimizer_options)
    _, gradients, groups = case.fixed_gradients()
    first = 4 if same_trainer else 0
    schedule = groups[: 10 - first]
    assert_equals(parameters_of(model), adamw_reference(middle, gradients[first:], schedule).weights)


def test_fits_leave_no_memory_behind() -> None:
    """Their arenas and descriptors are gone when nobody holds the trainer any more."""

    def held() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            arenas = sum("zenflow-arena" in line for line in maps)
        return arenas, len(os.listdir("/proc/self/fd"))

    fit(linear())
    before = held()
    for _ in range(2):
        fit(linear())
    assert held() == before


def test_evaluation_after_fit_sees_exact_weights() -> None:
    model = CASE.make_model()
    trainer = case_trainer(CASE.steps, limit_val_batches=1)
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    trainer.predict(model)
    assert_equals(parameters_of(model), exact_state(CASE, CASE.steps).weights)


def test_evaluation_without_fit() -> None:
    model = linear()
    trainer = make_trainer(ZenFlowStrategy(), limit_val_batches=1)
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    assert len(trainer.predict(model) or []) == 1


class WeightsAtValidation(pl.Callback):
    """Keeps the weights that validation sees."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Tensor]] = {}

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TestModule)
        self.seen[trainer.global_step] = [p.clone() for p in parameters_of(pl_module)]


@pytest.mark.parametrize(("accumulate", "interval"), [(1, 3), (3, 2)])
def test_validation_in_mid_run_sees_exact_weights(accumulate: int, interval: int) -> None:
    """Also between the micro-batches of a step."""
    case = dataclasses.replace(CASE, accumulate=accumulate)
    model = case.make_model()
    callback = WeightsAtValidation()
    trainer = case_trainer(
        case.steps,
        accumulate_grad_batches=accumulate,
        limit_val_batches=1,
        val_check_interval=interval,
        num_sanity_val_steps=1,
        callbacks=[callback],
    )
    trainer.fit(model)
    batches = range(0, case.steps * accumulate + 1, interval)
    assert sorted(callback.seen) == sorted({batch // accumulate for batch in batches})
    for step, weights in callback.seen.items():
        assert_equals(weights, exact_state(case, step).weights)
    assert_equals(parameters_of(model), exact_state(case, case.steps).weights)


def zero_state(checkpoint: Path) -> dict[str, Any]:
    """Rank 0's ZeRO state in a checkpoint that Lightning's DeepSpeed strategy wrote."""
    (path,) = checkpoint.glob("checkpoint/*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    state = torch.load(path, weights_only=False)
    assert isinstance(state, dict)
    return state["optimizer_state_dict"]  # type: ignore[no-any-return]


def assert_state_is_exact(state: dict[str, Any], model: TestModule, steps: int) -> None:
    """DeepSpeed's ZeRO state of the only rank against AdamW's after `steps` steps of `CASE`."""
    exact = exact_state(CASE, steps)
    position = 0
    for group, parameters in enumerate(model.parameter_groups()):
        moments = state["base_optimizer_state"]["state"][group]
        assert float(moments["step"]) == steps
        begin = 0
        for p in parameters:
            for ours, theirs in (
                (state["single_partition_of_fp32_groups"][group], exact.weights),
                (moments["exp_avg"], exact.exp_avg),
                (moments["exp_avg_sq"], exact.exp_avg_sq),
            ):
                values = ours[begin : begin + p.numel()].detach().double().view(p.shape)
                torch.testing.assert_close(values, theirs[position], rtol=1e-6, atol=1e-6)
            begin += p.numel()
            position += 1


def test_checkpoints_hold_the_exact_state(tmp_path: Path) -> None:
    model = CASE.make_model()
    callback = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=5, save_top_k=-1)
    case_trainer(CASE.steps, enable_checkpointing=True, callbacks=[callback]).fit(model)
    paths = sorted(tmp_path.iterdir(), key=lambda p: int(p.stem.partition("step=")[2]))
    assert [p.stem.partition("step=")[2] for p in paths] == ["5", "10"]
    for steps, path in zip((5, 10), paths, strict=True):
        assert_state_is_exact(zero_state(path), model, steps)
    # Saving disturbs nothing.
    assert_equals(parameters_of(model), exact_state(CASE, CASE.steps).weights)


def test_the_optimizers_own_state_is_exact() -> None:
    """Without Lightning's hook: whoever asks DeepSpeed for the optimizer's state."""
    saved = io.BytesIO()

    class Asks(pl.Callback):
        @override
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            assert isinstance(trainer.strategy, ZenFlowStrategy)
            assert trainer.strategy.zenflow_optimizer is not None
            if trainer.global_step == 6:
                torch.save(trainer.strategy.zenflow_optimizer.state_dict(), saved)

    model = CASE.make_model()
    case_trainer(CASE.steps, callbacks=[Asks()]).fit(model)
    saved.seek(0)
    assert_state_is_exact(torch.load(saved, weights_only=False), model, 6)
    assert_equals(parameters_of(model), exact_state(CASE, CASE.steps).weights)


def test_evaluation_from_a_checkpoint(tmp_path: Path) -> None:
    model = CASE.make_model()
    trainer = case_trainer(6, limit_val_batches=1)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    for evaluating in (trainer, case_trainer(6, limit_val_batches=1)):
        other = CASE.make_model()
        evaluating.test(other, ckpt_path=str(tmp_path / "some.ckpt"), verbose=False)
        for ours, theirs in zip(parameters_of(other), parameters_of(model), strict=True):
            assert torch.equal(ours, theirs)


def test_default_checkpoints(tmp_path: Path) -> None:
    """Lightning's own callback, which saves at the end of an epoch."""
    trainer = fit(linear(length=4), enable_checkpointing=True, default_root_dir=tmp_path, steps=4)
    (path,) = tmp_path.glob("**/*.ckpt")
    assert zero_state(path)
    assert trainer.global_step == 4


@pytest.mark.parametrize("saved_at", [1, 5, 6])
def test_resuming_ends_with_the_same_bits(saved_at: int, tmp_path: Path) -> None:
    """Fixed gradients: master weights and moments after saving, loading and the rest of the run."""
    whole = run_here(CASE)
    trainer = case_trainer(saved_at)
    trainer.fit(CASE.make_model())
    trainer.save_checkpoint(tmp_path / "half.ckpt")

    model = CASE.make_model()
    trainer = case_trainer(CASE.steps)
    trainer.fit(model, ckpt_path=str(tmp_path / "half.ckpt"))
    assert trainer.global_step == CASE.steps
    for ours, theirs in zip(parameters_of(model), whole.weights, strict=True):
        assert torch.equal(ours, theirs)


class Fails(LinearLossModule):
    """Fails in a step, counted from 0."""

    error: type[BaseException] = RuntimeError
    at = 5

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.at:
            assert len(workers()) == 1
            raise self.error("the user's own mistake")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("at", [0, 5])
def test_no_worker_remains_after_an_exception(at: int) -> None:
    model = Fails(shapes=((7, 5), (3,)))
    model.at = at
    trainer = make_trainer(ZenFlowStrategy(), max_steps=10)
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        trainer.fit(model)
    assert workers() == []


def test_no_worker_remains_after_an_interrupt() -> None:
    """Lightning ends the process on Ctrl-C, after tearing everything down."""
    model = Fails(shapes=((7, 5), (3,)))
    model.error = KeyboardInterrupt
    with pytest.raises(SystemExit):
        fit(model, steps=10)
    assert workers() == []


def test_no_worker_remains_after_an_error_at_setup() -> None:
    """DeepSpeed's engine refuses the scheduler after it has built the optimizer, and with it the worker."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "NoSuchScheduler", "params": {}},
    }
    with pytest.raises(AssertionError, match="NoSuchScheduler"):
        fit(linear(), ZenFlowStrategy(config=config))
    assert workers() == []


def test_evaluation_after_an_exception() -> None:
    """The interrupted run's optimizer is gone; its weights are there."""
    model = Fails(shapes=((7, 5), (3,)))
    trainer = make_trainer(ZenFlowStrategy(), max_steps=10, limit_val_batches=1)
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        trainer.fit(model)
    trainer.validate(model, verbose=False)


def test_training_goes_on_in_a_new_trainer_after_an_exception() -> None:
    model = Fails(shapes=((7, 5), (3,)))
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        fit(model, steps=10)
    model.at = 1000
    fit(model, steps=4)


def test_a_worker_that_is_killed_ends_the_run_with_its_name() -> None:
    class KillsWorker(LinearLossModule):
        @override
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                (pid,) = workers()
                os.kill(pid, 9)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="ZenFlow worker .* was killed by signal 9"):
        fit(KillsWorker(shapes=((7, 5), (3,))), ZenFlowStrategy(max_worker_restarts=0), steps=10)


def test_the_worker_is_told_to_exit() -> None:
    seen: list[int] = []

    class Looks(pl.Callback):
        @override
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.extend(workers())

    fit(linear(), callbacks=[Looks()])
    assert len(seen) == 1
    assert not psutil.pid_exists(seen[0])


class ReadsOfDeviceValues(TorchDispatchMode):
    """Counts the operations by which the host learns a tensor's value, and for which it would have to wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.reads: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.operations += 1
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "aten.equal")):
            frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack() if "torch" not in f.filename]
            self.reads.append(f"{name} from {frames[-1]}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}])
def test_a_step_reads_nothing_from_the_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and optimizer step of all steps after the selection, stand-in updates and look-ahead included."""
    # Those for a GPU; where the device is the CPU there is nothing to wait for.
    monkeypatch.setattr("lightning_zenflow.assembly.kernels_for", lambda device: TorchKernels())
    mode = ReadsOfDeviceValues()

    class Watched(LinearLossModule):
        @override
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with mode if self.trainer.global_step >= 2 else contextlib.nullcontext():
                super().optimizer_step(*args, **kwargs)

    model = Watched(shapes=((7, 5), (3,)), accumulate=options.get("accumulate_grad_batches", 1))
    fit(model, ZenFlowStrategy(select_interval=0), steps=10, **options)
    assert mode.operations > 100
    assert mode.reads == []
    with mode:
        torch.ones(1).item()
    assert len(mode.reads) == 1


def test_frozen_parameters_stay() -> None:
    model = SmallNet()
    model.embedding.weight.requires_grad_(False)
    model.convolution.bias.requires_grad_(False)  # type: ignore[union-attr]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fit(model, steps=5)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), before[name]) == (not p.requires_grad), name


def test_tied_weights() -> None:
    """One tensor under two names is one parameter."""

    class Tied(TestModule):
        def __init__(self) -> None:
            super().__init__(length=20, accumulate=1, optimizer=OptimizerOptions())
            self.words = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11)
            self.head.weight = self.words.weight

        @override
        def loss(self, step: int, micro: int, rank: int) -> Tensor:
            tokens = torch.arange(11)
            return nn.functional.cross_entropy(self.head(self.words(tokens)), tokens.flip(0))

    ours, theirs = Tied(), Tied()
    theirs.load_state_dict(ours.state_dict())
    fit(ours, ZenFlowStrategy(update_interval=1, publish_lag=0), steps=6)
    assert ours.head.weight is ours.words.weight
    configured = theirs.configure_optimizers()
    for step in range(6):
        configured["optimizer"].zero_grad()
        theirs.loss(step, 0, 0).backward()
        configured["optimizer"].step()
        configured["lr_scheduler"]["scheduler"].step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=2e-6)


def test_the_gradient_norm_is_known() -> None:
    """DeepSpeed's `get_global_grad_norm` of the engine, before clipping."""
    trainer = fit(linear(), gradient_clip_val=0.1, steps=1)
    twin = linear()
    gradients = [twin.gradient(i, 0, 0, 0) for i in range(2)]
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None))
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert float(trainer.strategy.deepspeed_engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-6)
