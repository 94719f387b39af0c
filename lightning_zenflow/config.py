"""The keys of ZenFlow. Each stands once, as a field of `ZenFlowConfig`, from which validation, the table in docs/configuration.md
(``python -m docs.configuration``) and the comparison of a checkpoint's configuration are derived.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from typing_extensions import Self

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.schedule import StalenessCompensation, candidates_of

_OF_LATE_WEIGHTS = ("topk_ratio", "weight_prediction", "provisional_scale")


def _key(default: Any, *, unit: str = "", changes_numbers: bool = True, **bounds: Any) -> Any:
    """The field of a key; `changes_numbers` says whether losses and weights depend on its value (see `numeric_values`)."""
    return Field(default, json_schema_extra={"unit": unit, "changes_numbers": changes_numbers}, **bounds)


def _without_effect(value: Any, info: ValidationInfo) -> Any:
    """Validates a key without effect: logs another value than the default, and returns the default."""
    key = KEYS[str(info.field_name)]
    if value != key["default"]:
        # Here, because Lightning takes seconds, which `lightning-zenflow estimate` does not need.
        from lightning.pytorch.utilities.rank_zero import rank_zero_info

        rank_zero_info(f"ZenFlow ignores {info.field_name}={value!r}. {key['description']}")
    return key["default"]


# Where JSON's schema cannot name a set of values, "text" does, in errors and documents.
_Auto: TypeAlias = Literal["auto"]
_Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
# The worker's own bound: products with learning rates stay in the range of float32.
_Factor: TypeAlias = Annotated[float, Field(ge=0, le=1e6)]
# Each step of an interval is a gradient in host memory, two bytes a parameter at least.
_Interval: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
_Lag: TypeAlias = Annotated[int, Field(ge=0, le=1, json_schema_extra={"text": "0 or 1"})]
_Cores: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    # A strict tuple is no list, nor one of Hydra's; pydantic 2.7 makes no exception (`strict=False`) in a union.
    BeforeValidator(
        lambda value: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    ),
    Field(min_length=1, json_schema_extra={"text": "a list of integers >= 0"}),
]


class ZenFlowConfig(BaseModel):
    """Configuration of a ZenFlow training. The keys select the weights that the device updates, the schedule of the worker's updates, and
    the resources of both. docs/configuration.md lists the allowed values.

    Raises:
        ValueError: a value is not allowed; the message names the key, the allowed values and the value.
        MisconfigurationException: a key is unknown; the message suggests the nearest one.
    """

    # Strict: True is no number and "1" no integer.
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    topk_ratio: _Share = _key(0.05, unit="fraction of columns")
    """Share of each matrix's columns that the device updates in every step, from S > 1 or d > 0 on; with S = 1, d = 0 without effect. The
    device then also updates all 1-D parameters; at 0 the host updates everything."""

    select_strategy: Literal["step", "epoch", "auto"] = _key("step")
    """The unit of select_interval; "auto" means "step"."""

    select_interval: Annotated[int, Field(ge=0)] | _Auto = _key("auto", unit="steps or epochs")
    """Interval between two selections of columns, each in a synchronous step; 0 and "auto" select once, after warm-up."""

    update_interval: _Interval | _Auto = _key("auto", unit="steps")
    """S, the number of steps whose gradients the CPU applies in one pass over the state. "auto" takes a power of two: with
    publish_lag, the least late pair whose work hides behind training; see `lightning_zenflow.offload.plan`."""

    max_update_interval: _Interval = _key(16, unit="steps")
    """Upper bound of `update_interval: auto`, hence of the gradients held in host memory."""

    publish_lag: _Lag | _Auto = _key("auto", unit="steps")
    """d, the number of further steps until the model has the result of the CPU's pass. "auto" takes,
    with update_interval, the least late pair whose work hides behind training."""

    clip_prediction: bool | _Auto = _key("auto")
    """Lets forward passes see weights with a predicted clip factor where d = 0. If false, forward passes see AdamW's own weights: a clipped
    step waits until they are updated again with the true factor. Behind two clipped steps, with parameters on the device, updates begin at
    the end of the step. "auto" is false with parameters in host memory, otherwise true."""

    full_warm_up_rounds: int = _key(0, ge=0, unit="steps")
    """Synchronous steps at the start, in which the worker updates every weight before columns are selected."""

    overlap_step: bool = _key(True)
    """Runs the worker's updates beside training: where d = 0 in the backward pass, those of each layer as soon as its gradients arrive;
    where d = 1 beside the next step. If false, d is 0, and each step waits for the worker at its end; S is 1 if it is "auto"."""

    weight_prediction: _Factor | _Auto = _key("auto", unit="steps")
    """Steps along the momentum by which late weights are extrapolated from the exact ones; 0 disables it. "auto" takes the mean
    number that AdamW would have made by the steps that use them; see `lightning_zenflow.core.schedule`."""

    provisional_scale: _Factor | _Auto = _key("auto", unit="learning rates")
    """Step size of the device's provisional update of host-owned weights during backward; 0 disables it. "auto" takes the size of the
    update that AdamW would have made of the gradient by then; see `lightning_zenflow.core.schedule`."""

    offload_ratio: _Share | _Auto = _key("auto", unit="fraction of the optimizer states")
    """Share of the optimizer states in host memory. The device holds and updates the others, 12 bytes a parameter and the gradient's: those
    of the layers whose gradients arrive last, which are never late. Their weights are AdamW's, with the same bits. "auto" begins with 1;
    where steps wait for the CPU, a GPU takes what it has memory for, up to what makes the rest hide, and gives it back when it is short."""

    auto_ratio: Annotated[_Share, AfterValidator(_without_effect)] = _key(0.99, changes_numbers=False)
    """A key of DeepSpeed's ZenFlow without effect: measured times choose S, and max_update_interval bounds it."""

    moments_dtype: Literal["float32", "bfloat16", "int8"] = _key("float32")
    """Element type of AdamW's moments in host memory. "bfloat16" takes 8 bytes a parameter for the optimizer states instead of 12, "int8"
    6.1; they are rounded once in S steps, stochastically (bfloat16's first moment to nearest if beta1 <= 0.996). Checkpoints hold
    float32; runs with any of them read all."""

    offload: Annotated[bool, AfterValidator(_without_effect)] = _key(False, changes_numbers=False)
    """A key of DeepSpeed's ZenFlow without effect: the states of device-owned columns stay on the device."""

    accumulate_on: Literal["device", "host", "auto"] = _key("auto", changes_numbers=False)
    """Memory that holds the sums of gradients over micro-batches. On the device they take 2 bytes per element of the rank's partition, 4 in
    fp32; in host memory each sum crosses PCIe both ways. "auto" takes the device if it has room."""

    worker_cores: Annotated[int, Field(ge=1)] | _Cores | _Auto = _key(
        "auto", unit="logical CPU cores", changes_numbers=False
    )
    """Cores of the worker process: how many, or a list of which. "auto" leaves pt_reserved_cores_perc of them to the trainer."""

    pt_reserved_cores_perc: _Share | _Auto = _key("auto", unit="fraction of cores", changes_numbers=False)
    """Cores left to the trainer by `worker_cores: auto` (DeepSpeed's name). "auto" is 0.5 where training is on the CPU, and an eighth, two
    cores at least, where it is on a GPU: data loaders may use the worker's cores as well."""

    # System calls count their timeouts in milliseconds, in 32 bits.
    worker_timeout: float = _key(600.0, ge=0.001, le=1e6, unit="seconds", changes_numbers=False)
    """Longest wait for the worker, its start included, before training stops with an error. Time in which the worker itself waits for the
    device or for other ranks does not count: that wait is limited by the same number, with several ranks by the strategy's `timeout` if it
    is longer."""

    max_worker_restarts: int = _key(3, ge=0, unit="restarts in ten minutes", changes_numbers=False)
    """Times that a killed worker is restarted before training stops with an error."""

    checkpoint_format: Literal["auto", "deepspeed", "lightning"] = _key("auto", changes_numbers=False)
    """Format of checkpoints. "lightning": one file, as Lightning's strategies for one device write it, with float32 weights and the state
    in the layout of torch's AdamW; "deepspeed": a folder of DeepSpeed's ZeRO, to which each rank writes its part. "auto" is "lightning" on
    one rank and "deepspeed" on several; weights only are always one file. Each run resumes from both."""

    sync_checkpoints: bool = _key(True, changes_numbers=False)
    """Syncs a checkpoint to the disk before it takes its name, so that it survives a failure of power. If false, a save ends before the
    disk has all of it, for network storage that is slow to sync."""

    async_checkpoints: bool = _key(False, changes_numbers=False)
    """A save in training ends when what it writes has been copied to host memory; a thread writes the checkpoint while training goes on.
    The next save, whatever loads a checkpoint, and the end of training wait for the thread and raise its errors. Who reads the file right
    after a save calls `strategy.wait_for_checkpoint()` before."""

    stall_monitor: bool = _key(True, changes_numbers=False)
    """Logs stall metrics, and a summary at the end of a fit of 50 steps or more (`lightning_zenflow.StallMonitor`)."""

    def __init__(self, **keys: Any) -> None:
        check_keys(keys, KEYS, "ZenFlowConfig")
        try:
            super().__init__(**keys)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            must = f"must be {allowed_values(KEYS[name])}, got {keys[name]!r}"
            raise ValueError(
                f"ZenFlowConfig: {name} {must}; leave it out for the default, {KEYS[name]['default']!r}"
            ) from None

    def without_measurements(self) -> Self:
        """This configuration where runs must repeat: S, d and owners are those that "auto" begins with, to the end."""
        candidates = candidates_of(self.update_intervals, self.publish_lags)
        fixed = self.model_copy(update=asdict(candidates[0]))
        return fixed.model_copy(update={"offload_ratio": 1.0}) if fixed.depends_on_measurements else fixed

    @property
    def without_effect_on_host(self) -> list[str]:
        """Given keys that only act where weights are late, and so never where they are in host memory."""
        given = [name for name in _OF_LATE_WEIGHTS if name in self.model_fields_set]
        return [name for name in given if getattr(self, name) not in (0, "auto")]

    def with_weights_on_host(self) -> Self:
        """This configuration where the worker writes the weights in place, in host memory; ValueError if a key asks for late ones."""
        not_late = "every step then ends with AdamW's weights, and nothing is approximated"
        required = {
            "update_interval": (1, "1 or 'auto'", not_late),
            "publish_lag": (0, "0 or 'auto'", not_late),
            "offload_ratio": (1.0, "1", "new weights would need a second way down"),
        }
        for name, (value, allowed, reason) in required.items():
            if (given := getattr(self, name)) not in (value, "auto"):
                raise ValueError(
                    f"ZenFlowConfig: {name} must be {allowed} where parameters are in host memory, got {given!r}; leave it out: {reason}"
                )
        others = {**dict.fromkeys(_OF_LATE_WEIGHTS, 0), "clip_prediction": self.clip_prediction is True}
        return self.model_copy(update={**{name: value for name, (value, *_) in required.items()}, **others})

    def numeric_values(self) -> dict[str, Any]:
        """The values that losses and weights depend on, whatever their wording; a run continues bit for bit only with the same ones."""
        intervals, lags, has_columns = self.update_intervals, self.publish_lags, self.owned_ratio > 0
        return {
            **{name: getattr(self, name) for name, key in KEYS.items() if key["changes_numbers"]},
            "topk_ratio": self.owned_ratio,
            "select_strategy": "epoch" if self.select_strategy == "epoch" and has_columns else "step",
            "select_interval": self.select_interval if has_columns else "auto",
            "update_interval": intervals[0] if len(intervals) == 1 else "auto",
            "max_update_interval": intervals[-1],
            "publish_lag": lags[0] if len(lags) == 1 else "auto",
            "clip_prediction": self.predicts_clipping and self.submits_in_backward,
            "offload_ratio": self.offload_ratio if self._owners_change_numbers else 1.0,
            **asdict(self.compensation),
        }

    @property
    def update_intervals(self) -> list[int]:
        """Windows S that may be used, ascending. Where nothing overlaps, a longer one would hide no more."""
        if self.update_interval != "auto":
            return [self.update_interval]
        return [1 << i for i in range(self.max_update_interval.bit_length() if self.overlap_step else 1)]

    @property
    def publish_lags(self) -> list[int]:
        """Publish lags d that may be used, ascending."""
        if not self.overlap_step:
            return [0]
        return [0, 1] if self.publish_lag == "auto" else [self.publish_lag]

    @property
    def is_immediate(self) -> bool:
        """True if every step ends with weights that have all of its gradients (S = 1, d = 0). Nothing is approximated then."""
        return self.update_intervals == [1] and self.publish_lags == [0]

    @property
    def predicts_clipping(self) -> bool:
        """True if forward passes may see weights with a predicted clip factor."""
        return self.clip_prediction is not False

    @property
    def _owners_change_numbers(self) -> bool:
        """False where no weight is late and all factors are true: no bit depends on the owner then."""
        return not self.is_immediate or (self.predicts_clipping and self.submits_in_backward)

    @property
    def owned_ratio(self) -> float:
        """Largest share of the columns that the device may own: `topk_ratio`, or 0 where nothing is ever late."""
        return 0.0 if self.is_immediate else self.topk_ratio

    @property
    def submits_in_backward(self) -> bool:
        """True if the schedule may have steps with d = 0, and these submit blocks to the worker in backward."""
        return self.overlap_step and 0 in self.publish_lags

    @property
    def measures(self) -> bool:
        """True if measured times choose S or d."""
        return len(self.update_intervals) * len(self.publish_lags) > 1

    @property
    def depends_on_measurements(self) -> bool:
        """True if numbers depend on measured times: by the schedule, or by owners where these change numbers."""
        return self.measures or (self.offload_ratio == "auto" and self._owners_change_numbers)

    @property
    def compensation(self) -> StalenessCompensation:
        """`weight_prediction` and `provisional_scale` for this schedule."""
        return StalenessCompensation(
            weight_prediction=0.0 if self.is_immediate and self.weight_prediction == "auto" else self.weight_prediction,
            provisional_scale=0.0 if self.is_immediate else self.provisional_scale,
        )


KEYS: dict[str, dict[str, Any]] = ZenFlowConfig.model_json_schema()["properties"]
"""Schemas of the keys in JSON's terms, by name in the order of their declaration; "unit" and "changes_numbers" beside them."""


def allowed_values(schema: Mapping[str, Any]) -> str:
    """Names the allowed values of a key, so that "must be ..." completes a sentence."""
    if "text" in schema:
        return str(schema["text"])
    if "anyOf" in schema:
        return " or ".join(map(allowed_values, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(repr, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "boolean":
        return "true or false"
    noun = "an integer" if schema["type"] == "integer" else "a number"
    least, most = f"{schema['minimum']:g}", schema.get("maximum")
    return f"{noun} >= {least}" if most is None else f"{noun} from {least} to {most:g}"


def check_keys(keys: Iterable[object], known: Collection[str], where: str) -> None:
    """Refuses unknown keys; `where` they are, such as a file and a section, is for the error."""
    for key in (key for key in keys if key not in known):
        # "topk_ratio" is near to "ratio", and something else.
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.7)
        suggestion = f" (did you mean {near[0]!r}?)" if near else ""
        raise MisconfigurationException(f"{where}: unknown key {key!r}{suggestion}; keys are {', '.join(known)}")
