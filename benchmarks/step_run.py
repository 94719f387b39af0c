"""One run of the step-time benchmark in a process of its own: `python -m benchmarks.step_run SPEC_JSON RESULT_FILE`."""

import dataclasses
import gc
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from benchmarks.accelerator import Gpt, SimulatedAccelerator, TimedModule
from benchmarks.copied_bytes import CopyMeter
from benchmarks.step_methods import METHODS
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer

Device = Literal["simulated", "cpu", "cuda"]

PROFILED_STEPS = 4
"""Steps after the timed ones in which the profiler counts copies, on CUDA: a whole window of the methods with S = 4."""
_DTYPE_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What is timed."""

    device: Device
    method: str
    params: float
    batch: int
    """Sequences a step."""
    tokens: int
    """Length of a sequence."""
    compute_s: float
    """Seconds of forward and backward, on the simulated device."""
    warm_up: int
    """Steps that are not counted."""
    steps: int
    narrow: bool = False
    """Whether the model has few weights in as many tensors, see `Gpt`."""

    @property
    def total_steps(self) -> int:
        """All steps of the training."""
        return self.warm_up + self.steps + (PROFILED_STEPS if self.device == "cuda" else 0)


def simulated(method: str, *, params: float, compute_ms: float, warm_up: int, steps: int) -> StepSpec:
    """A run on the simulated accelerator."""
    return StepSpec(
        device="simulated",
        method=method,
        params=params,
        batch=1,
        tokens=1,
        compute_s=compute_ms / 1e3,
        warm_up=warm_up,
        steps=steps,
    )


@dataclass(kw_only=True)
class StepResult:
    """What was measured in one run."""

    spec: StepSpec
    step_s: list[float] = field(default_factory=list)
    """Wall time of each counted step."""
    stall_s: list[float] = field(default_factory=list)
    """Waiting in each counted step, as `StallClock.device_s` counts it; ours only."""
    worker_s: list[float] = field(default_factory=list)
    """The worker's time for the jobs published in each counted step; ours only."""
    schedule: list[int] = field(default_factory=list)
    """S and d at the end; ours only."""
    host_bytes: int = 0
    """Memory of all processes after the last step, shared pages counted once (PSS)."""
    device_bytes: int = 0
    """Most that was allocated on the device; 0 without CUDA."""
    n_params: int = 0
    counted_sizes: list[float] = field(default_factory=list)
    """Model sizes down and up in a counted step, by our own counters: on a CPU what would cross PCIe; ours only."""
    copied_sizes: list[float] = field(default_factory=list)
    """Model sizes down and up in a step, by torch's profiler in the steps after the counted ones; on CUDA only."""

    @property
    def moved_sizes(self) -> list[float]:
        """Model sizes down and up in a step: as all methods are measured where they can be, else by our own counters."""
        return self.copied_sizes or self.counted_sizes

    def in_model_sizes(self, n_bytes: Sequence[int], steps: int) -> list[float]:
        """Bytes of several steps, as model sizes a step."""
        return [n / steps / (self.n_params * _DTYPE_BYTES) for n in n_bytes]


def _our_optimizer(trainer: pl.Trainer) -> ZenFlowZeroOptimizer | None:
    strategy = trainer.strategy
    return strategy.zenflow_optimizer if isinstance(strategy, ZenFlowStrategy) else None


def _clocks(optimizer: ZenFlowZeroOptimizer | None) -> tuple[float, float, float]:
    if optimizer is None:
        return time.perf_counter(), 0.0, 0.0
    return time.perf_counter(), optimizer.telemetry.stalls.device_s, optimizer.stalls.worker_busy_s


def _counted(optimizer: ZenFlowZeroOptimizer) -> tuple[int, int]:
    reading = optimizer.counters.read(worker_pid=optimizer.worker_pid)
    return reading.d2h_bytes, reading.h2d_bytes


def result_of(values: Mapping[str, Any]) -> StepResult:
    """The inverse of `dataclasses.asdict`."""
    return StepResult(**{**values, "spec": StepSpec(**values["spec"])})


