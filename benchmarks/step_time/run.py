"""One run of the step-time benchmark."""

import gc
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage3
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch import Tensor
from typing_extensions import override

from benchmarks.common.trainer import quiet_trainer
from benchmarks.step_time import links
from benchmarks.step_time.copied_bytes import CopyMeter
from benchmarks.step_time.methods import METHODS
from benchmarks.step_time.models import COLUMNS, ROWS, SimulatedAccelerator, TimedGpt, TimedModule, updates_on
from lightning_zenflow import OffloadAdamW, ZenFlowStrategy
from lightning_zenflow.deepspeed.config import offloads_parameters
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.users_module import whole_shape
from lightning_zenflow.optimizer.engine import OptimizerEngine

Device = Literal["simulated", "cpu", "cuda"]

PROFILED_STEPS = 4
"""Steps after the timed ones in which the profiler counts copies, on CUDA: a whole window of the methods with S=4."""
_DTYPE_BYTES = 2
_FEW_GATHERED = {
    "stage3_max_live_parameters": 4 * ROWS * COLUMNS,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": ROWS * COLUMNS,
}
"""Of the simulated accelerator's model as many layers as of one that is larger than a GPU; by default DeepSpeed would keep all."""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Identity of a run."""

    device: Device
    method: str
    params: float
    batch: int = 1
    """Sequences in a step."""
    tokens: int = 16
    """Length of a sequence."""
    compute_s: float = 0.0
    """Seconds of forward and backward, on the simulated device."""
    warm_up: int
    """Steps that are not counted."""
    steps: int
    narrow: bool = False
    """This and the next two: see `TimedGpt`."""
    recompute: bool = False
    text: bool = False
    embedding: bool = False
    """This and the next: see `SimulatedAccelerator`."""
    asynchronous: bool = False
    ranks: int = 1
    """Simulated accelerators, on this host."""
    worker_share: float = 0.0
    """The worker's pass, with its share of the workers' cores, as a part of `share_of`; 0: not measured before the run."""
    share_of: str = "backward"
    pcie: float = 25.0
    """GB/s at which a simulated accelerator fetches parameters from host memory."""
    device_memory: float = 1000.0
    """GB/s of a simulated accelerator's memory, for `updates_on`."""
    worker_cores: Sequence[int] = ()
    """Logical cores of all ranks' workers; without any `worker_cores` is `auto`."""

    @property
    def total_steps(self) -> int:
        """All steps of the training."""
        return self.warm_up + self.steps + (PROFILED_STEPS if self.device == "cuda" else 0)


@dataclass(kw_only=True)
class StepResult:
    """Measurements of one run. Stalls, the worker's time, the schedule and counted sizes are `ZenFlowStrategy`'s only.

    Of several ranks: `stall_s` and `worker_s` are the largest of all, bytes are sums, losses and sizes in model sizes those of rank zero.
    """

    spec: StepSpec
    step_s: list[float] = field(default_factory=list)
    """Wall time of each counted step."""
    stall_s: list[float] = field(default_factory=list)
    """Waiting in each counted step, the sum of `Telemetry.device_seconds`."""
    worker_s: list[float] = field(default_factory=list)
    """The worker's time for the jobs published in each counted step."""
    schedule: list[int] = field(default_factory=list)
    """S and d at the end."""
    resident_share: float | None = None
    """Share of the blocks whose state the device has, at the end; None: of none."""
    host_bytes: int = 0
    """Memory of all processes after the last step, shared pages counted once (PSS)."""
    arena_bytes: int = 0
    """Part of them that is reserved in the arena; with the next, `ZenFlowStrategy`'s only."""
    page_locked_bytes: int = 0
    """Part of the arena that is page-locked beside a CUDA device."""
    device_bytes: int = 0
    """Peak of allocated device memory in the counted steps; 0 without CUDA."""
    losses: list[float] = field(default_factory=list)
    """Loss of each step, those that are not counted included."""
    n_params: int = 0
    counted_sizes: list[float] = field(default_factory=list)
    """d2h and h2d traffic of a counted step in model sizes, by the package's counters: on a CPU what would cross PCIe."""
    copied_sizes: list[float] = field(default_factory=list)
    """d2h and h2d traffic of a step in model sizes, by torch's profiler in the steps after the counted ones; on CUDA only."""

    @property
    def moved_sizes(self) -> list[float]:
        """d2h and h2d traffic of a step in model sizes: by the profiler where possible, else by the package's counters."""
        return self.copied_sizes or self.counted_sizes

    def in_model_sizes(self, n_bytes: Sequence[int], steps: int) -> list[float]:
        """Converts bytes of several steps to model sizes a step."""
        return [n / steps / (self.n_params * _DTYPE_BYTES) for n in n_bytes]


