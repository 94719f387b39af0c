"""What `StallMonitor` costs: one training in which it is switched on and off in turn, compared pair by pair.

    python -m benchmarks.monitor_overhead                             # on CUDA if there is any, else on the simulated accelerator
    python -m benchmarks.monitor_overhead --params 151e6 --compute-ms 540 --pairs 20

Every pair is a run of steps with the monitor and one without, in alternating order; the ratio of their mean step times does not depend on
how fast the machine happens to be at the time. Prints the median of the ratios and the interval that holds it with 95 % (order statistics).
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from benchmarks.step_run import StepSpec, make_module
from lightning_zenflow import StallMonitor, ZenFlowStrategy


class AlternatingMonitor(StallMonitor):
    """Monitors every second run of steps, and times all of them.

    Args:
        warm_up: steps before the first pair.
        run: steps in a run.
    """

    def __init__(self, *, warm_up: int, run: int) -> None:
        super().__init__(progress_bar=False, summary=False)
        self._warm_up = warm_up
        self._run = run
        self.run_s: dict[bool, list[float]] = {True: [], False: []}
        """Mean step times, monitored and not."""

    def _monitors(self, step: int) -> bool:
        """Whether a step, counted from 1, is monitored: runs on, off, off, on, on, off, off, ..."""
        return (max(0, step - 1 - self._warm_up) // self._run + 1) // 2 % 2 == 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: Any) -> None:
        step = trainer.global_step
        if self._monitors(step):
            super().on_train_batch_end(trainer, pl_module, *arguments)
        if step >= self._warm_up and (step - self._warm_up) % self._run == 0:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if step > self._warm_up:
                self.run_s[self._monitors(step)].append((now - self._started) / self._run)
            self._started = now


def median_with_bounds(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the order statistics between which the true one lies with 95 %."""
    ordered, n = sorted(values), len(values)
    rank = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return statistics.median(ordered), ordered[rank], ordered[n - 1 - rank]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    on_cuda = torch.cuda.is_available()
    add("--device", choices=["simulated", "cpu", "cuda"], default="cuda" if on_cuda else "simulated")
    add("--params", type=float, default=1.5e9 if on_cuda else 151e6)
    add("--batch", type=int, default=8 if on_cuda else 1)
    add("--tokens", type=int, default=1024 if on_cuda else 16)
    add("--compute-ms", type=float, default=540.0, help="forward and backward of the simulated accelerator")
    add("--log-every", type=int, default=10, help="log_every_n_steps")
    add("--run", type=int, default=10, help="steps with or without the monitor in a row, a multiple of --log-every")
    add("--pairs", type=int, default=10)
    add("--warm-up", type=int, default=10, help="steps before the first pair")
    options = parser.parse_args(arguments)
    if options.run % options.log_every:
        parser.error(f"--run {options.run}: allowed is a multiple of --log-every {options.log_every}")
    warnings.filterwarnings("ignore", module="lightning")
    spec = StepSpec(
        device=options.device,
        method="zenflow",
        params=options.params,
        batch=options.batch,
        tokens=options.tokens,
        compute_s=options.compute_ms / 1e3,
        warm_up=options.warm_up,
        steps=2 * options.pairs * options.run,
    )
    monitor = AlternatingMonitor(warm_up=options.warm_up, run=options.run)
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator="gpu" if options.device == "cuda" else "cpu",
            devices=1,
            strategy=ZenFlowStrategy(update_interval=4, publish_lag=1),
            precision="bf16-true",
            max_steps=spec.warm_up + spec.steps,
            gradient_clip_val=1.0,
            callbacks=[monitor],
            logger=CSVLogger(folder),
            log_every_n_steps=options.log_every,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        ).fit(make_module(spec))
    ratios = [on / off for on, off in zip(monitor.run_s[True], monitor.run_s[False], strict=True)]
    middle, low, high = median_with_bounds(ratios)
    print(
        f"step with the monitor / without: {middle:.4f} ({low:.4f} to {high:.4f}), {len(ratios)} pairs of {options.run} steps;"
        f" {1e3 * statistics.median(monitor.run_s[False]):.1f} ms a step without"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
