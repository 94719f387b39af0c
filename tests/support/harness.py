"""Runs test models through Lightning's Trainer under `ZenFlowStrategy`, in this process, and collects what happened."""

import atexit
import functools
import gc
import importlib
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed.ops
import lightning.pytorch as pl
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import GatheredParameters
from lightning.pytorch.trainer.connectors import callback_connector
from torch import Tensor, nn
from typing_extensions import override

from as_before import assert_as_before, looks
from callbacks import After
from cases import APPROXIMATE, AUTO, EVERYTHING, PLACES, RESELECTING, UP_TO_TWO, Case, StockStrategy  # noqa: F401
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deepspeed.flat_buffers import balanced_order
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.deepspeed.stage_3 import ZenFlowZero3Optimizer
from models import TestModule
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
            self._run.factors.append(
                float(arena.step_words.clip[optimizer.training.steps.number % len(arena.step_words)])
            )
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
    # Advice about workers of data loaders and the like; an error is an error all the same.
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


def run_case(case: Case, *, devices: int = 1) -> tuple[Run, list[list[Tensor]]]:
    """Runs one rank of a case.

    Args:
        case: what to run.
        devices: how many ranks there are.

    Returns:
        What happened, without the optimizer state; and this rank's flat state: [master, exp_avg, exp_avg_sq] of each parameter group.
    """
    if case.loop == "recorded":
        with recorded_device() as device:
            run, partitions = run_case(replace(case, loop="trainer", recorded=False), devices=devices)
        run.races = dict(device.order.races)
        return run, partitions
    if case.loop != "trainer":
        # Which import this module.
        loops = {"fabric": "fabric_runs", "direct": "direct_step", "stage 3": "stage3_runs"}
        return importlib.import_module(loops[case.loop]).run_case(case, devices=devices)
    run = Run()
    model = case.make_model()
    all_callbacks = [
        *([Recorder(case, run)] if case.recorded else []),
        After(case.flush_after, lambda trainer: trainer.strategy.flush()),
        *case.callbacks,
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
    assert_as_before(before, model)
    run.weights, run.untrained = snapshot(model), untrained(model)
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    return run, read_state(run, trainer.strategy.zenflow_optimizer)


def read_state(run: Run, optimizer: ZenFlowOptimizer | None) -> list[list[Tensor]]:
    """Puts counts into a run, and returns this rank's flat state: [master, exp_avg, exp_avg_sq] of each flat partition."""
    if optimizer is None:
        return []
    run.skipped = int(optimizer.training.telemetry.skipped)
    partitions = []
    counts: dict[int, float] = {}
    assert isinstance(optimizer, ZenFlowZeroOptimizer | ZenFlowZero3Optimizer)
    is_3 = isinstance(optimizer, ZenFlowZero3Optimizer)
    flats = optimizer.fp32_partitioned_groups_flat if is_3 else optimizer.single_partition_of_fp32_groups
    for number, flat in enumerate(flats):
        state = optimizer.optimizer.state[flat]
        group = optimizer.sub_group_to_group_id[number] if is_3 else number
        assert counts.setdefault(group, float(state["step"])) == float(state["step"])
        begin = optimizer.training.parts.rank.partition.group_begins[number]
        arena = optimizer.training.parts.rank.arena
        moments = [moment.read(begin, flat.numel()).clone() for moment in (arena.exp_avg, arena.exp_avg_sq)]
        partitions.append([flat.detach().clone(), *moments])
    run.counts = list(counts.values())
    return partitions


def join_partitions(case: Case, run: Run, partitions: Sequence[list[list[Tensor]]]) -> None:
    """Puts the ranks' flat partitions together and cuts them into parameters; of a `stock` training there are none."""
    if case.stock:
        return
    if case.stage == 3:
        parameters = [p for group in case.make_model().parameter_groups() for p in group]
        pieces = [-(-p.numel() // len(partitions)) for p in parameters]
        for kind, tensors in enumerate((run.master, run.exp_avg, run.exp_avg_sq)):
            of_ranks = [torch.cat([flat[kind] for flat in of_rank]).split(pieces) for of_rank in partitions]
            tensors += [
                torch.cat(of_parameter)[: p.numel()].view(p.shape).clone()
                for p, *of_parameter in zip(parameters, *of_ranks, strict=True)
            ]
        return
    for param_group, parameters in enumerate(case.make_model().parameter_groups()):
        for kind, tensors in enumerate((run.master, run.exp_avg, run.exp_avg_sq)):
            flat = torch.cat([of_rank[param_group][kind] for of_rank in partitions])
            padding = flat.numel() - sum(p.numel() for p in parameters)
            order = balanced_order([p.numel() for p in parameters], len(partitions))
            parts = dict(zip(order, flat.split([parameters[i].numel() for i in order] + [padding]), strict=False))
            tensors += [parts[i].view(p.shape).clone() for i, p in enumerate(parameters)]


def run_here(case: Case, *, callbacks: Sequence[pl.Callback] = ()) -> Run:
    """Runs a case on one rank, in this process, with further callbacks."""
    run, partitions = run_case(replace(case, callbacks=(*case.callbacks, *callbacks)))
    if partitions:
        join_partitions(case, run, [partitions])
    return run
