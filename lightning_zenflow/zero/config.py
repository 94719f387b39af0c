"""A DeepSpeed config fit for ZenFlow: checks what the user's asks for and sets what the engine needs.

Written against DeepSpeed 0.19.8.
"""

import copy
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn import Module

# Lightning sets these from its Trainer and its data loader, so "auto" has a meaning for them.
_SET_BY_LIGHTNING = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)

# DeepSpeed itself gives "auto" a meaning here.
_SET_BY_DEEPSPEED = ("data_types.keep_in_fp32_modules", "pipeline.stages")

_MAPPINGS = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "fp16",
    "bf16",
    "bfloat16",
    "data_types",
    "torch_autocast",
    "timers",
    "timers.throughput",
)


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """The one value that a key may have if it is there."""

    key: str
    value: object
    reason: str


_RULES = (
    _Rule(
        key="zero_optimization.stage",
        value=2,
        reason="ZenFlow works on ZeRO's partitioned gradients and optimizer states",
    ),
    _Rule(
        key="zero_optimization.contiguous_gradients",
        value=True,
        reason="gradients are taken from ZeRO's contiguous buckets",
    ),
    _Rule(
        key="zero_optimization.round_robin_gradients",
        value=False,
        reason="ZenFlow has its own order of copies to the host",
    ),
    _Rule(key="zero_optimization.compute_grad_norm", value=True, reason="the norm decides whether a step is applied"),
    _Rule(
        key="zero_optimization.elastic_checkpoint", value=False, reason="use DeepSpeed's universal checkpoints instead"
    ),
    _Rule(key="zero_optimization.cpu_offload_param", value=False, reason="parameters are not offloaded with stage 2"),
    _Rule(key="sparse_gradients", value=False, reason="every gradient is dense"),
    _Rule(key="managed_gradient_accumulation", value=True, reason="Lightning leaves the boundary to DeepSpeed"),
    _Rule(key="torch_autocast.enabled", value=False, reason="the Trainer's `precision` chooses the data type"),
    _Rule(key="fp16.fp16_master_weights_and_grads", value=False, reason="master weights are in 32 bits"),
    _Rule(key="bf16.bf16_master_weights_and_grads", value=False, reason="master weights are in 32 bits"),
    _Rule(key="bf16.bf16_optimizer_states", value=False, reason="moments are in 32 bits"),
    _Rule(key="bfloat16.bf16_master_weights_and_grads", value=False, reason="master weights are in 32 bits"),
    _Rule(key="bfloat16.bf16_optimizer_states", value=False, reason="moments are in 32 bits"),
    _Rule(key="optimizer.params.amsgrad", value=False, reason="the worker's update has no AMSGrad"),
    _Rule(key="optimizer.params.maximize", value=False, reason="the worker's update minimises"),
    _Rule(key="optimizer.params.differentiable", value=False, reason="the worker's update has no graph"),
    _Rule(key="optimizer.params.bias_correction", value=True, reason="the worker's update corrects the moments' bias"),
    _Rule(key="optimizer.params.fp32_optimizer_states", value=True, reason="moments are in 32 bits"),
)

_OPTIMIZERS = ("AdamW", "Adam")

# What is left for the constructors of torch.optim.Adam(W) or is read by DeepSpeed before it calls them.
_OPTIMIZER_PARAMS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "adam_w_mode",
    "torch_adam",
    "bias_correction",
    "fp32_optimizer_states",
    "amsgrad",
    "maximize",
    "differentiable",
    "foreach",
    "fused",
    "capturable",
)

# Arguments of DeepSpeed's optimizers that torch's do not have.
_DEEPSPEED_OPTIMIZER_PARAMS = ("bias_correction", "fp32_optimizer_states")

_GRADIENT_DTYPES = {
    "fp32": ("torch.float32", "fp32", "float32", "float"),
    "fp16": ("torch.float16", "fp16", "float16", "half"),
    "bf16": ("torch.bfloat16", "bf16", "bfloat16"),
}


