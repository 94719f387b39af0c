"""The DeepSpeed configuration under ZenFlow: unsupported settings are refused, and those that the engine needs are set.

The rules are what neither DeepSpeed nor Lightning knows; what DeepSpeed validates when the engine is built is not validated here.
Written against DeepSpeed 0.19.8.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import eq
from typing import Any, TypeAlias

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn import Module

from lightning_zenflow.config import check_keys
from lightning_zenflow.schedule.staggered import bucket_size

Rule: TypeAlias = tuple[str, Callable[[Any], bool], str]
"""A key's dotted path, whether a value of it is allowed, and what is allowed. Absent keys are."""

# Set by Lightning from its Trainer and its data loader, so that "auto" is allowed.
_SET_BY_LIGHTNING = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)

# Set by DeepSpeed if "auto".
_SET_BY_DEEPSPEED = ("data_types.keep_in_fp32_modules", "pipeline.stages")


def _is(required: object, value: object) -> bool:
    # Types are compared because 1 and 1.0 equal True.
    return type(value) is type(required) and value == required


# Keys that must have this value if present, with the reason.
_REQUIRED: dict[str, tuple[object, str]] = {
    "zero_optimization.stage": (2, "ZenFlow works on ZeRO's partitioned gradients and optimizer states"),
    "zero_optimization.contiguous_gradients": (True, "gradients are taken from ZeRO's contiguous buckets"),
    "zero_optimization.round_robin_gradients": (False, "ZenFlow orders the copies to the host itself"),
    "zero_optimization.compute_grad_norm": (True, "the norm decides whether a step is applied"),
    "zero_optimization.elastic_checkpoint": (False, "use DeepSpeed's universal checkpoints instead"),
    "zero_optimization.cpu_offload_param": (False, "stage 2 does not offload parameters"),
    "zero_optimization.offload_param.device": ("none", "only stage 3 offloads parameters"),
    "managed_gradient_accumulation": (True, "Lightning leaves the boundary to DeepSpeed"),
    "torch_autocast.enabled": (False, "the Trainer's `precision` sets the data type"),
    "optimizer.params.amsgrad": (False, "the worker's update has no AMSGrad"),
    "optimizer.params.maximize": (False, "the worker's update minimises"),
    "optimizer.params.differentiable": (False, "the worker's update has no graph"),
    "optimizer.params.bias_correction": (True, "the worker's update corrects the bias of the moments"),
    "optimizer.params.fp32_optimizer_states": (True, "ZenFlow's key moments_dtype decides"),
}

_NO_DISK = "the states are in host memory"

# Keywords of Lightning's `DeepSpeedStrategy` that must have this value if given, with the reason.
_REQUIRED_OPTIONS: dict[str, tuple[object, str]] = {
    "zero_optimization": (True, "ZenFlow works on ZeRO's partitioned gradients and optimizer states"),
    "offload_optimizer_device": ("cpu", _NO_DISK),
    "offload_parameters": (False, "stage 2 does not offload parameters"),
    "offload_params_device": ("cpu", "stage 2 does not offload parameters"),
    "remote_device": (None, "only stage 3 makes modules on another device"),
    "load_full_weights": (False, "only stage 3 loads weights from a single file"),
}

_RULES: tuple[Rule, ...] = (
    *((path, partial(_is, required), f"{required!r} ({reason})") for path, (required, reason) in _REQUIRED.items()),
    ("zero_optimization.offload_optimizer.device", lambda value: value in ("cpu", "none"), "'cpu'"),
    # DeepSpeed only asserts it, or divides by it.
    ("zero_optimization.allgather_bucket_size", lambda n: not isinstance(n, int | float) or (n >= 2 and n % 2 == 0),
     "an even integer >= 2"),
    ("gradient_accumulation_steps", lambda steps: type(steps) is int and steps >= 1,
     "an integer >= 1 that equals the Trainer's accumulate_grad_batches"),
    ("gradient_clipping", lambda norm: type(norm) in (int, float) and 0 <= norm < math.inf, "a finite number >= 0 (0: off)"),
    ("optimizer.type", lambda name: isinstance(name, str) and name.lower() in ("adamw", "adam"), "'AdamW' or 'Adam'"),
    ("optimizer", lambda optimizer: "type" in optimizer, "a mapping with a type, 'AdamW' or 'Adam'"),
    ("timers.throughput.synchronized", lambda value: isinstance(value, bool), "true or false"),
)  # fmt: skip

