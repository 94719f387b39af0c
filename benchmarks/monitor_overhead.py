"""What `StallMonitor` costs, so exactly that 0.5 % of a step can be told where steps differ by ten times that.

    python -m benchmarks.monitor_overhead                             # under six minutes on two cores
    python -m benchmarks.monitor_overhead --seconds 60 --settings 4.2e6x5x1,4.2e6x5x50

Within one training on the simulated accelerator the monitor is switched on and off in turn, for some steps each. That gives three numbers:

- CPU time of the training thread in the monitor's hooks, loggers included, in the spans that it asks for, and in TensorBoard's drawings.
  Hardly depends on what else the machine does.
- CPU time of the whole process, TensorBoard's writing thread included: runs of steps with the monitor less their neighbours without.
- Wall time, likewise.

The cost is one per step and hardly one per weight, so short steps of a small model show it best; long ones of a large model are measured
beside them. Numbers are medians with the interval that holds the true one with 95 % (order statistics). TensorBoard and a progress bar
are on. Prints a table; writes RESULTS/monitor_overhead.json and .md.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from tabulate import tabulate
from typing_extensions import override

from benchmarks import records
from benchmarks.documents import RESULTS, update_document
from benchmarks.step_run import simulated, train
from lightning_zenflow import StallMonitor, ZenFlowStrategy
from lightning_zenflow.telemetry.tracing import Recording, Tracer
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer

DOCUMENT = records.ROOT / "docs" / "metrics.md"
LIMIT_PERCENT = 0.5

_LEAST_WARM_UP = 20
_MOST_STEPS = 1_000_000
_SPANS_TIMED = 20_000
_STEPS_A_DRAWING = 1000
"""As `StallMonitor` has it by default."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training in which the monitor is switched on and off."""

    params: float
    compute_ms: float
    log_every: int

    @property
    def run(self) -> int:
        """Steps with or without the monitor in a row: so many that each run logs equally often."""
        return max(2, self.log_every)

    @property
    def warm_up(self) -> int:
        """Steps before the first run, whole runs."""
        return math.ceil(_LEAST_WARM_UP / self.run) * self.run


_DEFAULT_SETTINGS = [
    Setting(params=4.2e6, compute_ms=10.0, log_every=50),
    Setting(params=4.2e6, compute_ms=10.0, log_every=1),
    Setting(params=151e6, compute_ms=540.0, log_every=1),
]


@dataclass(kw_only=True)
class Costs:
    """What was measured, in seconds a step; of every run of steps where it is a list."""

    setting: Setting
    hooks_s: list[float] = field(default_factory=list)
    """CPU time of the training thread in the monitor's hooks; of monitored runs only."""
    process_s: dict[str, list[float]] = field(default_factory=lambda: {"on": [], "off": []})
    """CPU time of the process, with the monitor and without."""
    wall_s: dict[str, list[float]] = field(default_factory=lambda: {"on": [], "off": []})
    n_spans: int = 0
    """Spans that the monitor has recorded in one step out of `log_every`."""
    span_s: float = 0.0
    """CPU time of the training thread for one of them."""
    drawing_s: float = 0.0
    """CPU time of the training thread for one drawing of the timeline, of which TensorBoard gets one every thousand steps."""

    def own_s(self) -> list[float]:
        """CPU time of the training thread for all of it, of every monitored run."""
        others_s = self.n_spans * self.span_s / self.setting.log_every + self.drawing_s / _STEPS_A_DRAWING
        return [hooks_s + others_s for hooks_s in self.hooks_s]