def prepare_deepspeed_config(
    config: Mapping[str, Any] | None,
    *,
    accumulate_grad_batches: int | None = None,
    gradient_clip_val: float | None = None,
) -> dict[str, Any]:
    """A new DeepSpeed config with ZeRO stage 2, offload to the CPU and an optimizer that needs nothing compiled.

    The result can be prepared again: that changes nothing.

    Args:
        config: the user's, without ``zero_optimization.zenflow``, or the one that Lightning made from keywords. It is
            not modified.
        accumulate_grad_batches: the Trainer's, where it is known: the config's must then agree.
        gradient_clip_val: the Trainer's, where it is known: the config's must then agree.

    Raises:
        MisconfigurationException: something is asked for that ZenFlow does not support; the message names the key's
            full path, its value and what is allowed.
    """
    result: dict[str, Any] = copy.deepcopy(dict(config)) if config is not None else {}
    _drop_nulls(result)
    _check_mappings(result)
    for rule in _RULES:
        value = _get(result, rule.key)
        # Types count: 1 and 1.0 equal True.
        if value is not None and (type(value) is not type(rule.value) or value != rule.value):
            raise _refusal(rule.key, value, f"{rule.value!r} ({rule.reason})")

    _prepare_what_lightning_sets(result, accumulate_grad_batches, gradient_clip_val)
    _refuse_auto(result)
    _check_gradient_dtype(result)
    result.pop("sparse_gradients", None)  # DeepSpeed refuses the key even where it is false
    _prepare_zero_optimization(result)
    if "optimizer" in result:
        _prepare_optimizer(result["optimizer"])
    # A plain torch optimizer from configure_optimizers is what the worker replaces; DeepSpeed would ask for its own.
    result["zero_force_ds_cpu_optimizer"] = False
    result.setdefault("zero_allow_untested_optimizer", True)
    # For the samples a second in its log DeepSpeed would wait for the device twice a step.
    result.setdefault("timers", {}).setdefault("throughput", {}).setdefault("synchronized", False)
    return result


def _refusal(key: str, value: object, allowed: str) -> MisconfigurationException:
    return MisconfigurationException(f"DeepSpeed config: {key}={value!r}: allowed is {allowed}")


def _get(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted path; None where it or a mapping on the way is absent."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _drop_nulls(config: dict[str, Any]) -> None:
    # Neither Lightning (`"optimizer" in config`) nor DeepSpeed takes a null mapping for an absent one.
    for key in _MAPPINGS:
        parent, _, name = key.rpartition(".")
        mapping = _get(config, parent) if parent else config
        if isinstance(mapping, dict) and name in mapping and mapping[name] is None:
            del mapping[name]


def _check_mappings(config: Mapping[str, Any]) -> None:
    for key in _MAPPINGS:
        value = _get(config, key)
        if value is not None and not isinstance(value, dict):
            raise _refusal(key, value, "a mapping of keys to values")


def _prepare_what_lightning_sets(config: dict[str, Any], accumulate: int | None, clip: float | None) -> None:
    for key in _SET_BY_LIGHTNING:
        if config.get(key) == "auto":
            del config[key]
    batch_size = config.pop("train_batch_size", None)
    if batch_size is not None:
        # DeepSpeed asserts that it equals micro-batch x accumulation x ranks, whose factors are Lightning's.
        rank_zero_info(
            f"DeepSpeed config: train_batch_size={batch_size!r} is not used: the data loader's batch size decides"
        )
    steps = config.get("gradient_accumulation_steps")
    if steps is not None:
        allowed = "an integer >= 1 that equals the Trainer's accumulate_grad_batches"
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise _refusal("gradient_accumulation_steps", steps, allowed)
        # 1 is DeepSpeed's default and says nothing.
        if steps != 1 and accumulate is not None and steps != accumulate:
            raise _refusal("gradient_accumulation_steps", steps, f"{allowed} ({accumulate})")
        if steps == 1 or accumulate is not None:
            del config["gradient_accumulation_steps"]
    norm = config.get("gradient_clipping")
    if norm is not None:
        if isinstance(norm, bool) or not isinstance(norm, Real) or not math.isfinite(norm) or norm < 0:
            raise _refusal("gradient_clipping", norm, "a finite number >= 0 (0: off)")
        if clip is not None and norm != clip:
            raise _refusal(
                "gradient_clipping", norm, f"the Trainer's gradient_clip_val ({clip}), or set only one of them"
            )


def _refuse_auto(config: Mapping[str, Any]) -> None:
    for key, value in _leaves(config):
        if isinstance(value, str) and value == "auto" and key not in _SET_BY_DEEPSPEED:
            raise _refusal(key, value, f"a value; Lightning fills in 'auto' only for {', '.join(_SET_BY_LIGHTNING)}")


def _check_gradient_dtype(config: Mapping[str, Any]) -> None:
    value = _get(config, "data_types.grad_accum_dtype")
    if value is None:
        return
    if _get(config, "fp16.enabled"):
        model = "fp16"
    elif _get(config, "bf16.enabled") or _get(config, "bfloat16.enabled"):
        model = "bf16"
    else:
        allowed = "null: gradients have the model's data type, which the Trainer's `precision` decides"
        raise _refusal("data_types.grad_accum_dtype", value, allowed)
    if value not in _GRADIENT_DTYPES[model]:
        raise _refusal("data_types.grad_accum_dtype", value, f"null or {model!r}, the model's data type")


def _prepare_zero_optimization(config: dict[str, Any]) -> None:
    zero = config.setdefault("zero_optimization", {})
    assert "zenflow" not in zero, "resolve_config takes this block out"
    param_device = _get(zero, "offload_param.device")
    if param_device not in (None, "none"):
        allowed = "'none' (parameters are offloaded with stage 3 only)"
        raise _refusal("zero_optimization.offload_param.device", param_device, allowed)
    optimizer_device = _get(zero, "offload_optimizer.device")
    if optimizer_device not in (None, "none", "cpu"):
        raise _refusal("zero_optimization.offload_optimizer.device", optimizer_device, "'cpu'")
    if optimizer_device == "none":
        key = "zero_optimization.offload_optimizer.device"
        rank_zero_info(f"DeepSpeed config: {key}='none' is not used: ZenFlow offloads to 'cpu'")
    # DeepSpeed refuses an old key beside its successor.
    for old in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "offload_param"):
        zero.pop(old, None)
    zero["stage"] = 2
    zero["contiguous_gradients"] = True
    # The arena of the worker is page-locked; DeepSpeed's own host buffers stay small.
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}