# Lightning takes any number and never ends a step with some. A negative norm would not clip.
_TRAINER_RULES: tuple[Rule, ...] = (
    ("accumulate_grad_batches", lambda batches: isinstance(batches, int) and batches >= 1, "an integer >= 1"),
    ("gradient_clip_val", lambda norm: norm >= 0, "a number >= 0"),
)


def prepare_deepspeed_config(
    config: Mapping[str, Any] | None,
    *,
    accumulate_grad_batches: int | None = None,
    gradient_clip_val: float | None = None,
    precision: str | None = None,
) -> dict[str, Any]:
    """A new DeepSpeed config with ZeRO stage 2, offload to the CPU and an optimizer without compiled kernels. Idempotent.

    Args:
        config: the user's, without ``zero_optimization.zenflow``, or Lightning's, made from keywords. It is not modified.
        accumulate_grad_batches: the Trainer's, if known; the config must agree with it.
        gradient_clip_val: the Trainer's, if known; the config must agree with it.
        precision: the Trainer's, such as "bf16-mixed", if known; the config must agree with it.

    Raises:
        MisconfigurationException: ZenFlow does not support a setting; names the path of the key, its value and the allowed values.
    """
    result: dict[str, Any] = _without_nulls(config or {})
    if "bfloat16" in result:
        # The key's old name; DeepSpeed ignores it beside the new one.
        result.setdefault("bf16", result.pop("bfloat16"))
    for key in _SET_BY_LIGHTNING:
        if result.get(key) == "auto":
            del result[key]
    trainer = {"accumulate_grad_batches": accumulate_grad_batches, "gradient_clip_val": gradient_clip_val}
    _refuse(trainer, _TRAINER_RULES, "Trainer")
    _refuse(result, _rules(result, accumulate_grad_batches, gradient_clip_val, precision), "DeepSpeed config")
    if (batch_size := result.pop("train_batch_size", None)) is not None:
        # DeepSpeed asserts that it equals micro-batch x accumulation x ranks, all of which Lightning sets.
        rank_zero_info(
            f"DeepSpeed config: train_batch_size={batch_size!r} is not used: the data loader sets the batch size"
        )
    if accumulate_grad_batches is not None or result.get("gradient_accumulation_steps") == 1:
        result.pop("gradient_accumulation_steps", None)
    zero = result.setdefault("zero_optimization", {})
    assert "zenflow" not in zero, "resolve_config removes this block"
    # DeepSpeed refuses a deprecated key beside its successor.
    for old in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "offload_param"):
        zero.pop(old, None)
    # The worker's arena is page-locked instead; DeepSpeed's own host buffers stay small.
    zero.update(stage=2, contiguous_gradients=True, offload_optimizer={"device": "cpu", "pin_memory": False})
    if "optimizer" in result:
        _prepare_optimizer(result["optimizer"])
    # The worker replaces the torch optimizer from configure_optimizers; DeepSpeed would ask for its own class.
    result["zero_force_ds_cpu_optimizer"] = False
    result.setdefault("zero_allow_untested_optimizer", True)
    # DeepSpeed's throughput log would synchronise with the device twice a step.
    result.setdefault("timers", {}).setdefault("throughput", {}).setdefault("synchronized", False)
    return result


def refuse_options(options: Mapping[str, Any]) -> None:
    """Refuses keywords of Lightning's strategy that ask for another place of the states than host memory; Lightning would ignore some.

    Raises:
        MisconfigurationException: names the keyword.
    """
    for key, (required, reason) in _REQUIRED_OPTIONS.items():
        if options.get(key, required) != required:
            raise MisconfigurationException(
                f"ZenFlowStrategy: {key} must be {required!r} or absent, got {options[key]!r}: {reason}"
            )


def says_nothing_of_clipping(config: Mapping[str, Any] | None, gradient_clip_val: float | None) -> bool:
    """Whether a user's DeepSpeed config, if any, and the Trainer leave clipping to a default.

    Plain DeepSpeed clips by a norm of 1.0 then, since 0.19.3; Lightning sets 0, for no clipping.
    """
    return config is not None and config.get("gradient_clipping") is None and gradient_clip_val is None