def results_of(written: Mapping[str, Any]) -> list[list[StepResult]]:
    """Of each repeat the runs, from what `benchmarks.step_time` has written."""
    return [[result_of(values) for values in of_repeat] for of_repeat in written["runs"]]


class StepTimer(pl.Callback):
    """Times from the end of one step to the end of the next; what is asked for once is asked for outside of the timed steps."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self._first, self._end = result.spec.warm_up, result.spec.warm_up + result.spec.steps
        self._last = _clocks(None)
        self._counted = (0, 0)
        self._meter: CopyMeter | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._result.n_params = sum(p.numel() for p in pl_module.parameters())

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step, optimizer, on_cuda = trainer.global_step, _our_optimizer(trainer), self._result.spec.device == "cuda"
        if step == self._first and optimizer is not None:
            self._counted = _counted(optimizer)
        if step == self._first:
            # What all of the imports have left for Python's first full collection would fall into some method's timed steps.
            gc.collect()
        if step in (self._first, self._end) and on_cuda:
            torch.cuda.synchronize()
        last, self._last = self._last, _clocks(optimizer)
        if self._first < step <= self._end:
            step_s, stall_s, worker_s = (now - before for now, before in zip(self._last, last, strict=True))
            self._result.step_s.append(step_s)
            self._result.stall_s.append(stall_s)
            self._result.worker_s.append(worker_s)
        if step == self._end:
            self._result.host_bytes = proportional_bytes()
            if optimizer is not None:
                self._read_ours(optimizer)
            if on_cuda:
                self._meter = CopyMeter()
                self._meter.start()
        if step == self._end + PROFILED_STEPS and self._meter is not None:
            self._result.copied_sizes = self._result.in_model_sizes(self._meter.stop(), PROFILED_STEPS)

    def _read_ours(self, optimizer: ZenFlowZeroOptimizer) -> None:
        self._result.schedule = [optimizer.schedule.update_interval, optimizer.schedule.publish_lag]
        moved = [now - before for now, before in zip(_counted(optimizer), self._counted, strict=True)]
        self._result.counted_sizes = self._result.in_model_sizes(moved, self._result.spec.steps)


def proportional_bytes() -> int:
    """Memory of this process and of those it started; a page that n processes share counts 1/n for each."""
    this = psutil.Process()
    return sum(process.memory_full_info().pss for process in [this, *this.children(recursive=True)])


def make_module(spec: StepSpec) -> TimedModule:
    """The model of a run."""
    if spec.device == "simulated":
        return SimulatedAccelerator(steps=spec.total_steps, params=spec.params, compute_s=spec.compute_s)
    return Gpt(steps=spec.total_steps, params=spec.params, batch=spec.batch, tokens=spec.tokens, narrow=spec.narrow)


def train(spec: StepSpec, strategy: Strategy, **options: Any) -> None:
    """Trains the model of a run.

    Args:
        spec: the run.
        strategy: the method's, or one that does more.
        **options: of the trainer; without any there is no logger and no progress bar.
    """
    torch.manual_seed(1)
    # Advice about loggers and workers of data loaders; what matters is raised.
    warnings.filterwarnings("ignore", module="lightning")
    module = make_module(spec)
    method = METHODS[spec.method]
    module.optimizer_class = method.optimizer
    given = {
        "accelerator": "gpu" if spec.device == "cuda" else "cpu",
        "devices": 1,
        "strategy": strategy,
        "precision": "bf16-true",
        "max_steps": spec.total_steps,
        "gradient_clip_val": 1.0 if method.clips else None,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    pl.Trainer(**{**given, **options}).fit(module)


def run(spec: StepSpec) -> StepResult:
    """Trains and measures."""
    result = StepResult(spec=spec)
    train(spec, METHODS[spec.method].make_strategy(), callbacks=[StepTimer(result)])
    if spec.device == "cuda":
        result.device_bytes = torch.cuda.max_memory_allocated()
    return result


def main(spec: StepSpec, path: Path) -> None:
    """Runs and writes the result."""
    result = run(spec)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(dataclasses.asdict(result)))
    temporary.rename(path)


if __name__ == "__main__":
    main(StepSpec(**json.loads(sys.argv[1])), Path(sys.argv[2]))
