"""Times of a training's steps, and the metrics and the summary that follow from them, for the Trainer's loop and Fabric's."""

import time
from array import array
from typing import TYPE_CHECKING

import torch

from lightning_zenflow.monitor.metrics import interval_metrics
from lightning_zenflow.monitor.summary import summary

if TYPE_CHECKING:
    from lightning_zenflow.engine.optimizer import ZenFlowOptimizer


class StepMeter:
    """Measures the steps of a training, from its own construction on. It never synchronises the device.

    Args:
        optimizer: source of the counters.

    Attributes:
        step_s: duration of each step so far: waits included, pauses excluded.
        end_ns: end of the last step.
    """

    def __init__(self, optimizer: "ZenFlowOptimizer") -> None:
        self.step_s = array("d")
        self._optimizer = optimizer
        self._n_read = 0
        self._last_read = self._before = optimizer.counters.read()
        self._pause_ns: int | None = None
        self._waited_s = 0.0
        self.end_ns = time.perf_counter_ns()

    def end_step(self) -> None:
        """Takes the time of a step."""
        self.resume()
        now_ns = time.perf_counter_ns()
        self.step_s.append(1e-9 * (now_ns - self.end_ns))
        self.end_ns = now_ns
        if len(self.step_s) == 1:
            # The summary averages over the steps behind the first.
            self._before = self._optimizer.counters.read()

    def pause(self) -> None:
        """Excludes what follows, such as validation, from the step that is being measured."""
        if self._pause_ns is None:
            self._pause_ns = time.perf_counter_ns()
            self._waited_s = self._waits_s()

    def resume(self) -> None:
        """Ends a pause, if there is one."""
        if self._pause_ns is not None:
            # The flush before validation is a stall of training.
            waited_s = self._waits_s() - self._waited_s
            self.end_ns += time.perf_counter_ns() - self._pause_ns - round(1e9 * waited_s)
            self._pause_ns = None

    def metrics(self) -> dict[str, float]:
        """The metrics of the steps since the last call, by name in `METRICS`; none if no step has ended since."""
        if self._n_read == len(self.step_s):
            return {}
        before, self._last_read = self._last_read, self._optimizer.counters.read()
        seconds = sum(self.step_s[self._n_read :])
        self._n_read = len(self.step_s)
        return interval_metrics(before, self._last_read, seconds=seconds)

    def summary(self) -> str | None:
        """Times, waits and advice; None before the second step."""
        if len(self.step_s) < 2:
            return None
        now, config = self._optimizer.counters.read(), self._optimizer.zenflow_config
        fp16 = self._optimizer.parts.rank.dtype == torch.float16
        return summary(self.step_s[1:], self._before, now, config, fp16=fp16)

    def _waits_s(self) -> float:
        return sum(self._optimizer.telemetry.stalls.seconds.values())