def set_bucket_size(config: dict[str, Any], model: Module) -> None:
    """Sets `zero_optimization.reduce_bucket_size` to suit a model."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config["zero_optimization"]["reduce_bucket_size"] = bucket_size(trained)


def says_bucket_size(config: Mapping[str, Any] | None) -> bool:
    """Whether a DeepSpeed config sets `zero_optimization.reduce_bucket_size`."""
    return _get(config or {}, "zero_optimization.reduce_bucket_size") is not None


def _get(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if it or a mapping on the path is absent.

    Raises:
        MisconfigurationException: there is no mapping on the path but something else.
    """
    value: Any = config
    names = path.split(".")
    for depth, name in enumerate(names):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            key = ".".join(names[:depth])
            raise MisconfigurationException(f"DeepSpeed config: {key} must be a mapping, got {value!r}")
        value = value.get(name)
    return value


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _without_nulls(config: Any) -> Any:
    """A deep copy in which a key with the value null is absent, as YAML means it: Lightning and DeepSpeed read some of them otherwise."""
    if not isinstance(config, Mapping):
        return copy.deepcopy(config)
    return {key: _without_nulls(value) for key, value in config.items() if value is not None}


def _refuse(config: Mapping[str, Any], rules: Iterable[Rule], where: str) -> None:
    for path, is_allowed, allowed in rules:
        value = _get(config, path)
        if value is not None and not is_allowed(value):
            raise MisconfigurationException(f"{where}: {path} must be {allowed}, got {value!r}")


def _rules(
    config: Mapping[str, Any], accumulate: int | None, clip: float | None, precision: str | None
) -> Iterator[Rule]:
    """`_RULES`, and those that depend on other keys and on the Trainer."""
    yield from _RULES
    if accumulate is not None:
        # 1 is DeepSpeed's default, so it may not have been chosen.
        allowed = f"an integer >= 1 that equals the Trainer's accumulate_grad_batches ({accumulate})"
        yield "gradient_accumulation_steps", lambda steps: steps in (1, accumulate), allowed
    if clip is not None:
        allowed = f"the Trainer's gradient_clip_val ({clip}) or absent"
        yield "gradient_clipping", lambda norm: norm == clip, allowed
    if _get(config, "zero_optimization.reduce_scatter") is not False:
        for path, value in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            yield path, partial(eq, value), f"{value!r}, unless zero_optimization.reduce_scatter is false"
    for path, value in _leaves(config):
        if isinstance(value, str) and value == "auto" and path not in _SET_BY_DEEPSPEED:
            yield path, lambda _: False, f"a value (Lightning replaces 'auto' only in {', '.join(_SET_BY_LIGHTNING)})"
    if precision is None:
        return
    for key, of_trainer in (("fp16", "16"), ("bf16", "bf16")):
        # Lightning's plugins convert the inputs, DeepSpeed the weights.
        wanted = precision.partition("-")[0] == of_trainer
        instead = (
            "precision='32-true'" if wanted else f"`Trainer(precision='{of_trainer}-mixed')` or '{of_trainer}-true'"
        )
        allowed = f"{wanted!r} or absent, as with the Trainer's precision={precision!r} (or set {instead})"
        yield f"{key}.enabled", partial(eq, wanted), allowed


def _prepare_optimizer(optimizer: dict[str, Any]) -> None:
    """Makes DeepSpeed build torch's class instead of its own, with DeepSpeed's defaults.

    As before, "AdamW" means decoupled weight decay, and so does "Adam" unless ``adam_w_mode`` is false
    (``engine.get_optimizer_configuration``).
    """
    params = optimizer.setdefault("params", {})
    _, *torchs = inspect.signature(torch.optim.AdamW).parameters
    deepspeeds = ("bias_correction", "fp32_optimizer_states")
    check_keys(params, (*torchs, "adam_w_mode", "torch_adam", *deepspeeds), "DeepSpeed config, optimizer.params")
    if not params.get("torch_adam", False):
        # DeepSpeed's optimizers default to no decay, torch's AdamW to 0.01.
        params.setdefault("weight_decay", 0.0)
    for key in deepspeeds:
        params.pop(key, None)
    params["torch_adam"] = True
