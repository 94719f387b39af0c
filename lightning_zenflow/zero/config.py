"""The DeepSpeed configuration under ZenFlow: unsupported settings are refused, and those that the engine needs are set.

Written against DeepSpeed 0.19.8.
"""

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn import Module

from lightning_zenflow.config import check_keys
from lightning_zenflow.schedule.staggered import bucket_size

# Set by Lightning from its Trainer and its data loader, so that "auto" is allowed.
_SET_BY_LIGHTNING = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)

# Set by DeepSpeed if "auto".
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

_MASTER_WEIGHTS = "master weights are in float32"
_MOMENTS = "ZenFlow's key moments_dtype decides"

# Keys that must have this value if present, with the reason.
_REQUIRED: dict[str, tuple[object, str]] = {
    "zero_optimization.stage": (2, "ZenFlow works on ZeRO's partitioned gradients and optimizer states"),
    "zero_optimization.contiguous_gradients": (True, "gradients are taken from ZeRO's contiguous buckets"),
    "zero_optimization.round_robin_gradients": (False, "ZenFlow orders the copies to the host itself"),
    "zero_optimization.compute_grad_norm": (True, "the norm decides whether a step is applied"),
    "zero_optimization.elastic_checkpoint": (False, "use DeepSpeed's universal checkpoints instead"),
    "zero_optimization.cpu_offload_param": (False, "stage 2 does not offload parameters"),
    "sparse_gradients": (False, "gradients must be dense"),
    "managed_gradient_accumulation": (True, "Lightning leaves the boundary to DeepSpeed"),
    "torch_autocast.enabled": (False, "the Trainer's `precision` sets the data type"),
    "fp16.fp16_master_weights_and_grads": (False, _MASTER_WEIGHTS),
    "bf16.bf16_master_weights_and_grads": (False, _MASTER_WEIGHTS),
    "bf16.bf16_optimizer_states": (False, _MOMENTS),
    "bfloat16.bf16_master_weights_and_grads": (False, _MASTER_WEIGHTS),
    "bfloat16.bf16_optimizer_states": (False, _MOMENTS),
    "optimizer.params.amsgrad": (False, "the worker's update has no AMSGrad"),
    "optimizer.params.maximize": (False, "the worker's update minimises"),
    "optimizer.params.differentiable": (False, "the worker's update has no graph"),
    "optimizer.params.bias_correction": (True, "the worker's update corrects the bias of the moments"),
    "optimizer.params.fp32_optimizer_states": (True, _MOMENTS),
}

_NO_DISK = "the states are in host memory"

# Keywords of Lightning's `DeepSpeedStrategy` that must have this value if given, with the reason.
_REQUIRED_OPTIONS: dict[str, tuple[object, str]] = {
    "zero_optimization": (True, "ZenFlow works on ZeRO's partitioned gradients and optimizer states"),
    "offload_optimizer": (True, f"{_NO_DISK}; use DeepSpeedStrategy(stage=2) to keep them on the device"),
    "offload_optimizer_device": ("cpu", _NO_DISK),
    "offload_parameters": (False, "stage 2 does not offload parameters"),
    "offload_params_device": ("cpu", "stage 2 does not offload parameters"),
    "remote_device": (None, "only stage 3 makes modules on another device"),
    "load_full_weights": (False, "only stage 3 loads weights from a single file"),
}

_OPTIMIZERS = ("AdamW", "Adam")

# Arguments of torch.optim.Adam(W) and keys that DeepSpeed reads before it calls them.
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

# Arguments of DeepSpeed's optimizers only.
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
    result: dict[str, Any] = copy.deepcopy(dict(config)) if config is not None else {}
    _drop_nulls(result)
    _check_mappings(result)
    for key, (required, reason) in _REQUIRED.items():
        value = _get(result, key)
        # Types are compared because 1 and 1.0 equal True.
        if value is not None and (type(value) is not type(required) or value != required):
            raise _refusal(key, value, f"{required!r} ({reason})")

    _prepare_what_lightning_sets(result, accumulate_grad_batches, gradient_clip_val)
    _refuse_auto(result)
    _check_reduce_scatter(result)
    _check_gradient_dtype(result)
    if precision is not None:
        _check_precision(result, precision)
    result.pop("sparse_gradients", None)  # DeepSpeed refuses the key even if it is false
    _prepare_zero_optimization(result)
    if "optimizer" in result:
        _prepare_optimizer(result["optimizer"])
    # The worker replaces the torch optimizer from configure_optimizers; DeepSpeed would ask for its own class.
    result["zero_force_ds_cpu_optimizer"] = False
    result.setdefault("zero_allow_untested_optimizer", True)
    # DeepSpeed's throughput log would synchronise with the device twice a step.
    result.setdefault("timers", {}).setdefault("throughput", {}).setdefault("synchronized", False)
    return result


