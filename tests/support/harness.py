"""Runs test models through Lightning's Trainer under `ZenFlowStrategy`, in this process, and collects what happened."""

import atexit
import functools
import gc
import importlib
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import deepspeed.ops
import lightning.pytorch as pl
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch.trainer.connectors import callback_connector
from torch import Tensor, nn
from typing_extensions import override

from as_before import assert_as_before, looks
from callbacks import After, At
from cases import APPROXIMATE, AUTO, EVERYTHING, PLACES, RESELECTING, UP_TO_TWO, Case, StockStrategy  # noqa: F401
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.deepspeed.stage_3 import ZenFlowZero3Optimizer
from lightning_zenflow.worker.arena import Arena
from models import TestModule
from oracle import slices_of_rank, to_parameters
from processes import workers  # noqa: F401
from recorded_device.watch import recorded_device
from scripted_schedule import scripted

# On a CPU, DeepSpeed compiles an operation for inference (a minute where its cache is empty) and looks for compilers in every process.
vars(deepspeed.ops).setdefault("__compatible_ops__", {})
# DeepSpeed refuses fp16 on a processor without instructions for it. All count as such here, so that every machine shows the same.
CPU_Accelerator.is_fp16_supported = lambda self: False
# Reads the metadata of all installed packages, for every Trainer: an eighth of a short run.
callback_connector._load_external_callbacks = functools.cache(callback_connector._load_external_callbacks)
# Each set-up collects garbage, which takes 0.4 s with all that has been imported, most of a short run. Frozen objects are left out, and
# with these two modules also what DeepSpeed imports in the first training: torch's compilers.
for name in ("module_inject.auto_ep_layer", "runtime.zero.muon.original_muon"):
    importlib.import_module(f"deepspeed.{name}")
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)


@dataclass(kw_only=True, repr=False)
class Run:
    """What happened in a run; lists of tensors have one entry a parameter, in the order of the parameter groups.

    Without a representation: that of all tensors takes minutes, and pytest has one made of every argument of a failed test.
    """

    losses: list[list[float]] = field(default_factory=list)
    """[step][micro-batch], of one rank."""
    factors: list[float] = field(default_factory=list)
    """[step]: of clipping and loss scale; NaN for a step that changed nothing. Where steps are read in time, as on a CPU."""
    shown: list[list[Tensor]] = field(default_factory=list)
    """[step][parameter]: the weights that the model showed during each step."""
    weights: list[Tensor] = field(default_factory=list)
    """The model's at the end of fit."""
    untrained: dict[str, Tensor] = field(default_factory=dict)
    """At the end, see `untrained`; not under Fabric."""
    master: list[Tensor] = field(default_factory=list)
    exp_avg: list[Tensor] = field(default_factory=list)
    exp_avg_sq: list[Tensor] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    """AdamW's step count of each parameter group, as checkpoints hold it."""
    skipped: int = 0
    schedules: list[tuple[int, int]] = field(default_factory=list)
    """[step]: S and d after it."""
    in_backward_jobs: int = 0
    """Jobs that were submitted in backward; this and the next one of a case with `loop="direct"`."""
    h2d_bytes: list[tuple[int, int]] = field(default_factory=list)
    """[step]: bytes of weights that were copied to the device in the last backward pass, and in the step after it."""
    races: dict[str, int] = field(default_factory=dict)
    """Accesses without order, by description; of a case with `loop="recorded"`."""
    error: str | None = None
    """Traceback of a run that failed."""


class Recorder(pl.Callback):
    """Keeps shown weights and losses."""

    def __init__(self, case: Case, run: Run) -> None:
        self._case = case
        self._run = run

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self._case.accumulate == 0:
            if self._case.watched:
                self._run.shown.append(snapshot(pl_module))
            elif not self._run.losses:
                snapshot(pl_module)  # the first one decides which parameters are compared
            self._run.losses.append([])

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.strategy.zenflow_optimizer
        if optimizer is not None and (batch_idx + 1) % self._case.accumulate == 0:
            schedule, arena = optimizer.training.parts.jobs.schedule, optimizer.training.parts.rank.arena
            self._run.schedules.append((schedule.update_interval, schedule.publish_lag))
            self._run.factors.append(float(arena.word_of(optimizer.training.steps.number).view(torch.float32)[0]))
        # Lightning reports the loss divided by the accumulation.
        self._run.losses[-1].append(float(outputs["loss"]) * self._case.accumulate)


