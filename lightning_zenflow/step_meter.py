"""What users see of `telemetry`: metrics of steps, a summary in two lines and one of advice. Nothing here changes how a step runs."""

import math
import time
from array import array
from collections.abc import Callable
from statistics import median_low

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.offload.plan import HIDDEN, SMALL_STALL, hiding_share
from lightning_zenflow.offload.run_state import StepParts
from lightning_zenflow.telemetry import CAUSES, Cause, Reading

SUMMED_UP = 50
"""Smallest number of steps with a summary that nobody has asked for: fewer say nothing about a training, and programs that train many times
would repeat it."""

_Formula = Callable[[Reading, float], float]
"""Of a metric, from `Reading.since` and the seconds between the two readings; NaN: not known yet."""


def _waits(*causes: Cause) -> _Formula:
    """Share of the time in which the device was idle because of these causes, in percent."""
    return lambda run, seconds: 100 * sum(run.device_stall_s[cause] for cause in causes) / seconds


def _percent(share: float | None) -> float:
    return math.nan if share is None else 100 * share


METRICS: dict[str, _Formula] = {
    "zenflow/stall/device_percent": _waits(*CAUSES),
    "zenflow/overlap/step_ms": lambda run, seconds: 1e3 * seconds / run.steps,
    "zenflow/overlap/late_blocks_percent": lambda run, _: _percent(run.late_share),
    "zenflow/overlap/clip_prediction_error_percent": lambda run, _: _percent(run.factor_error),
    "zenflow/stall/host_percent": lambda run, seconds: 100 * run.host_stall_s / seconds,
    # Parts of the device's; each cause is in one.
    "zenflow/stall/worker_percent": _waits("publish_wait", "slot"),
    "zenflow/stall/correction_percent": _waits("correction"),
    "zenflow/stall/flush_percent": _waits("flush"),
    "zenflow/stall/other_percent": _waits("publish_buffer", "select", "restart", "reserve", "loss_scale"),
    "zenflow/stall/skipped_steps": lambda run, _: run.skipped_steps,
    "zenflow/stall/worker_restarts": lambda run, _: run.worker_restarts,
    "zenflow/overlap/worker_busy_percent": lambda run, seconds: 100 * run.worker_busy_s / seconds,
    "zenflow/overlap/update_interval_steps": lambda run, _: run.update_interval,
    "zenflow/overlap/publish_lag_steps": lambda run, _: run.publish_lag,
    "zenflow/selection/device_squared_norm_percent": lambda run, _: _percent(run.owned_norm_share),
    "zenflow/selection/resident_percent": lambda run, _: _percent(run.resident_share),
}
"""Metric -> formula; docs/tuning.md has their meaning, and a test compares both with what a training logs."""

OVERVIEW = tuple(METRICS)[:4]
"""Those that say most of a run."""


def interval_metrics(before: Reading, now: Reading, *, seconds: float) -> dict[str, float]:
    """The metrics that are known, by name in `METRICS`, of the steps between two readings, which took `seconds`; none of no step."""
    if seconds == 0:
        return {}
    run = now.since(before)
    values = {name: formula(run, seconds) for name, formula in METRICS.items()}
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


_WORKER: tuple[Cause, ...] = ("publish_wait", "slot", "correction")

_MANY_SKIPPED, _MANY = 0.02, 0.1
"""Shares of the steps that are worth advice, of those that are skipped and of others."""

_SHOWN = 0.01
"""Smallest share of a step that is worth words."""

_FEW = 0.1
"""Largest share of the CPU's work that is good news where it was waited for."""

_REMEDIES: dict[str, str] = {
    "publish_buffer": "in synchronous steps: lower full_warm_up_rounds, or validate and save checkpoints less often",
    "select": "selecting columns: raise select_interval",
    "flush": "completing updates before validations and checkpoints: have fewer of them",
    "loss_scale": "waiting for the dynamic loss scale of fp16: train in bf16, or set a fixed loss scale",
}
"""Advice by cause of a wait, beside those for the worker; nothing can be done about the others."""


