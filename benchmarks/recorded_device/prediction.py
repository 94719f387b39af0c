"""Steps predicted from a recording: what the device does, and what it waits for."""

import dataclasses
from dataclasses import dataclass
from functools import cache

from benchmarks.recorded_device.rates import DEVICES, Rates, is_models
from benchmarks.recorded_device.recording import Recording, record_gpt
from benchmarks.recorded_device.timeline import Cause, Timeline, models_only, run


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is predicted."""

    device: str
    """Key of `rates.DEVICES`."""
    params: float
    tokens: int
    """In a step."""
    update_interval: int
    publish_lag: int

    @property
    def rates(self) -> Rates:
        """Of the machine."""
        return DEVICES[self.device]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A settled step, in seconds; means over `recording.MEASURED_STEPS`."""

    setting: Setting
    step_s: float
    alone_s: float
    """Forward and backward without any optimizer, by the same rates."""
    model_s: float
    """The model's operations on the device."""
    other_s: float
    """All others on the device: DeepSpeed's buckets, passes over gradients, provisional updates, exact step."""
    worker_s: float
    idle_s: dict[Cause, float]


@cache
def _recorded(update_interval: int, publish_lag: int) -> Recording:
    return record_gpt(update_interval=update_interval, publish_lag=publish_lag)


def recording_of(setting: Setting) -> Recording:
    """The recording for a setting; made once in this process."""
    return _recorded(setting.update_interval, setting.publish_lag)


def timeline_of(setting: Setting) -> Timeline:
    """The whole timeline of a setting."""
    recording = recording_of(setting)
    return run(recording.operations, setting.rates, recording.scale(setting.params, setting.tokens))


def predict(setting: Setting, recording: Recording | None = None, rates: Rates | None = None) -> Prediction:
    """Predicts a settled step.

    Args:
        setting: what is predicted.
        recording: another than the setting's own, of the same S and d.
        rates: others than those of the setting's device.
    """
    recording, rates = recording or recording_of(setting), rates or setting.rates
    scale = recording.scale(setting.params, setting.tokens)
    timeline = run(recording.operations, rates, scale)
    alone = run(models_only(recording.operations), rates, scale)
    first, last, n = recording.steps[0] - 1, recording.steps[-1], len(recording.steps)
    begin, end = timeline.ends[first], timeline.ends[last]
    work = [o for step in recording.steps for o in recording.of_step(step)]
    launches = [(is_models(o), scale.seconds(o, rates)) for o in work if o.kind == "launch"]
    return Prediction(
        setting=setting,
        step_s=(end - begin) / n,
        alone_s=(alone.ends[last] - alone.ends[first]) / n,
        model_s=sum(seconds for of_model, seconds in launches if of_model) / n,
        other_s=sum(seconds for of_model, seconds in launches if not of_model) / n,
        worker_s=sum(scale.seconds(o, rates) for o in work if o.kind == "replay") / n,
        idle_s={cause: seconds / n for cause, seconds in timeline.idle(begin, end).items()},
    )


def prediction_of(written: dict[str, object]) -> Prediction:
    """Inverse of `dataclasses.asdict`."""
    return Prediction(**{**written, "setting": Setting(**written["setting"])})  # type: ignore[arg-type]


def without_limits() -> Rates:
    """A machine on which only matrix products take time."""
    unlimited = {f.name: float("inf") for f in dataclasses.fields(Rates) if not f.name.endswith("_s")}
    return Rates(**{**unlimited, "matmul": DEVICES["h200"].matmul, "call_s": 0.0, "launch_s": 0.0})
