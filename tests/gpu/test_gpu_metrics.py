"""On a CUDA device: no step waits for it, and all metrics arrive."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from gpu_cases import RACES
from harness import APPROXIMATE, Case, fit
from lightning_zenflow.step_meter import METRICS
from models import OptimizerOptions

pytestmark = pytest.mark.gpu

OPTIONS = {**APPROXIMATE, "reduce_bucket_size": 400_000, "select_interval": 18}
SLOWLY = OptimizerOptions(lr=1e-5)
"""With the network's own learning rate its output, and with that all gradients, are 0 within twenty steps."""
CASE = replace(
    RACES["a network"], steps=40, update_interval=4, publish_lag=1, optimizer=SLOWLY, strategy_options=OPTIONS
)


WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemset")
"""Calls that return when the device is done; cudaMemcpyAsync and cudaMemsetAsync have names of their own."""


class Profile(pl.Callback):
    """What the host calls from the end of one step to the end of another."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=False)
        self._span = record_function("the profiled steps")
        self._begun = False
        self.calls: list[str] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # A step of several micro-batches comes here several times.
        if trainer.global_step == self._first and not self._begun:
            self._begun = True
            self._profile.start()
            self._span.__enter__()
        if trainer.global_step == self._last and not self.calls:
            self._span.__exit__(None, None, None)
            self._profile.stop()
            events = self._profile.events()
            (span,) = [e for e in events if e.name == "the profiled steps" and str(e.device_type).endswith("CPU")]
            begin, end = span.time_range.start, span.time_range.end
            self.calls = [e.name for e in events if begin <= e.time_range.start and e.time_range.end <= end]


def train(case: Case, **options: Any) -> pl.Trainer:
    clipped = {"accumulate_grad_batches": case.accumulate, "gradient_clip_val": case.max_norm}
    keys = {"accelerator": "gpu", "precision": case.precision, **clipped, **options}
    return fit(case.make_model(), case.make_strategy(), steps=case.steps, **keys)


IN_BACKWARD = {"zenflow/overlap/late_blocks_percent", "zenflow/overlap/clip_prediction_error_percent"}
"""Metrics of schedules that submit in backward only."""
ACCUMULATED = replace(CASE, update_interval=2, accumulate=2).with_keys(overlap_comm=False)


@pytest.mark.parametrize("case", [CASE, ACCUMULATED], ids=["defaults", "accumulated, no overlap"])
def test_steps_do_not_wait_and_all_metrics_are_logged(case: Case, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    # In the first steps, and in those that select columns, the host waits. Behind step 34 all weights are compared.
    profiled = Profile(first=30, last=36)
    trainer = train(case, logger=logger, log_every_n_steps=2, callbacks=[profiled])
    assert any("LaunchKernel" in name for name in profiled.calls), "nothing of the device's calls was recorded"
    waits = [name for name in profiled.calls if name in WAITING]
    assert not waits, sorted(set(waits))
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        last = {name: float(value) for name, value in list(csv.DictReader(file))[-1].items() if value}
    # What is zero in all of the run is not logged.
    assert set(METRICS) - IN_BACKWARD <= set(trainer.callback_metrics) and "zenflow/overlap/step_ms" in last
    assert 0 <= last["zenflow/stall/device_percent"] <= 100