class AlternatingMonitor(StallMonitor):
    """Monitors every second run of steps, and times all of them.

    Args:
        costs: is filled.
        seconds: how long to go on; training ends with the first pair of runs after that.
    """

    def __init__(self, costs: Costs, *, seconds: float) -> None:
        super().__init__(summary=False, figure_every_n_steps=0)
        self._costs = costs
        self._run = costs.setting.run
        self._warm_up = costs.setting.warm_up
        self._seconds = seconds
        self._ends_s = math.inf
        self._hooks_ns = 0
        self._to_draw: Recording | None = None

    def monitors(self, step: int) -> bool:
        """Whether a step, counted from 1, is monitored: runs on, off, off, on, on, off, off, ...; the warm-up is."""
        return (max(0, step - 1 - self._warm_up) // self._run + 1) // 2 % 2 == 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self._optimizer is not None
        self._to_draw = self._optimizer.telemetry.tracer.record(skip=4, steps=3, aligned=True)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: Any) -> None:
        assert self._optimizer is not None
        step = trainer.global_step
        if self._recording is not None and self._recording.complete:
            self._costs.n_spans = len(self._recording.steps[0].host_spans)
        if self.monitors(step):
            begin_ns = time.thread_time_ns()
            super().on_train_batch_end(trainer, pl_module, *arguments)
            self._hooks_ns += time.thread_time_ns() - begin_ns
        elif self.monitors(step + 1):
            # What a monitored step would have asked for.
            self._sample_copies(trainer, self._optimizer)
        if self._to_draw is not None and self._to_draw.complete:
            begin_ns = time.thread_time_ns()
            self._dashboards[0].show(self._to_draw, step)
            self._costs.drawing_s = 1e-9 * (time.thread_time_ns() - begin_ns)
            self._to_draw = None
        if step >= self._warm_up and (step - self._warm_up) % self._run == 0:
            self._end_run(trainer, step)

    @override
    def _sample_copies(self, trainer: pl.Trainer, optimizer: ZenFlowZeroOptimizer) -> None:
        # Spans of an unmonitored run would be counted as its own cost.
        if self.monitors(trainer.global_step + 1):
            super()._sample_copies(trainer, optimizer)

    def _end_run(self, trainer: pl.Trainer, step: int) -> None:
        """Counts the run that ends with a step, and begins the next."""
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
    """CPU time of this thread for recording a span, beyond that of leaving it out."""
    tracer = Tracer(torch.device("cpu"), worker_threads=1)

    def spans_ns() -> int:
        begin_ns = time.thread_time_ns()
        for _ in range(_SPANS_TIMED):
            with tracer.span("d2h copies", n_bytes=1):
                pass
        return time.thread_time_ns() - begin_ns

    left_out_ns = spans_ns()
    tracer.record(skip=1, steps=1)
    tracer.begin_step(1)
    return 1e-9 * (spans_ns() - left_out_ns) / _SPANS_TIMED


def median_with_bounds(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the order statistics between which the true one lies with 95 %."""
    ordered, n = sorted(values), len(values)
    rank = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return statistics.median(ordered), ordered[rank], ordered[n - 1 - rank]


def measure(setting: Setting, seconds: float) -> Costs:
    """One training."""
    costs = Costs(setting=setting, span_s=seconds_of_a_span())
    spec = simulated(
        "zenflow",
        params=setting.params,
        compute_ms=setting.compute_ms,
        warm_up=setting.warm_up,
        steps=_MOST_STEPS,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(
            spec,
            ZenFlowStrategy(update_interval=4, publish_lag=1),
            callbacks=[AlternatingMonitor(costs, seconds=seconds), ProgressBar()],
            logger=TensorBoardLogger(folder),
            log_every_n_steps=setting.log_every,
            enable_progress_bar=True,
        )
    return costs


def row(costs: Costs) -> dict[str, str]:
    """One of the table."""
    own, process, wall = (
        [1e6 * value for value in median_with_bounds(values)]
        for values in (costs.own_s(), *(_differences(times) for times in (costs.process_s, costs.wall_s)))
    )
    step_s = statistics.median(costs.wall_s["off"])
    return {
        "weights": f"{costs.setting.params / 1e6:g} M",
        "step ms": f"{1e3 * step_s:.1f}",
        "log_every_n_steps": str(costs.setting.log_every),
        "training thread, us a step": _with_bounds(own, "{:.0f}"),
        "% of the step": _with_bounds([1e-4 * value / step_s for value in own], "{:.2f}"),
        f"{LIMIT_PERCENT} % of a step of": f"{own[2] / 1e3 / (LIMIT_PERCENT / 100):.0f} ms",
        "process, on - off, us": _with_bounds(process, "{:.0f}"),
        "wall, on - off, us": _with_bounds(wall, "{:.0f}"),
        "pairs": str(len(costs.hooks_s)),
    }


def _differences(times: dict[str, list[float]]) -> list[float]:
    return [on - off for on, off in zip(times["on"], times["off"], strict=True)]


def _with_bounds(values: Sequence[float], style: str) -> str:
    middle, low, high = (style.format(value) for value in values)
    return f"{middle} ({low} to {high})"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--settings",
        type=_settings,
        default=_DEFAULT_SETTINGS,
        metavar="PARAMSxMSxN,...",
        help="weights, compute, steps a log",
    )
    add("--seconds", type=float, default=80.0, help="of each of them")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER")
    return parser.parse_args(arguments)


def _settings(text: str) -> list[Setting]:
    settings = []
    for one in text.split(","):
        params, compute_ms, log_every = one.split("x")
        settings.append(Setting(params=float(params), compute_ms=float(compute_ms), log_every=int(log_every)))
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = parse_arguments(arguments)
    measured = [measure(setting, options.seconds) for setting in options.settings]
    table = tabulate([row(costs) for costs in measured], headers="keys", tablefmt="github", disable_numparse=True)
    about = records.about("benchmarks.monitor_overhead", arguments, hardware=records.hardware())
    text = records.with_origin(table, about) + "."
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "monitor_overhead.json"
    path.write_text(json.dumps({**about, "measured": [dataclasses.asdict(costs) for costs in measured]}))
    path.with_suffix(".md").write_text(text + "\n")
    update_document(DOCUMENT, {path.stem: text}, options.results)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
