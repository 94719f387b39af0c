"""What TensorBoard shows besides the metrics themselves: charts that group them (Custom Scalars), and a drawing of the timeline."""

from typing import Any

from lightning_zenflow.monitor.plot import can_draw, draw
from lightning_zenflow.monitor.timeline import chrome_trace
from lightning_zenflow.telemetry.stalls import CAUSES
from lightning_zenflow.telemetry.tracing import Recording
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer

TIMELINE_TAG = "zenflow/timeline"

CHARTS: dict[str, dict[str, list[str]]] = {
    "ZenFlow stall": {
        "waiting, % of a step": ["stall/device_percent", "stall/host_percent"],
        "the device waits, ms a step": [f"stall/device_{cause}_ms" for cause in CAUSES],
        "the training thread waits, ms a step": [f"stall/host_{cause}_ms" for cause in CAUSES],
    },
    "ZenFlow overlap": {
        "step and the CPU's work in it, ms": ["overlap/step_ms", "overlap/worker_busy_ms"],
        "hidden share of the CPU's work, %": ["overlap/hidden_percent"],
        "schedule and staleness, steps": [
            "overlap/update_interval_steps",
            "overlap/publish_lag_steps",
            "overlap/staleness_steps",
        ],
    },
    "ZenFlow traffic": {
        "model sizes a step": ["traffic/d2h_model_sizes", "traffic/h2d_model_sizes"],
        "speed of copies, GB/s": ["traffic/d2h_GB_per_s", "traffic/h2d_GB_per_s"],
    },
    "ZenFlow selection": {
        "device-owned columns, % of weights and of the gradient's energy": [
            "selection/device_owned_percent",
            "selection/device_squared_norm_percent",
        ],
        "columns that were chosen before, %": ["selection/overlap_percent"],
    },
    "ZenFlow memory": {
        "host, GB": ["memory/trainer_GB", "memory/worker_GB", "memory/arena_GB"],
        "device, GB": ["memory/device_GB", "memory/device_peak_GB"],
    },
}
"""Category -> chart -> metrics, without their prefix."""

_FIRST_FIGURE, _FIGURE_STEPS = 5, 3


def layout() -> dict[str, dict[str, list[Any]]]:
    """`CHARTS` as `SummaryWriter.add_custom_scalars` takes it; tags are regular expressions there."""
    return {
        category: {title: ["Multiline", [f"^zenflow/{name}$" for name in names]] for title, names in charts.items()}
        for category, charts in CHARTS.items()
    }


class Dashboard:
    """Fills one TensorBoard writer while training goes on.

    Args:
        writer: a `SummaryWriter`.
        optimizer: whose steps are drawn.
        figure_every_n_steps: how often; 0: never. Nor where matplotlib is not installed.
    """

    def __init__(self, writer: Any, optimizer: ZenFlowZeroOptimizer, *, figure_every_n_steps: int) -> None:
        writer.add_custom_scalars(layout())
        self._writer = writer
        self._optimizer = optimizer
        self._every = figure_every_n_steps if can_draw() else 0
        self._recording: Recording | None = None
        if self._every > 0:
            self._record(skip=_FIRST_FIGURE - 1)

    def end_step(self, step: int) -> None:
        """Draws what has been recorded, or has some steps recorded where that is due.

        Args:
            step: number of the optimizer step that has ended, counted from 1.
        """
        if self._recording is not None and self._recording.complete:
            self.show(self._recording, step)
            self._recording = None
        if self._every > 0 and self._recording is None and step % self._every == 0:
            # The next step has begun; the one after it can wait for the device before it begins.
            self._record(skip=1)

    def show(self, recording: Recording, step: int) -> None:
        """Draws a complete recording.

        Args:
            recording: of some steps.
            step: number of the optimizer step that has ended, counted from 1.
        """
        worker = f"worker on cores {self._optimizer.worker_cores}"
        figure = draw(chrome_trace(recording.steps, worker=worker))
        self._writer.add_figure(TIMELINE_TAG, figure, global_step=step - 1)

    def _record(self, *, skip: int) -> None:
        self._recording = self._optimizer.telemetry.tracer.record(skip=skip, steps=_FIGURE_STEPS, aligned=True)