def refuse_options(options: Mapping[str, Any], base: type) -> None:
    """Refuses keywords of Lightning's strategy that ask for another place of the states than host memory; Lightning would ignore some.

    Args:
        options: the keywords.
        base: Lightning's strategy.

    Raises:
        MisconfigurationException: names the keyword.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(base).parameters.items()}
    # A parser such as LightningCLI's gives every keyword: the defaults are not the user's choice there.
    is_parsed = options.keys() >= defaults.keys() - {"config"}
    for key, (allowed, reason) in _REQUIRED_OPTIONS.items():
        if is_parsed and options[key] == defaults[key]:
            continue
        if key in options and options[key] != allowed:
            raise MisconfigurationException(
                f"ZenFlowStrategy: {key} must be {allowed!r} or absent, got {options[key]!r}: {reason}"
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


def _refusal(key: str, value: object, allowed: str) -> MisconfigurationException:
    return MisconfigurationException(f"DeepSpeed config: {key} must be {allowed}, got {value!r}")


def _get(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted path; None if it or a mapping on the path is absent."""
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
    # Lightning (`"optimizer" in config`) and DeepSpeed do not treat a null mapping as absent.
    for key in _MAPPINGS:
        parent, _, name = key.rpartition(".")
        mapping = _get(config, parent) if parent else config
        if isinstance(mapping, dict) and name in mapping and mapping[name] is None:
            del mapping[name]


def _check_mappings(config: Mapping[str, Any]) -> None:
    for key in _MAPPINGS:
        value = _get(config, key)
        if value is not None and not isinstance(value, dict):
            raise _refusal(key, value, "a mapping")


def _prepare_what_lightning_sets(config: dict[str, Any], accumulate: int | None, clip: float | None) -> None:
    for key in _SET_BY_LIGHTNING:
        if config.get(key) == "auto":
            del config[key]
    # Lightning takes any number and never ends a step with some.
    if accumulate is not None and (not isinstance(accumulate, int) or accumulate < 1):
        raise MisconfigurationException(
            f"Trainer: accumulate_grad_batches must be an integer >= 1, got {accumulate!r}; 1 accumulates nothing"
        )
    # NaN fails the comparison. A negative norm would not clip; infinity clips nothing, as in torch.
    if clip is not None and not clip >= 0:
        raise MisconfigurationException(
            f"Trainer: gradient_clip_val must be a number >= 0, got {clip!r}; None clips nothing"
        )
    batch_size = config.pop("train_batch_size", None)
    if batch_size is not None:
        # DeepSpeed asserts that it equals micro-batch x accumulation x ranks, all of which Lightning sets.
        rank_zero_info(
            f"DeepSpeed config: train_batch_size={batch_size!r} is not used: the data loader sets the batch size"
        )
    steps = config.get("gradient_accumulation_steps")
    if steps is not None:
        allowed = "an integer >= 1 that equals the Trainer's accumulate_grad_batches"
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise _refusal("gradient_accumulation_steps", steps, allowed)
        # 1 is DeepSpeed's default, so it may not have been chosen.
        if steps != 1 and accumulate is not None and steps != accumulate:
            raise _refusal("gradient_accumulation_steps", steps, f"{allowed} ({accumulate})")
        if steps == 1 or accumulate is not None:
            del config["gradient_accumulation_steps"]
    norm = config.get("gradient_clipping")
    if norm is not None:
        if isinstance(norm, bool) or not isinstance(norm, Real) or not math.isfinite(norm) or norm < 0:
            raise _refusal("gradient_clipping", norm, "a finite number >= 0 (0: off)")
        if clip is not None and norm != clip:
            allowed = f"the Trainer's gradient_clip_val ({clip}) or absent"
            raise _refusal("gradient_clipping", norm, allowed)


def _refuse_auto(config: Mapping[str, Any]) -> None:
    for key, value in _leaves(config):
        if isinstance(value, str) and value == "auto" and key not in _SET_BY_DEEPSPEED:
            raise _refusal(key, value, f"a value (Lightning replaces 'auto' only in {', '.join(_SET_BY_LIGHTNING)})")


