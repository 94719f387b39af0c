"""TensorBoard dashboard: a chart for each metric, in groups (Custom Scalars), and drawings of the timeline (Images)."""

from typing import Any

from lightning_zenflow.monitor.interface import MonitoredOptimizer
from lightning_zenflow.monitor.plot import can_draw, draw
from lightning_zenflow.monitor.timeline import chrome_trace
from lightning_zenflow.telemetry.tracing import Recording

TIMELINE_TAG = "zenflow/timeline"

CHARTS: dict[str, dict[str, str]] = {
    "ZenFlow stall": {
        "device waits, % of a step": "stall/device_percent",
        "training thread waits, % of a step": "stall/host_percent",
        "device waits for the CPU's results, ms a step": "stall/device_publish_wait_ms",
        "device waits for buffers, ms a step": "stall/device_publish_buffer_ms",
        "device waits for selections, ms a step": "stall/device_select_ms",
        "device waits for flushes, ms a step": "stall/device_flush_ms",
    },
    "ZenFlow overlap": {
        "step time, ms": "overlap/step_ms",
        "worker's computation, ms a step": "overlap/worker_busy_ms",
        "hidden share of the worker's computation, %": "overlap/hidden_percent",
        "S (update_interval), steps": "overlap/update_interval_steps",
        "d (publish_lag), steps": "overlap/publish_lag_steps",
        "staleness of host-owned gradients, steps": "overlap/staleness_steps",
        "blocks of the tail, %": "overlap/tail_percent",
        "late blocks, % of those submitted in backward": "overlap/late_blocks_percent",
        "error of predicted clip factors, %": "overlap/clip_prediction_error_percent",
    },
    "ZenFlow traffic": {
        "device to host, model sizes a step": "traffic/d2h_model_sizes",
        "host to device, model sizes a step": "traffic/h2d_model_sizes",
        "device to host, GB/s": "traffic/d2h_GB_per_s",
        "host to device, GB/s": "traffic/h2d_GB_per_s",
    },
    "ZenFlow selection": {
        "device-owned weights, %": "selection/device_owned_percent",
        "gradient's squared norm in device-owned columns, %": "selection/device_squared_norm_percent",
        "selected columns that were selected before, %": "selection/overlap_percent",
    },
    "ZenFlow memory": {
        "host: training process, GB": "memory/trainer_GB",
        "host: worker process, GB": "memory/worker_GB",
        "host: arena, GB": "memory/arena_GB",
        "device: allocated, GB": "memory/device_GB",
        "device: peak, GB": "memory/device_peak_GB",
    },
}
"""Category -> title of the chart -> metric, without the prefix "zenflow/"; all others are in *Scalars*. TensorBoard has one
colour for each run, so a chart with two metrics would show two lines of the same colour."""

_FIRST_FIGURE, _FIGURE_STEPS = 5, 3


def layout() -> dict[str, dict[str, list[Any]]]:
    """Converts `CHARTS` to the layout of `SummaryWriter.add_custom_scalars`, whose tags are regular expressions."""
    return {
        category: {title: ["Multiline", [f"^zenflow/{name}$"]] for title, name in charts.items()}
        for category, charts in CHARTS.items()
    }


class Dashboard:
    """Writes the layout of the charts once, and drawings of the timeline while training goes on.

    Args:
        writer: a `SummaryWriter`.
        optimizer: source of the recordings.
        figure_every_n_steps: interval of the drawings; 0: none. Without matplotlib there are none either.
    """

    def __init__(self, writer: Any, optimizer: MonitoredOptimizer, *, figure_every_n_steps: int) -> None:
        writer.add_custom_scalars(layout())
        self._writer = writer
        self._optimizer = optimizer
        self._every = figure_every_n_steps if can_draw() else 0
        self._recording: Recording | None = None
        if self._every > 0:
            self._record(skip=_FIRST_FIGURE - 1)

    def end_step(self, step: int) -> None:
        """Draws a recording that is complete, and requests the next one where it is due.

        Args:
            step: number of the optimizer step that has ended, counted from 1.
        """
        if self._recording is not None and self._recording.complete:
            self.show(self._recording, step)
            self._recording = None
        if self._every > 0 and self._recording is None and step % self._every == 0:
            # The next step has already begun; the device can be synchronised before the one after it.
            self._record(skip=1)

    def show(self, recording: Recording, step: int) -> None:
        """Draws a complete recording.

        Args:
            recording: the recording.
            step: number of the optimizer step that has ended, counted from 1.
        """
        figure = draw(chrome_trace(recording.steps, worker_cores=self._optimizer.worker_cores))
        self._writer.add_figure(TIMELINE_TAG, figure, global_step=step - 1)

    def _record(self, *, skip: int) -> None:
        self._recording = self._optimizer.telemetry.tracer.record(skip=skip, steps=_FIGURE_STEPS, aligned=True)