def results_of(written: Mapping[str, Any]) -> list[list[StepResult]]:
    """The runs of each repeat in a result file of `benchmarks.step_time`."""
    return [
        [StepResult(**{**values, "spec": StepSpec(**values["spec"])}) for values in of_repeat]
        for of_repeat in written["runs"]
    ]


def _zenflow_optimizer(trainer: pl.Trainer) -> ZenFlowOptimizer | OptimizerEngine | None:
    strategy, optimizer = trainer.strategy, trainer.optimizers[0]
    if isinstance(optimizer, OffloadAdamW):
        return optimizer._engine
    return strategy.zenflow_optimizer if isinstance(strategy, ZenFlowStrategy) else None


def _clocks(optimizer: ZenFlowOptimizer | OptimizerEngine | None) -> tuple[float, float, float]:
    if optimizer is None:
        return time.perf_counter(), 0.0, 0.0
    stalls = optimizer.training.telemetry
    return time.perf_counter(), sum(stalls.device_seconds.values()), stalls.counts.worker_busy_s


def _counted(optimizer: ZenFlowOptimizer | OptimizerEngine, link: links.HostLink) -> tuple[int, int]:
    return optimizer.training.telemetry.d2h_bytes, optimizer.training.telemetry.h2d_bytes + link.n_bytes


class StepTimer(pl.Callback):
    """Times from the end of one step to the end of the next; other measurements are taken outside of the timed steps."""

    def __init__(self, result: StepResult, link: links.HostLink) -> None:
        self._result, self._link = result, link
        self._first, self._end = result.spec.warm_up, result.spec.warm_up + result.spec.steps
        self._last = _clocks(None)
        self._counted = (0, 0)
        self._losses: list[Tensor] = []
        self._meter: CopyMeter | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._result.n_params = sum(whole_shape(p).numel() for p in pl_module.parameters())

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self._losses.append(outputs["loss"].detach())  # read at the end: nothing may wait for the device
        step, optimizer, on_cuda = trainer.global_step, _zenflow_optimizer(trainer), self._result.spec.device == "cuda"
        if step == self._first and optimizer is not None:
            self._counted = _counted(optimizer, self._link)
        if step == self._first:
            # Otherwise the first full collection after the imports would fall into a timed step.
            gc.collect()
        if step in (self._first, self._end) and on_cuda:
            torch.cuda.synchronize()
        if step == self._first and on_cuda:
            torch.cuda.reset_peak_memory_stats()
        last, self._last = self._last, _clocks(optimizer)
        if self._first < step <= self._end:
            step_s, stall_s, worker_s = (now - before for now, before in zip(self._last, last, strict=True))
            self._result.step_s.append(step_s)
            self._result.stall_s.append(stall_s)
            self._result.worker_s.append(worker_s)
        if step == self._end:
            self._result.host_bytes = proportional_bytes()
            if on_cuda:
                self._result.device_bytes = torch.cuda.max_memory_allocated()
            if optimizer is not None:
                self._read_zenflow(optimizer)
            if on_cuda:
                self._meter = CopyMeter()
                self._meter.start()
        if step == self._end + PROFILED_STEPS and self._meter is not None:
            self._result.copied_sizes = self._result.in_model_sizes(self._meter.stop(), PROFILED_STEPS)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._result.losses = torch.stack(self._losses).tolist()
        if trainer.world_size > 1:
            self._join_ranks(trainer.world_size)

    def _join_ranks(self, n_ranks: int) -> None:
        of_ranks: list[Any] = [None] * n_ranks
        dist.all_gather_object(of_ranks, self._result)
        for name in ("stall_s", "worker_s"):
            of_steps = zip(*(getattr(result, name) for result in of_ranks), strict=True)
            setattr(self._result, name, [max(of_step) for of_step in of_steps])
        for name in ("arena_bytes", "page_locked_bytes"):
            setattr(self._result, name, sum(getattr(result, name) for result in of_ranks))

    def _read_zenflow(self, optimizer: ZenFlowOptimizer | OptimizerEngine) -> None:
        schedule = optimizer.training.parts.jobs.schedule
        self._result.schedule = [schedule.update_interval, schedule.publish_lag]
        self._result.resident_share = optimizer.training.parts.read_counters().resident_share
        rank = optimizer.training.parts.rank
        self._result.arena_bytes = rank.arena.reserved_bytes
        states_bytes = rank.arena.slots.data_ptr() - rank.arena.master.data_ptr()
        self._result.page_locked_bytes = rank.arena.reserved_bytes - states_bytes
        moved = [now - before for now, before in zip(_counted(optimizer, self._link), self._counted, strict=True)]
        self._result.counted_sizes = self._result.in_model_sizes(moved, self._result.spec.steps)