def _check_reduce_scatter(config: Mapping[str, Any]) -> None:
    """Refuses what DeepSpeed does only without `reduce_scatter`."""
    if _get(config, "zero_optimization.reduce_scatter") is False:
        return
    for key, allowed in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        value = config.get(key)
        if value is not None and value != allowed:
            raise _refusal(key, value, f"{allowed!r}, unless zero_optimization.reduce_scatter is false")


def _check_gradient_dtype(config: Mapping[str, Any]) -> None:
    value = _get(config, "data_types.grad_accum_dtype")
    if value is None:
        return
    if _get(config, "fp16.enabled"):
        model = "fp16"
    elif _get(config, "bf16.enabled") or _get(config, "bfloat16.enabled"):
        model = "bf16"
    else:
        allowed = "null (gradients have the model's data type, which the Trainer's `precision` sets)"
        raise _refusal("data_types.grad_accum_dtype", value, allowed)
    if value not in _GRADIENT_DTYPES[model]:
        raise _refusal("data_types.grad_accum_dtype", value, f"null or {model!r}, the model's data type")


def _check_precision(config: Mapping[str, Any], precision: str) -> None:
    for key, of_trainer in (("fp16", "16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        enabled = _get(config, f"{key}.enabled")
        wanted = precision.partition("-")[0] == of_trainer
        # Lightning's plugins convert the inputs, DeepSpeed the weights.
        if enabled is not None and bool(enabled) != wanted:
            allowed = f"{wanted!r} or absent, as with the Trainer's precision={precision!r}"
            instead = (
                f"`Trainer(precision='{of_trainer}-mixed')` or '{of_trainer}-true'"
                if enabled
                else "precision='32-true'"
            )
            raise _refusal(f"{key}.enabled", enabled, f"{allowed} (or set {instead})")


def _prepare_zero_optimization(config: dict[str, Any]) -> None:
    size = _get(config, "zero_optimization.allgather_bucket_size")
    # DeepSpeed only asserts it, or divides by it; other types are for its own check.
    if isinstance(size, Real) and (size < 2 or size % 2):
        raise _refusal("zero_optimization.allgather_bucket_size", size, "an even integer >= 2")
    zero = config.setdefault("zero_optimization", {})
    assert "zenflow" not in zero, "resolve_config removes this block"
    param_device = _get(zero, "offload_param.device")
    if param_device not in (None, "none"):
        allowed = "'none' (only stage 3 offloads parameters)"
        raise _refusal("zero_optimization.offload_param.device", param_device, allowed)
    optimizer_device = _get(zero, "offload_optimizer.device")
    if optimizer_device not in (None, "none", "cpu"):
        raise _refusal("zero_optimization.offload_optimizer.device", optimizer_device, "'cpu'")
    if optimizer_device == "none":
        key = "zero_optimization.offload_optimizer.device"
        rank_zero_info(f"DeepSpeed config: {key}='none' is not used: ZenFlow offloads to 'cpu'")
    # DeepSpeed refuses a deprecated key beside its successor.
    for old in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "offload_param"):
        zero.pop(old, None)
    zero["stage"] = 2
    zero["contiguous_gradients"] = True
    # The worker's arena is page-locked instead; DeepSpeed's own host buffers stay small.
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}


def _prepare_optimizer(optimizer: dict[str, Any]) -> None:
    """Makes DeepSpeed build torch's class instead of its own, with DeepSpeed's defaults.

    As before, "AdamW" means decoupled weight decay, and so does "Adam" unless ``adam_w_mode`` is false
    (``engine.get_optimizer_configuration``).
    """
    name = optimizer.get("type")
    supported = " or ".join(repr(supported) for supported in _OPTIMIZERS)
    if not isinstance(name, str) or name.lower() not in [supported.lower() for supported in _OPTIMIZERS]:
        raise _refusal("optimizer.type", name, supported)
    params = optimizer.setdefault("params", {})
    if "max_grad_norm" in params:
        allowed = "absent (set `gradient_clipping` or the Trainer's `gradient_clip_val` instead)"
        raise _refusal("optimizer.params.max_grad_norm", params["max_grad_norm"], allowed)
    check_keys(params, _OPTIMIZER_PARAMS, "DeepSpeed config, optimizer.params")
    for key in ("adam_w_mode", "torch_adam"):
        if not isinstance(params.get(key, True), bool):
            raise _refusal(f"optimizer.params.{key}", params[key], "true or false")
    if not params.get("torch_adam", False):
        # DeepSpeed's optimizers default to no decay, torch's AdamW to 0.01.
        params.setdefault("weight_decay", 0.0)
    for key in _DEEPSPEED_OPTIMIZER_PARAMS:
        params.pop(key, None)
    params["torch_adam"] = True
