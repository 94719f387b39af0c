"""One run of the step-time benchmark in a process of its own: `python -m benchmarks.step_run SPEC_JSON RESULT_FILE`."""

import dataclasses
import json
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import psutil
import torch
from typing_extensions import override

from benchmarks.accelerator import Gpt, SimulatedAccelerator, TimedModule
from benchmarks.step_methods import METHODS
from lightning_zenflow import ZenFlowStrategy

Device = Literal["simulated", "cpu", "cuda"]


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


@dataclass(kw_only=True)
class StepResult:
    """What was measured in one run."""

    spec: StepSpec
    step_s: list[float] = field(default_factory=list)
    """Wall time of each counted step."""
    stall_s: list[float] = field(default_factory=list)
    """Waiting in each counted step, as `StallClock.device_s` counts it; ours only."""
    worker_s: list[float] = field(default_factory=list)
    """The worker's time for the rounds published in each counted step; ours only."""
    pace: list[int] = field(default_factory=list)
    """S and d at the end; ours only."""
    host_bytes: int = 0
    """Memory of all processes after the last step, shared pages counted once (PSS)."""
    device_bytes: int = 0
    """Most that was allocated on the device; 0 without CUDA."""
    n_params: int = 0


class StepTimer(pl.Callback):
    """Times from the end of one step to the end of the next."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self._last = self._clocks(None)

    def _clocks(self, trainer: pl.Trainer | None) -> tuple[float, float, float]:
        strategy = trainer.strategy if trainer is not None else None
        optimizer = strategy.zenflow_optimizer if isinstance(strategy, ZenFlowStrategy) else None
        if optimizer is None:
            return time.perf_counter(), 0.0, 0.0
        return time.perf_counter(), optimizer.stalls.device_s, optimizer.stalls.worker_busy_s

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        spec = self._result.spec
        if trainer.global_step in (spec.warm_up, spec.warm_up + spec.steps) and spec.device == "cuda":
            torch.cuda.synchronize()
        last, self._last = self._last, self._clocks(trainer)
        if trainer.global_step > spec.warm_up:
            step_s, stall_s, worker_s = (now - before for now, before in zip(self._last, last, strict=True))
            self._result.step_s.append(step_s)
            self._result.stall_s.append(stall_s)
            self._result.worker_s.append(worker_s)
        if trainer.global_step == spec.warm_up + spec.steps:
            self._result.host_bytes = proportional_bytes()
            optimizer = getattr(trainer.strategy, "zenflow_optimizer", None)
            if optimizer is not None:
                pace = optimizer.pace
                self._result.pace = [pace.update_interval, pace.publish_lag]


def proportional_bytes() -> int:
    """Memory of this process and of those it started; a page that n processes share counts 1/n for each."""
    this = psutil.Process()
    return sum(process.memory_full_info().pss for process in [this, *this.children(recursive=True)])


def make_module(spec: StepSpec) -> TimedModule:
    """The model of a run."""
    steps = spec.warm_up + spec.steps
    if spec.device == "simulated":
        return SimulatedAccelerator(steps=steps, params=spec.params, compute_s=spec.compute_s)
    return Gpt(steps=steps, params=spec.params, batch=spec.batch, tokens=spec.tokens)


def run(spec: StepSpec) -> StepResult:
    """Trains and measures."""
    torch.manual_seed(1)
    method = METHODS[spec.method]
    module = make_module(spec)
    module.optimizer_class = method.optimizer
    result = StepResult(spec=spec, n_params=sum(p.numel() for p in module.parameters()))
    trainer = pl.Trainer(
        accelerator="gpu" if spec.device == "cuda" else "cpu",
        devices=1,
        strategy=method.make_strategy(),
        precision="bf16-true",
        max_steps=spec.warm_up + spec.steps,
        gradient_clip_val=1.0,
        callbacks=[StepTimer(result)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    if spec.device == "cuda":
        result.device_bytes = torch.cuda.max_memory_allocated()
    return result


def main(spec: StepSpec, path: Path) -> None:
    """Runs and writes the result."""
    # Advice about loggers and workers of data loaders; what matters is raised.
    warnings.filterwarnings("ignore", module="lightning")
    result = run(spec)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(dataclasses.asdict(result)))
    temporary.rename(path)


if __name__ == "__main__":
    main(StepSpec(**json.loads(sys.argv[1])), Path(sys.argv[2]))