def proportional_bytes() -> int:
    """Memory of this process and its children; a page that n processes share counts 1/n for each."""
    this = psutil.Process()
    return sum(process.memory_full_info().pss for process in [this, *this.children(recursive=True)])


def make_module(spec: StepSpec) -> TimedModule:
    """The model of a run."""
    if spec.device == "simulated":
        return SimulatedAccelerator(
            steps=spec.total_steps,
            params=spec.params,
            compute_s=spec.compute_s,
            embedding=spec.embedding,
            asynchronous=spec.asynchronous,
            large_every=METHODS[spec.method].large_every,
        )
    # Billions of random weights take the device a second, one core minutes.
    with torch.device("cuda" if spec.device == "cuda" else "cpu"):
        return TimedGpt(
            steps=spec.total_steps,
            params=spec.params,
            batch=spec.batch,
            tokens=spec.tokens,
            narrow=spec.narrow,
            recompute=spec.recompute,
            text=spec.text,
        )


def train(spec: StepSpec, strategy: Strategy, **options: Any) -> None:
    """Trains the model of a run.

    Args:
        spec: the run.
        strategy: the method's, or an instrumented one.
        **options: of the trainer.
    """
    torch.manual_seed(1)
    method, module = METHODS[spec.method], make_module(spec)
    module.optimizer_class = method.optimizer
    given: dict[str, Any] = {
        "accelerator": "gpu" if spec.device == "cuda" else "cpu",
        "devices": spec.ranks,
        "strategy": strategy,
        "precision": method.precision,
        "max_steps": spec.total_steps,
        "gradient_clip_val": method.max_norm,
    }
    with (
        updates_on(module.clock, 1e9 * spec.device_memory)
        if isinstance(module, SimulatedAccelerator)
        else nullcontext()
    ):
        quiet_trainer(**given, **options).fit(module)


def run(spec: StepSpec) -> StepResult:
    """Trains and measures in this process."""
    result, method = StepResult(spec=spec), METHODS[spec.method]
    given: dict[str, Any] = {"worker_cores": list(spec.worker_cores)} if method.has_keys and spec.worker_cores else {}
    if spec.ranks > 1:
        links.register()
        given["process_group_backend"] = links.NAME
    strategy, link = method.make_strategy(**given), links.HostLink(1e9 * spec.pcie)
    callbacks = [StepTimer(result, link), *([links.MeanIsOwn()] if spec.ranks > 1 else [])]
    with ExitStack() as stack:
        if spec.device == "simulated" and method.stage == 3:
            assert isinstance(strategy, DeepSpeedStrategy)
            config: Any = strategy.config
            config["zero_optimization"] |= _FEW_GATHERED
            stack.enter_context(mock.patch.object(stage3, "reduce_scatter_coalesced", links.own_gradients))
            # Otherwise DeepSpeed counts CPU devices by a process of its own for every bucket.
            stack.enter_context(mock.patch.dict(os.environ, LOCAL_SIZE="1"))
            if offloads_parameters(config):
                stack.enter_context(link.installed())
        train(spec, strategy, callbacks=callbacks)
    return result
