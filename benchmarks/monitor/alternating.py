"""A monitor that is switched on and off within one training, and its costs."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_zenflow import StallMonitor
from lightning_zenflow.monitor.interface import rank_zero_optimizer
from lightning_zenflow.monitor.step_meter import StepMeter
from lightning_zenflow.telemetry.tracing import Recording, Tracer

_LEAST_WARM_UP = 20
_SPANS_TIMED = 20_000
_STEPS_A_FIGURE = 1000
"""Default of `StallMonitor`."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training in which the monitor is switched on and off."""

    params: float
    compute_ms: float
    log_every: int

    @property
    def run(self) -> int:
        """Consecutive steps with or without the monitor: so many that each run logs equally often."""
        return max(2, self.log_every)

    @property
    def warm_up(self) -> int:
        """Steps before the first run, a multiple of `run`."""
        return math.ceil(_LEAST_WARM_UP / self.run) * self.run

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """The inverse of PARAMSxMSxN."""
        params, compute_ms, log_every = text.split("x")
        return cls(params=float(params), compute_ms=float(compute_ms), log_every=int(log_every))


@dataclass(kw_only=True)
class Costs:
    """Measurements in seconds a step; lists have an entry for each run of steps."""

    setting: Setting
    hooks_s: list[float] = field(default_factory=list)
    """CPU time of the training thread in the monitor's hooks, in monitored runs."""
    process_s: dict[str, list[float]] = field(default_factory=lambda: {"on": [], "off": []})
    """CPU time of the process, with the monitor and without."""
    wall_s: dict[str, list[float]] = field(default_factory=lambda: {"on": [], "off": []})
    n_spans: int = 0
    """Spans that the monitor records in one step out of `log_every`."""
    span_s: float = 0.0
    """CPU time of the training thread for one span."""
    figure_s: float = 0.0
    """CPU time of the training thread for one figure of the timeline, which TensorBoard gets every thousand steps."""

    def own_s(self) -> list[float]:
        """CPU time of the training thread for the whole monitor, of every monitored run."""
        others_s = self.n_spans * self.span_s / self.setting.log_every + self.figure_s / _STEPS_A_FIGURE
        return [hooks_s + others_s for hooks_s in self.hooks_s]


class AlternatingMonitor(StallMonitor):
    """Monitors every second run of steps, and times all of them.

    Args:
        costs: filled in place.
        seconds: duration; training ends with the first complete pair of runs after it.
    """

    def __init__(self, costs: Costs, *, seconds: float) -> None:
        super().__init__(summary=False, figure_every_n_steps=0)
        self._costs = costs
        self._run = costs.setting.run
        self._warm_up = costs.setting.warm_up
        self._seconds = seconds
        self._ends_s = math.inf
        self._hooks_ns = 0
        self._to_plot: Recording | None = None

    def monitors(self, step: int) -> bool:
        """Whether a step, counted from 1, is monitored: runs on, off, off, on, on, off, off, ...; the warm-up is."""
        return (max(0, step - 1 - self._warm_up) // self._run + 1) // 2 % 2 == 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        optimizer = rank_zero_optimizer(trainer)
        assert optimizer is not None
        self._to_plot = optimizer.telemetry.tracer.record(skip=4, steps=3, aligned=True)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: Any) -> None:
        assert self._meter is not None
        step = trainer.global_step
        recording = self._meter.recording
        if recording is not None and recording.complete:
            self._costs.n_spans = len(recording.steps[0].host_spans)
        if self.monitors(step):
            begin_ns = time.thread_time_ns()
            super().on_train_batch_end(trainer, pl_module, *arguments)
            self._hooks_ns += time.thread_time_ns() - begin_ns
        elif self.monitors(step + 1):
            # The request that a monitored step would have made.
            self._sample_copies(trainer, self._meter)
        if self._to_plot is not None and self._to_plot.complete:
            begin_ns = time.thread_time_ns()
            self._dashboards[0].show(self._to_plot, step)
            self._costs.figure_s = 1e-9 * (time.thread_time_ns() - begin_ns)
            self._to_plot = None
        if step >= self._warm_up and (step - self._warm_up) % self._run == 0:
            self._end_run(trainer, step)

    @override
    def _sample_copies(self, trainer: pl.Trainer, meter: StepMeter) -> None:
        # Spans of an unmonitored run would be counted as its own cost.
        if self.monitors(trainer.global_step + 1):
            super()._sample_copies(trainer, meter)

    def _end_run(self, trainer: pl.Trainer, step: int) -> None:
        """Records the run that ends with a step, and begins the next."""
        wall_s, process_s = time.perf_counter(), time.process_time()
        if step == self._warm_up:
            self._ends_s = wall_s + self._seconds
        else:
            on = self.monitors(step)
            of_run = "on" if on else "off"
            self._costs.wall_s[of_run].append((wall_s - self._started_s[0]) / self._run)
            self._costs.process_s[of_run].append((process_s - self._started_s[1]) / self._run)
            if on:
                self._costs.hooks_s.append(1e-9 * self._hooks_ns / self._run)
            if wall_s > self._ends_s and len(self._costs.wall_s["on"]) == len(self._costs.wall_s["off"]):
                trainer.should_stop = True
        self._hooks_ns = 0
        self._started_s = (time.perf_counter(), time.process_time())


def seconds_of_a_span() -> float:
    """CPU time of this thread for recording a span, beyond that of an unrecorded one."""
    tracer = Tracer(torch.device("cpu"), worker_threads=1)

    def spans_ns() -> int:
        begin_ns = time.thread_time_ns()
        for _ in range(_SPANS_TIMED):
            with tracer.span("d2h copies", n_bytes=1):
                pass
        return time.thread_time_ns() - begin_ns

    unrecorded_ns = spans_ns()
    tracer.record(skip=1, steps=1)
    tracer.begin_step(1)
    return 1e-9 * (spans_ns() - unrecorded_ns) / _SPANS_TIMED
