"""Predictions of `lightning-zenflow estimate` beside measured kernels and steps."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks.kernel.measure import triad_gb_per_s
from benchmarks.recorded_device.prediction import Prediction
from benchmarks.step_time.methods import METHODS
from benchmarks.step_time.report import baseline_of, runs_by_method
from benchmarks.step_time.run import StepResult
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.estimate.byte_counts import cpu_adamw_bytes, replay_bytes
from lightning_zenflow.estimate.cost import estimate
from lightning_zenflow.estimate.machine import GB, Machine, Workload
from lightning_zenflow.estimate.shapes import shapes_of_count
from lightning_zenflow.estimate.zenflow_cost import replay_core_s

_DTYPE_BYTES = 2
_ROOM_FOR_ALL = 1e9
"""GB: kept gradients stay on the device, as in the recordings."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A prediction and its measurement, in the same unit."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to the measurement; negative: the prediction is too low."""
        return self.predicted / self.measured - 1


def check_kernel(kernel: Mapping[str, Any], cores: int) -> dict[str, Checked]:
    """Times of the kernels, by name, in ns a parameter and step on all cores.

    Args:
        kernel: result file of `benchmarks.kernel`.
        cores: of that machine.
    """
    gb_per_s = triad_gb_per_s(kernel)
    checked = {}
    for name, values in kernel["ns"].items():
        window = re.fullmatch(r"replay, S=(\d+)", name)
        if window is not None:
            s = int(window[1])
            predicted = max(replay_bytes(s, _DTYPE_BYTES) / gb_per_s, 1e9 * replay_core_s(s) / cores) / s
        elif name == "DeepSpeedCPUAdam":
            predicted = cpu_adamw_bytes(_DTYPE_BYTES) / gb_per_s
        else:
            continue
        checked[name] = Checked(predicted=predicted, measured=median(values))
    return checked


@dataclass(frozen=True, kw_only=True)
class CheckedRuns:
    """Checks of a method's runs."""

    title: str
    without_offload: str
    """Step without offload: ms and the measured method."""
    schedule: list[int]
    """S and d; empty for ZeRO-Offload."""
    step: Checked | None
    """ms; None for `ZenFlowStrategy` in training on the CPU, whose model does not cover the cores that the worker takes."""
    worker: Checked | None
    """ms a step; `ZenFlowStrategy` only."""


def check_steps(results: Sequence[Sequence[StepResult]], machine: Machine) -> Iterator[CheckedRuns]:
    """Checks of ZeRO-Offload and `ZenFlowStrategy`; none where no run shows a step without offload.

    Args:
        results: the runs of each repeat, all of one device and size.
        machine: its rates.
    """
    runs = runs_by_method(results)
    baseline = baseline_of(runs)
    if baseline is None:
        return
    baseline_ms = _median_ms(r.step_s for r in runs[baseline])
    for name, of_method in runs.items():
        schedule, method = of_method[-1].schedule, METHODS[name]
        if not schedule and name != "zero_offload":
            continue
        keys = {"update_interval": schedule[0], "publish_lag": schedule[1]} if schedule else {}
        workload = Workload(model=shapes_of_count(of_method[0].n_params), step_ms=baseline_ms)
        prediction = estimate(workload, machine, ZenFlowConfig(**{**method.zenflow_keys, **keys}))
        cost = prediction.zenflow if schedule else prediction.zero_offload
        step = Checked(predicted=1e3 * cost.step_s, measured=_median_ms(r.step_s for r in of_method))
        worker_ms = _median_ms(r.worker_s for r in of_method) if schedule else None
        yield CheckedRuns(
            title=method.title,
            without_offload=f"{baseline_ms:.0f} ({baseline})",
            schedule=schedule,
            step=None if schedule and of_method[0].spec.device == "cpu" else step,
            worker=None if worker_ms is None else Checked(predicted=1e3 * cost.cpu_s, measured=worker_ms),
        )


@dataclass(frozen=True, kw_only=True)
class CheckedTimeline:
    """A prediction from recorded operations, and the estimate beside it; ms."""

    timeline: Prediction
    step: Checked
    worker: Checked


def check_timelines(predictions: Iterable[Prediction]) -> Iterator[CheckedTimeline]:
    """The estimate with the same rates, and with the timeline's forward and backward alone as the step without offload."""
    for p in predictions:
        setting, rates = p.setting, p.setting.rates
        machine = Machine(
            gpus=1, gpus_per_host=1, gpu_mem=_ROOM_FOR_ALL, pcie=rates.pcie / GB, cpu_bw=rates.worker / GB
        )
        workload = Workload(model=shapes_of_count(setting.params), step_ms=1e3 * p.alone_s)
        config = ZenFlowConfig(
            topk_ratio=0.05, update_interval=setting.update_interval, publish_lag=setting.publish_lag
        )
        cost = estimate(workload, machine, config).zenflow
        yield CheckedTimeline(
            timeline=p,
            step=Checked(predicted=1e3 * cost.step_s, measured=1e3 * p.step_s),
            worker=Checked(predicted=1e3 * cost.cpu_s, measured=1e3 * p.worker_s),
        )


def _median_ms(runs: Iterable[list[float]]) -> float:
    """Median over the repeats of the mean, converted from seconds."""
    return 1e3 * median(map(mean, runs))