def _prepare_optimizer(optimizer: dict[str, Any]) -> None:
    """Make DeepSpeed build torch's class: ``engine.get_optimizer_configuration`` reads ``torch_adam`` and
    ``adam_w_mode``.

    There "Adam" means decoupled weight decay unless ``adam_w_mode`` is false, and "AdamW" always does; that is left to
    it.
    """
    name = optimizer.get("type")
    supported = " or ".join(repr(supported) for supported in _OPTIMIZERS)
    if not isinstance(name, str) or name.lower() not in [supported.lower() for supported in _OPTIMIZERS]:
        raise _refusal("optimizer.type", name, supported)
    params = optimizer.setdefault("params", {})
    for key, value in params.items():
        if key not in _OPTIMIZER_PARAMS:
            near = difflib.get_close_matches(key, _OPTIMIZER_PARAMS, n=1)
            suggestion = f" (did you mean {near[0]!r}?)" if near else ""
            hint = (
                " (clip by `gradient_clipping` or the Trainer's `gradient_clip_val`)"
                if key == "max_grad_norm"
                else suggestion
            )
            raise _refusal(
                f"optimizer.params.{key}", value, f"no such key{hint} but any of {', '.join(_OPTIMIZER_PARAMS)}"
            )
    for key in ("adam_w_mode", "torch_adam"):
        if not isinstance(params.get(key, True), bool):
            raise _refusal(f"optimizer.params.{key}", params[key], "true or false")
    if not params.get("torch_adam", False):
        # DeepSpeed's optimizers default to no decay, torch's AdamW to 0.01.
        params.setdefault("weight_decay", 0.0)
    for key in _DEEPSPEED_OPTIMIZER_PARAMS:
        params.pop(key, None)
    params["torch_adam"] = True


_BUCKETS = 32
"""Per step. Gradients leave the device a bucket at a time: with few of them, what could hide behind backward is left to the step's end."""

SMALLEST_BUCKET, LARGEST_BUCKET = 4_000_000, 200_000_000
"""Elements; below the smallest the calls cost more than the copies, the largest is the default of Lightning's `DeepSpeedStrategy`."""


def bucket_size(numel: int) -> int:
    """Elements of a bucket for a model with `numel` trained ones."""
    return min(max(-(-numel // _BUCKETS), SMALLEST_BUCKET), LARGEST_BUCKET)


def set_bucket_size(config: dict[str, Any], model: Module) -> None:
    """Writes the size that suits a model into a DeepSpeed configuration."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config["zero_optimization"]["reduce_bucket_size"] = bucket_size(trained)


def says_bucket_size(config: Mapping[str, Any] | None) -> bool:
    """Whether a DeepSpeed configuration has the size of the buckets."""
    zero = (config or {}).get("zero_optimization")
    return isinstance(zero, Mapping) and zero.get("reduce_bucket_size") is not None