def snapshot(model: TestModule) -> list[Tensor]:
    """Copies of the model's weights on the CPU, in the order of the parameter groups."""
    with GatheredParameters(list(model.parameters())):
        return [p.detach().to("cpu", copy=True) for parameters in model.parameter_groups() for p in parameters]


def weights_of(module: nn.Module) -> list[Tensor]:
    """Copies of a module's parameters on the CPU, in its own order; whole ones under stage 3 too."""
    with GatheredParameters(list(module.parameters())):
        return [p.detach().to("cpu", copy=True) for p in module.parameters()]


def untrained(model: TestModule) -> dict[str, Tensor]:
    """Copies of the model's buffers and of what the optimizer does not train, by name."""
    trained = {p for parameters in model.parameter_groups() for p in parameters}
    named = (*model.named_parameters(), *model.named_buffers())
    with GatheredParameters(list(model.parameters())):
        return {name: t.detach().to("cpu", copy=True) for name, t in named if t not in trained}


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A Trainer on the CPU, or on another `accelerator`, that writes nothing."""
    # Advice about workers of data loaders and the like, and of a save that an error has cut; an error is an error all the same.
    warnings.filterwarnings("ignore", module="lightning")
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
    }
    return pl.Trainer(strategy=strategy, **{**quiet, **options})


def fit(
    model: pl.LightningModule, strategy: Any = None, *, steps: int = 3, resume: Any = None, **options: Any
) -> pl.Trainer:
    """Trains a model with the defaults of `ZenFlowStrategy`, or with another strategy; may go on with a checkpoint."""
    trainer = make_trainer(strategy or ZenFlowStrategy(), max_steps=steps, **options)
    trainer.fit(model, ckpt_path=resume)
    return trainer


def optimizer_of(trainer: pl.Trainer) -> ZenFlowOptimizer:
    """The optimizer of a trainer that trains or has trained."""
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert trainer.strategy.zenflow_optimizer is not None
    return trainer.strategy.zenflow_optimizer


def run_case(case: Case, *, devices: int = 1) -> tuple[Run, list[Tensor]]:
    """Runs one rank of a case.

    Args:
        case: what to run.
        devices: how many ranks there are.

    Returns:
        What happened, without the optimizer state; and this rank's: `state_of` its partition, or nothing.
    """
    if case.loop == "recorded":
        with recorded_device() as device:
            run, partition = run_case(replace(case, loop="trainer", recorded=False), devices=devices)
        run.races = dict(device.order.races)
        return run, partition
    if case.loop in ("fabric", "direct"):
        # Which import this module.
        loops = {"fabric": "fabric_runs", "direct": "direct_step"}
        return importlib.import_module(loops[case.loop]).run_case(case, devices=devices)
    run = Run()
    model = case.make_model()
    all_callbacks = [
        *([Recorder(case, run)] if case.recorded and case.loop == "trainer" else []),
        After(case.flush_after, lambda trainer: trainer.strategy.flush()),
        *case.callbacks,
        *([At("on_fit_end", partial(read_plain, run, model.parameter_groups()))] if case.loop == "stage 3" else []),
        After([case.save_at] if case.save_at else [], lambda trainer: trainer.save_checkpoint(case.checkpoint)),
    ]
    # In manual optimization Lightning refuses them, and the model does both.
    automatic = {"accumulate_grad_batches": case.accumulate, "gradient_clip_val": case.max_norm}
    trainer = make_trainer(
        case.make_strategy(),
        devices=devices,
        max_steps=case.steps,
        **(automatic if model.automatic_optimization else {}),
        precision=case.precision,
        accelerator=case.accelerator,
        callbacks=all_callbacks,
    )
    before = looks(model)
    with scripted(case.schedules) if case.schedules else nullcontext():
        trainer.fit(model, ckpt_path=None if case.save_at else case.checkpoint)
    if not isinstance(trainer.strategy, ZenFlowStrategy):
        return run, []
    assert_as_before(before, model)
    run.weights, run.untrained = snapshot(model), untrained(model)
    return run, read_state(run, trainer.strategy.zenflow_optimizer)


def read_plain(run: Run, groups: Sequence[Sequence[Tensor]], trainer: pl.Trainer) -> None:
    """What is left of a training under plain DeepSpeed, by its own functions; while the engine is there."""
    optimizer, model = trainer.strategy.deepspeed_engine.optimizer, trainer.lightning_module
    parameters = [p for group in groups for p in group]
    run.factors = [1 / optimizer.loss_scale]
    run.counts = [float(state["step"]) for state in optimizer.optimizer.state.values()]
    run.master = [safe_get_full_fp32_param(p).clone() for p in parameters]
    run.exp_avg, run.exp_avg_sq = (
        [safe_get_full_optimizer_state(p, name).clone() for p in parameters] for name in ("exp_avg", "exp_avg_sq")
    )
    run.weights, run.untrained = snapshot(model), untrained(model)


def read_state(run: Run, optimizer: ZenFlowOptimizer | None) -> list[Tensor]:
    """Puts counts into a run, and returns master weights and moments of this rank's partition."""
    if optimizer is None:
        return []
    run.skipped = int(optimizer.training.telemetry.skipped)
    assert isinstance(optimizer, ZenFlowZeroOptimizer | ZenFlowZero3Optimizer)
    is_3 = isinstance(optimizer, ZenFlowZero3Optimizer)
    flats = optimizer.fp32_partitioned_groups_flat if is_3 else optimizer.single_partition_of_fp32_groups
    rank, counts = optimizer.training.parts.rank, dict[int, float]()
    for number, (begin, flat) in enumerate(zip(rank.partition.group_begins, flats, strict=True)):
        group, count = (
            optimizer.sub_group_to_group_id[number] if is_3 else number,
            optimizer.optimizer.state[flat]["step"],
        )
        assert counts.setdefault(group, float(count)) == float(count)
        # Bits: DeepSpeed leaves the padding of pieces as memory was, which may be NaN.
        shown, held = (t.detach().view(torch.int32) for t in (flat, rank.arena.master[begin : begin + flat.numel()]))
        assert torch.equal(shown, held)
    run.counts = list(counts.values())
    return state_of(rank.arena)


def state_of(arena: Arena) -> list[Tensor]:
    """Copies of master weights and moments."""
    moments = (moment.read(0, len(arena.master)) for moment in (arena.exp_avg, arena.exp_avg_sq))
    return [arena.master.clone(), *(moment.clone() for moment in moments)]


def join_partitions(case: Case, run: Run, partitions: Sequence[Sequence[Tensor]]) -> None:
    """Cuts the ranks' partitions into parameters; of a `stock` training there are none."""
    groups = case.make_model().parameter_groups()
    for rank, of_rank in enumerate(partitions):
        slices, _ = slices_of_rank(groups, rank, len(partitions), case.sub_group_size)
        for tensors, of_kind in zip((run.master, run.exp_avg, run.exp_avg_sq), of_rank, strict=False):
            tensors += [of_kind.new_empty(p.shape) for group in groups for p in group][len(tensors) :]
            to_parameters(tensors, slices, of_kind)


def run_here(case: Case, *, callbacks: Sequence[pl.Callback] = ()) -> Run:
    """Runs a case on one rank, in this process, with further callbacks."""
    run, partition = run_case(replace(case, callbacks=(*case.callbacks, *callbacks)))
    join_partitions(case, run, [partition])
    return run
