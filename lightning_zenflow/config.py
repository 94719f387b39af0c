"""Every setting of ZenFlow: its type, default and unit, and the one place where a value is accepted or refused.

``ZenFlowConfig`` is an OmegaConf structured config as well: ``OmegaConf.structured(ZenFlowConfig)`` gives a typed
``DictConfig``. Merging into that does not run ``__post_init__``, so ``ZenFlowConfig.from_mapping`` is the way back to a
validated instance.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from typing_extensions import Self

from lightning_zenflow.schedule.auto_policy import LARGEST_LAG
from lightning_zenflow.schedule.compensation import StalenessCompensation

LARGEST_INTERVAL = 1024
"""Steps; bound of `max_update_interval` and `publish_lag`. Each of them is a gradient in host memory, two bytes a parameter at least."""

LARGEST_FACTOR = 1e6
"""Bound of `weight_prediction` and `provisional_scale`, the worker's own; products with learning rates stay in the range of float32."""

LONGEST_TIMEOUT = 1e6
"""Seconds; what the system's calls that wait can still count in milliseconds."""


class ConfigValueError(ValueError):
    """A key of ``ZenFlowConfig`` has a value that is not allowed.

    Args:
        message: names the key, the value and what is allowed.
        key: the key.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


@dataclass(kw_only=True)
class ZenFlowConfig:
    """What ZenFlow updates where, when, and with which resources.

    Raises:
        ValueError: a value is not allowed; the message names key, value and what is allowed.
    """

    topk_ratio: float = 0.05
    """Share of each matrix' input columns that the device updates at once; 0 to 1 (0: everything on the host), default
    0.05."""

    select_strategy: str = "step"
    """What select_interval counts, "step" or "epoch" ("auto" means "step"), or the import path of a callable that chooses the columns
    ("pkg.mod:fn" or "pkg.mod.fn"; see `lightning_zenflow.topk.selector.SelectStrategy`), every select_interval steps; default "step"."""

    select_interval: int | Literal["auto"] = "auto"
    """Steps (or epochs, see select_strategy) between two selections of columns: an integer >= 0 (0: select once, after warm-up), or
    "auto", the default: select anew when the present columns are no longer those with the largest gradients."""

    update_interval: int | Literal["auto"] = "auto"
    """Steps per window S, whose gradients the host replays together: an integer from 1 to max_update_interval, or "auto", the default: the
    fewest whose work hides behind training, a power of two (see `lightning_zenflow.schedule.auto_policy`)."""

    max_update_interval: int = 16
    """Largest number of steps per window, hence of gradients kept in host memory: an integer from 1 to 1024, default 16."""

    publish_lag: int | Literal["auto"] = "auto"
    """Steps between a round's hand-over and the use of its result beyond the next step: an integer from 0 to 1024, or "auto", the default:
    the fewest without waiting, 0 to 2."""

    optimizer_in_backward: bool = True
    """Whether each gradient goes to the worker as soon as it arrives in backward, where nothing is clipped, the loss scale is fixed, and
    S = 1, d = 0: true, the default (AdamW itself hides behind backward), or false (a step in which only some gradients are not finite then
    changes nothing at all)."""

    full_warm_up_rounds: int = 0
    """Steps at the start that run synchronously, with every weight updated by the host, before columns are selected: an
    integer >= 0, default 0."""

    overlap_step: bool = True
    """Whether the host's update runs beside the next steps: true or false (synchronous: publish_lag is taken as 0),
    default true."""

    deferred_update: Literal["replay", "accumulate"] = "replay"
    """How the host applies a window: "replay", the default (each step's gradient in order: AdamW), or "accumulate" (their mean, once, as
    in the ZenFlow paper)."""

    weight_prediction: float | int | Literal["auto"] = "auto"
    """Steps along the momentum by which published weights run ahead of the exact ones: a number from 0 (off) to 1e6, or "auto", the
    default: as many as AdamW would have made by then, on average over the steps that use them; see `prediction`."""

    provisional_scale: float | int | Literal["auto"] = "auto"
    """Step size, relative to the learning rate, of the device's stand-in update of host-owned weights during backward: a number from
    0 (off) to 1e6, or "auto", the default: what AdamW would have made of the gradient by then; see `prediction`."""

    auto_ratio: float = 0.99
    """Share of the matrices whose deferred gradient must weigh as much as the gradient applied at once before `update_interval: auto` takes
    windows for too long: 0 to 1, default 0.99."""

    offload: bool = False
    """Whether the exact state of device-owned columns (weights and moments, 12 bytes an entry) lives in host memory and visits the device
    for the step: true or false, default false."""

    accumulate_on: Literal["auto", "device", "host"] = "auto"
    """Where gradients are added up over a step's micro-batches: "device" (2 bytes an element of the rank's partition, 4 in fp32), "host"
    (no memory of the device, but each sum crosses PCIe both ways), or "auto", the default: the device where it has room."""

    worker_cores: int | list[int] | Literal["auto"] = "auto"
    """Logical CPU cores of the worker process: how many (an integer >= 1), which ones (a list of distinct integers >=
    0) or "auto" (split by pt_reserved_cores_perc), the default."""

    pt_reserved_cores_perc: float = 0.5
    """Share of the CPU cores that stay with the trainer where worker_cores is "auto": 0 to 1, default 0.5."""

    worker_timeout: float = 600.0
    """Longest wait for the worker before the run stops with an error, in seconds: a number > 0 and up to 1e6, default 600."""

    max_worker_restarts: int = 3
    """How many times within ten minutes a worker that was killed is replaced before the run stops with an error: an integer >= 0, default
    3."""

    stall_monitor: bool = True
    """Whether stall metrics are logged and summed up at the end of fit (`lightning_zenflow.StallMonitor`): true or false, default true."""

    timeline: str | None = None
    """File to which a few steps are written in the Chrome trace format, for Perfetto or `lightning-zenflow timeline`: a path that ends in
    ".json", default none."""

    timeline_steps: list[int] | Literal["auto"] = "auto"
    """Which ones: [first, last], two integers with 2 <= first <= last, counted from 1 where the fit starts; "auto", the default: five steps
    from the fifth after full_warm_up_rounds on."""

    def __post_init__(self) -> None:
        """Validate every value and bring numbers to the type of their field."""
        self.topk_ratio = _number("topk_ratio", self.topk_ratio, _SHARE)
        self.select_strategy = _select_strategy("select_strategy", self.select_strategy)
        self.select_interval = _integer_or_auto("select_interval", self.select_interval, minimum=0)
        self.update_interval = _integer_or_auto(
            "update_interval", self.update_interval, minimum=1, maximum=LARGEST_INTERVAL
        )
        self.max_update_interval = _integer(
            "max_update_interval", self.max_update_interval, minimum=1, maximum=LARGEST_INTERVAL
        )
        self.publish_lag = _integer_or_auto("publish_lag", self.publish_lag, minimum=0, maximum=LARGEST_INTERVAL)
        self.full_warm_up_rounds = _integer("full_warm_up_rounds", self.full_warm_up_rounds, minimum=0)
        self.optimizer_in_backward = _boolean("optimizer_in_backward", self.optimizer_in_backward)
        self.overlap_step = _boolean("overlap_step", self.overlap_step)
        self.deferred_update = _deferred_update("deferred_update", self.deferred_update)
        self.weight_prediction = _number_or_auto("weight_prediction", self.weight_prediction, _STEPS)
        self.provisional_scale = _number_or_auto("provisional_scale", self.provisional_scale, _STEPS)
        self.auto_ratio = _number("auto_ratio", self.auto_ratio, _SHARE)
        self.offload = _boolean("offload", self.offload)
        self.accumulate_on = _accumulate_on("accumulate_on", self.accumulate_on)
        self.worker_cores = _worker_cores("worker_cores", self.worker_cores)
        self.pt_reserved_cores_perc = _number("pt_reserved_cores_perc", self.pt_reserved_cores_perc, _SHARE)
        self.worker_timeout = _number("worker_timeout", self.worker_timeout, _TIMEOUT)
        self.max_worker_restarts = _integer("max_worker_restarts", self.max_worker_restarts, minimum=0)
        self.stall_monitor = _boolean("stall_monitor", self.stall_monitor)
        self.timeline = _timeline("timeline", self.timeline)
        self.timeline_steps = _timeline_steps("timeline_steps", self.timeline_steps)
        if isinstance(self.update_interval, int) and self.update_interval > self.max_update_interval:
            allowed = f"an integer from 1 to max_update_interval={self.max_update_interval}"
            raise _refusal("update_interval", self.update_interval, allowed)

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any] | DictConfig) -> Self:
        """A validated instance from plain or OmegaConf keys; keys left out take their defaults, interpolations are
        resolved.

        Raises:
            MisconfigurationException: a key is unknown; the message suggests the nearest one.
            ValueError: a value is not allowed.
        """
        plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
        assert isinstance(plain, Mapping)
        known = zenflow_keys()
        for key in plain:
            if key not in known:
                raise MisconfigurationException(unknown_key_message("ZenFlowConfig", key, known))
        return cls(**{str(key): value for key, value in plain.items()})

    @property
    def update_intervals(self) -> list[int]:
        """Steps per window S that may be used, ascending: `update_interval`, or for "auto" powers of two up to `max_update_interval`."""
        if self.update_interval == "auto":
            return [1 << i for i in range(self.max_update_interval.bit_length())]
        return [self.update_interval]

    @property
    def publish_lags(self) -> list[int]:
        """Publish lags d that may be used, ascending: `publish_lag`, or those of "auto", or 0 where `overlap_step` is false."""
        if not self.overlap_step:
            return [0]
        return list(range(LARGEST_LAG + 1)) if self.publish_lag == "auto" else [self.publish_lag]

    @property
    def is_immediate(self) -> bool:
        """Whether every step ends with weights that have all of its gradients (S = 1, d = 0), so that nothing is to be approximated."""
        return self.update_intervals == [1] and self.publish_lags == [0]

    @property
    def submits_in_backward(self) -> bool:
        """Whether steps with S = 1, d = 0 may hand over in backward, as far as this configuration decides."""
        return (
            self.optimizer_in_backward
            and self.overlap_step
            and self.deferred_update == "replay"
            and 1 in self.update_intervals
            and 0 in self.publish_lags
        )

    @property
    def timeline_range(self) -> tuple[int, int]:
        """First and last step of the timeline, counted from 1 where the fit starts."""
        if self.timeline_steps == "auto":
            return self.full_warm_up_rounds + 5, self.full_warm_up_rounds + 9
        first, last = self.timeline_steps
        return first, last

    @property
    def prediction(self) -> StalenessCompensation:
        """What `weight_prediction` and `provisional_scale` mean for this schedule."""
        immediate = self.is_immediate
        return StalenessCompensation(
            weight_prediction=0.0 if immediate and self.weight_prediction == "auto" else self.weight_prediction,
            provisional_scale=0.0 if immediate else self.provisional_scale,
            means=self.deferred_update == "accumulate",
        )


def zenflow_keys() -> tuple[str, ...]:
    """The keys of ``ZenFlowConfig`` in the order of their declaration."""
    return tuple(field.name for field in dataclasses.fields(ZenFlowConfig))


def default_value(key: str) -> Any:
    """The default of a key of ``ZenFlowConfig``."""
    return next(field.default for field in dataclasses.fields(ZenFlowConfig) if field.name == key)


def unknown_key_message(where: str, key: object, known: Collection[str]) -> str:
    """The text of the error for an unknown key, with the nearest known one.

    Args:
        where: the place that holds the key, for instance "ZenFlowConfig" or a file and a section.
        key: the unknown key.
        known: the keys allowed there.
    """
    near = difflib.get_close_matches(str(key), known, n=1)
    suggestion = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{where}: unknown key {key!r}{suggestion}; allowed is any of {', '.join(known)}"


@dataclass(frozen=True, kw_only=True)
class _Interval:
    """A set of finite numbers and its name in an error message."""

    contains: Callable[[float], bool]
    name: str


_SHARE = _Interval(contains=lambda number: 0 <= number <= 1, name="a number from 0 to 1")

_STEPS = _Interval(contains=lambda number: 0 <= number <= LARGEST_FACTOR, name=f"a number from 0 to {LARGEST_FACTOR:g}")

_TIMEOUT = _Interval(
    contains=lambda number: 0 < number <= LONGEST_TIMEOUT, name=f"a number > 0 and up to {LONGEST_TIMEOUT:g}"
)


def _refusal(key: str, value: object, allowed: str) -> ConfigValueError:
    return ConfigValueError(f"ZenFlowConfig: {key}={value!r}: allowed is {allowed}", key)


def _is_integer(value: object) -> bool:
    # bool is an int in Python, but `update_interval: true` is a mistake.
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(key: str, value: Any, interval: _Interval, *, name: str = "") -> float:
    allowed = name or interval.name
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refusal(key, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        raise _refusal(key, value, allowed) from None
    if not math.isfinite(number) or not interval.contains(number):
        raise _refusal(key, value, allowed)
    return number


def _number_or_auto(key: str, value: Any, interval: _Interval) -> float | Literal["auto"]:
    if isinstance(value, str) and value == "auto":
        return "auto"
    return _number(key, value, interval, name=f"{interval.name} or 'auto'")


def _integer(key: str, value: Any, *, minimum: int, maximum: int | None = None, name: str = "") -> int:
    if not _is_integer(value) or value < minimum or (maximum is not None and value > maximum):
        raise _refusal(key, value, name or _integers(minimum, maximum))
    return int(value)


def _integer_or_auto(key: str, value: Any, *, minimum: int, maximum: int | None = None) -> int | Literal["auto"]:
    if isinstance(value, str) and value == "auto":
        return "auto"
    return _integer(key, value, minimum=minimum, maximum=maximum, name=f"{_integers(minimum, maximum)} or 'auto'")


def _integers(minimum: int, maximum: int | None) -> str:
    return f"an integer >= {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refusal(key, value, "true or false")
    return value


def _deferred_update(key: str, value: Any) -> Literal["replay", "accumulate"]:
    match value:
        case "replay":
            return "replay"
        case "accumulate":
            return "accumulate"
        case _:
            raise _refusal(key, value, "'replay' or 'accumulate'")


def _accumulate_on(key: str, value: Any) -> Literal["auto", "device", "host"]:
    match value:
        case "auto":
            return "auto"
        case "device":
            return "device"
        case "host":
            return "host"
        case _:
            raise _refusal(key, value, "'auto', 'device' or 'host'")


def _select_strategy(key: str, value: Any) -> str:
    allowed = "'auto', 'step', 'epoch' or the import path of a callable ('pkg.mod:fn' or 'pkg.mod.fn')"
    if not isinstance(value, str) or not (value in ("auto", "step", "epoch") or _is_import_path(value)):
        raise _refusal(key, value, allowed)
    return value


def _is_import_path(value: str) -> bool:
    module, colon, attribute = value.partition(":")
    names = [*module.split("."), *(attribute.split(".") if colon else [])]
    return len(names) > 1 and all(name.isidentifier() for name in names)


def _timeline(key: str, value: Any) -> str | None:
    if value is None:
        return None
    path = str(value) if isinstance(value, str | Path) else ""
    if not path.endswith(".json"):
        raise _refusal(key, value, "a path that ends in '.json'")
    return path


def _timeline_steps(key: str, value: Any) -> list[int] | Literal["auto"]:
    allowed = "'auto' or [first, last], two integers with 2 <= first <= last"
    if isinstance(value, str) and value == "auto":
        return "auto"
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or len(value) != 2:
        raise _refusal(key, value, allowed)
    if not all(map(_is_integer, value)) or not 2 <= value[0] <= value[1]:
        raise _refusal(key, value, allowed)
    return [int(step) for step in value]


def _worker_cores(key: str, value: Any) -> int | list[int] | Literal["auto"]:
    allowed = "'auto', an integer >= 1 (how many) or a list of distinct integers >= 0 (which ones)"
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if not value or not all(_is_integer(core) and core >= 0 for core in value) or len(set(value)) < len(value):
            raise _refusal(key, value, allowed)
        return [int(core) for core in value]
    return _integer(key, value, minimum=1, name=allowed)