class StepMeter:
    """Measures the steps of a training, from before the first one on: `step_s` has the duration of each, waits included, pauses excluded.
    It never synchronises the device.
    """

    def __init__(self, parts: StepParts, config: ZenFlowConfig) -> None:
        self.step_s = array("d")
        self._parts, self._config = parts, config
        self._is_summed_up = False
        # Readings, each with the number of steps before it: of the last metrics, and of the summary, which leaves out the first steps.
        self._last = self._begin = parts.read_counters(), 0
        self._pause_ns: int | None = None
        self._end_ns = time.perf_counter_ns()

    def end_step(self) -> None:
        """Takes the time since the last call: of the steps of a batch, each an equal part; without gradients, it is the next step's."""
        self.resume()
        n = self._parts.rank.telemetry.counts.steps - len(self.step_s)
        if n == 0:
            return
        before_ns, self._end_ns = self._end_ns, time.perf_counter_ns()
        self.step_s.extend([1e-9 * (self._end_ns - before_ns) / n] * n)
        if self._begin[1] == 0:
            self._begin = self._parts.read_counters(), n

    def pause(self) -> None:
        """Excludes what follows, such as validation, from the step that is being measured."""
        if self._pause_ns is None:
            self._pause_ns = self._ns_without_waits()

    def resume(self) -> None:
        """Ends a pause, if there is one."""
        if self._pause_ns is not None:
            # The flush before validation is a stall of training.
            self._end_ns += self._ns_without_waits() - self._pause_ns
            self._pause_ns = None

    def metrics(self) -> dict[str, float]:
        """The metrics of the steps since the last call, by name in `METRICS`; none if no step with gradients has ended since."""
        (before, n), now = self._last, self._parts.read_counters()
        if metrics := interval_metrics(before, now, seconds=sum(self.step_s[n:])):
            self._last = now, len(self.step_s)
        return metrics

    def averages(self) -> dict[str, float]:
        """As `metrics`, of all steps that the summary is about."""
        before, n = self._begin
        return interval_metrics(before, self._parts.read_counters(), seconds=sum(self.step_s[n:]))

    def summary(self) -> str | None:
        """Times, waits and, where something limits, advice; None before the second call of `end_step`."""
        before, n_before = self._begin
        step_s = self.step_s[n_before:]
        if not step_s:
            return None
        now, config = self._parts.read_counters(), self._config
        n, seconds, run = len(step_s), sum(step_s), now.since(before)
        p99_s = sorted(step_s)[math.ceil(0.99 * n) - 1]
        busy_s, waits = run.worker_busy_s, sum(run.device_stall_s.values()) / seconds
        work = f"CPU work {_ms(busy_s / n)} ms a step"
        waited_s = sum(run.device_stall_s[cause] for cause in (*_WORKER, "flush"))
        # A low share of little work would sound like a fault.
        if busy_s > _SHOWN * seconds and (waited_s < _FEW * busy_s or waited_s >= SMALL_STALL * seconds):
            work += f", {max(0.0, 1.0 - waited_s / busy_s):.0%} hidden"
        details = [work, f"update_interval={now.update_interval}, publish_lag={now.publish_lag}"]
        if now.resident_share is not None:
            details.append(f"offload_ratio={1 - now.resident_share:.2f}")
        if run.late_share is not None and waits > _SHOWN:
            details.append(f"{run.late_share:.1%} of the blocks late")
        if speculates(run, config):
            in_time = run.steps_in_backward - run.corrected_steps
            details.append(
                f"update in backward in {in_time / n:.1%} of the steps, corrected in {run.corrected_steps / n:.1%}"
            )
        lines = [
            f"ZenFlow: {n + before.steps} steps, median {_ms(median_low(step_s))} ms, p99 {_ms(p99_s)} ms;"
            f" waits of the device {waits:.1%}, of the training thread {run.host_stall_s / seconds:.1%}",
            "; ".join(details),
        ]
        skipped = (now.skipped_steps - before.skipped_steps) / n
        sentence = advice(run, config, seconds=seconds, skipped=skipped, in_place=self._parts.rank.in_place)
        return "\n".join(lines if sentence is None else [*lines, sentence])

    def sum_up(self, steps_from: float = SUMMED_UP) -> None:
        """Logs the summary of so many steps or more, unless the call has been before."""
        if not self._is_summed_up and len(self.step_s) >= steps_from and (said := self.summary()):
            rank_zero_info(said)
        self._is_summed_up = True

    def _ns_without_waits(self) -> int:
        return time.perf_counter_ns() - round(1e9 * self._parts.rank.telemetry.counts.host_stall_s)


def speculates(run: Reading, config: ZenFlowConfig) -> bool:
    """True if steps are submitted in backward and corrected where they clip."""
    return config.submits_in_backward and not config.predicts_clipping and run.publish_lag == 0


def advice(
    run: Reading, config: ZenFlowConfig, *, seconds: float, skipped: float = 0.0, in_place: bool = False
) -> str | None:
    """The largest limit that the user can do something about, and its remedy, in a line; None if waits are negligible. Of `seconds` are the
    steps of `run` (`Reading.since`), of which the share `skipped` had no finite gradient.
    """
    if skipped > _MANY_SKIPPED:
        return f"{skipped:.0%} of the steps were skipped: their gradient was not finite. Lower the learning rate, or look for NaN."
    remedies = _REMEDIES | dict.fromkeys(_WORKER, _of_worker(run, config, seconds, in_place=in_place))
    if run.followed_steps > _MANY * run.steps:
        remedies["flush"] = "completing updates, as weights are written in place: write them in fewer steps"
    for cause, waited_s in sorted(run.device_stall_s.items(), key=lambda item: item[1], reverse=True):
        if waited_s < SMALL_STALL * seconds:
            break
        if said := remedies.get(cause):
            return f"{waited_s / seconds:.0%} of the time is spent {said}."
    return None


def _of_worker(run: Reading, config: ZenFlowConfig, seconds: float, *, in_place: bool) -> str:
    """Why steps wait for the worker, and the remedy; empty if its work does not explain that."""
    at_end = 1.0 - (run.steps_in_backward - run.corrected_steps) / run.steps
    if speculates(run, config) and at_end > _MANY:
        why = f"waiting for the CPU, as {at_end:.0%} of the steps begin their update at their end"
        return f"{why}: set clip_prediction=True{_or_residents(run, 1.0)}"
    load = run.worker_busy_s / max(seconds - sum(run.device_stall_s.values()), 1e-9)
    if load < _SHOWN:
        return ""
    is_auto, slow = config.update_interval == "auto", load > HIDDEN
    remedy = "give the worker more cores" if slow else "keep other processes off the worker's cores"
    if slow and not in_place and (not is_auto or run.update_interval >= config.max_update_interval):
        remedy += f", or raise {'max_' * is_auto}update_interval"
    remedy += _or_residents(run, hiding_share(load, run.publish_lag, run.resident_share or 0.0))
    if not slow and not in_place and config.publish_lag == 0:
        remedy += ", or set publish_lag=1"
    return f"waiting for the CPU, which needs {load:.1f} steps per update: {remedy}"


def _or_residents(run: Reading, share: float) -> str:
    """The remedy of such a share of resident blocks, if it is larger than now."""
    n_bytes = (share - (run.resident_share or 0.0)) * run.movable_bytes
    return (
        f", or set offload_ratio={1 - share:.2g} if the device has {n_bytes / 1e9:.1f} GB more" if n_bytes > 0 else ""
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
