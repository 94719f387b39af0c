"""How a number of steps under one pace becomes one observation. Pure Python."""

import statistics

from lightning_zenflow.auto_schedule import Pace

_SHORTEST_PERIOD = 16


class PaceObserver:
    """Collects times of steps until they make an observation.

    The steps right after a change are left out: their windows still have the old length. So is everything around an interruption, such as a
    validation. Medians, because a single slow step (a data loader that hiccups) says nothing about the pace.

    Args:
        pace: in force.
    """

    def __init__(self, pace: Pace) -> None:
        self._device_s: list[float] = []
        self._worker_s: list[float] = []
        self._stall_s: list[float] = []
        self._left_out = 0
        self.restart(pace, pace)

    def restart(self, before: Pace, after: Pace) -> None:
        """Begins anew with the next step: the pace has changed, or something has come between the steps."""
        self._length = max(_SHORTEST_PERIOD, after.update_interval)
        # One step more: the first one after an interruption counts the time of the interruption.
        self._left_out = 1 + max(before.update_interval, after.update_interval) + after.publish_lag
        self._clear()

    @property
    def completes_next(self) -> bool:
        """Whether the next step completes an observation."""
        return self._left_out == 0 and len(self._device_s) + 1 == self._length

    def add(self, *, device_s: float, worker_s: float, stall_s: float) -> tuple[float, float] | None:
        """Takes one step's times.

        Args:
            device_s: seconds that the step took without waiting for the worker.
            worker_s: seconds that the worker computed for the rounds published in it.
            stall_s: seconds spent waiting for the worker.

        Returns:
            Load and stall share (see `auto_schedule.Observation`) once there are enough steps, else None.
        """
        if self._left_out > 0:
            self._left_out -= 1
            return None
        self._device_s.append(device_s)
        self._worker_s.append(worker_s)
        self._stall_s.append(stall_s)
        if len(self._device_s) < self._length:
            return None
        load = statistics.median(self._worker_s) / max(statistics.median(self._device_s), 1e-9)
        stall = sum(self._stall_s) / max(sum(self._device_s) + sum(self._stall_s), 1e-9)
        self._clear()
        return load, stall

    def _clear(self) -> None:
        self._device_s.clear()
        self._worker_s.clear()
        self._stall_s.clear()
