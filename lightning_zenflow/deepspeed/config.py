"""The ``config=`` argument in any of its forms, and the DeepSpeed configuration under ZenFlow: unsupported settings are refused, and those
that the engine needs are set. Written against DeepSpeed 0.19.8.

Sources are a DeepSpeed JSON file, an OmegaConf YAML file, a dict, a ``DictConfig`` or a ``ZenFlowConfig``. Each but the last has one of
three forms:

- flat: keys of ``ZenFlowConfig``;
- sections: ``zenflow:`` with keys of ``ZenFlowConfig`` and ``deepspeed:`` with a DeepSpeed config;
- a DeepSpeed config, recognised by its keys, with or without a ``zero_optimization.zenflow`` block.

Precedence: keywords, the ``zenflow:`` section, the ``zero_optimization.zenflow`` block, the defaults.

The rules are what neither DeepSpeed nor Lightning knows; what DeepSpeed validates when the engine is built is not validated here.
"""

import copy
import difflib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from omegaconf import DictConfig, OmegaConf
from torch.nn import Module

from lightning_zenflow.config import KEYS, ZenFlowConfig, check_keys
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.schedule import bucket_size
from lightning_zenflow.deepspeed.parameters import whole_shape
from lightning_zenflow.deepspeed.users_objects import REQUIRED_OPTIONS

ConfigSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | DictConfig | ZenFlowConfig | None

_SECTIONS = ("zenflow", "deepspeed")

# One of these makes a config DeepSpeed's, and most have several; mistyped ones are refused, since DeepSpeed ignores what it does not know.
_DEEPSPEED_KEYS = (
    "zero_optimization", "optimizer", "scheduler", "bf16", "bfloat16", "fp16", "data_types", "gradient_clipping",
    "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "communication_data_type", "activation_checkpointing",
)  # fmt: skip


def resolve_config(config: ConfigSource, overrides: Mapping[str, Any]) -> tuple[ZenFlowConfig, dict[str, Any] | None]:
    """Reads a config in any of its forms.

    Args:
        config: the source, never modified; None if all keys are keywords.
        overrides: keys of ``ZenFlowConfig`` given as keywords.

    Returns:
        The validated config, and a copy of the DeepSpeed config without its ``zenflow`` block, or None if the source has none.

    Raises:
        MisconfigurationException: a file cannot be read; a key is unknown or in the wrong place.
        ValueError: a value is not allowed.
    """
    # Wrong keywords are not the source's.
    given = ZenFlowConfig(**overrides)
    if config is None:
        return given, None
    if isinstance(config, ZenFlowConfig):
        return ZenFlowConfig(**{**config.model_dump(exclude_unset=True), **overrides}), None
    origin = str(config) if isinstance(config, str | os.PathLike) else "config"
    keys, deepspeed = _split(_read(config, origin), origin)
    try:
        return ZenFlowConfig(**{**keys, **overrides}), deepspeed
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None


def _read(config: Any, origin: str) -> dict[str, Any]:
    """The content of a source in plain containers of its own; interpolations are resolved."""
    content = config
    try:
        if isinstance(config, str | os.PathLike):
            if origin.lower().endswith(".json"):
                text = Path(config).read_text(encoding="utf-8")
                content = json.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
            else:
                content = OmegaConf.load(Path(config))
        elif isinstance(config, Mapping):
            # A DeepSpeed dict may hold objects without a node type in OmegaConf, such as a torch.dtype.
            content = OmegaConf.create(dict(config), flags={"allow_objects": True})
        if OmegaConf.is_config(content):
            content = OmegaConf.to_container(content, resolve=True, throw_on_missing=True)
    except Exception as error:
        raise MisconfigurationException(f"{origin}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise MisconfigurationException(
            f"{origin} must be a mapping, a ZenFlowConfig, or the path of a JSON or YAML file that holds a mapping, got {content!r}"
        )
    return content


def _split(content: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The keys for ``ZenFlowConfig`` and the DeepSpeed config, according to the form of `content`."""
    if any(section in content for section in _SECTIONS):
        check_keys(content, _SECTIONS, origin)
        zenflow, deepspeed = (_mapping(content.get(section), f"{origin}: {section}") for section in _SECTIONS)
        check_keys(zenflow, KEYS, f"{origin}, section zenflow")
    elif any(key in _DEEPSPEED_KEYS for key in content):
        zenflow, deepspeed = {}, content
    else:
        check_keys(content, (*KEYS, *_DEEPSPEED_KEYS), origin)
        return content, None
    for key in map(str, deepspeed):
        if key in KEYS:
            raise MisconfigurationException(
                f"{origin}: {key!r} is a key of ZenFlow; beside DeepSpeed's keys, move it into zero_optimization.zenflow, or use two"
                " sections, `zenflow:` and `deepspeed:`"
            )
        if key not in _DEEPSPEED_KEYS and (near := difflib.get_close_matches(key, _DEEPSPEED_KEYS, n=1, cutoff=0.9)):
            raise MisconfigurationException(
                f"{origin}: unknown key {key!r} (did you mean {near[0]!r}?), which DeepSpeed would ignore"
            )
    where = f"{origin}, zero_optimization.zenflow"
    zero_optimization = deepspeed.get("zero_optimization")
    # With this block, DeepSpeed would start its own ZenFlow.
    block = _mapping(zero_optimization.pop("zenflow", None) if isinstance(zero_optimization, dict) else None, where)
    # DeepSpeed's own result; all other keys of its ZenFlow are those of `ZenFlowConfig`.
    block.pop("steps_per_epoch", None)
    check_keys(block, KEYS, where)
    return {**block, **zenflow}, deepspeed or None


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise MisconfigurationException(f"{where} must be a mapping, got {value!r}")
    return value or {}


class Rule(NamedTuple):
    """What a key must be, if it is present; `path` is dotted."""

    path: str
    allows: Callable[[Any], bool]
    allowed: str
    reason: str = ""


def _only(path: str, required: object, reason: str) -> Rule:
    # 1 and 1.0 equal True.
    is_bool = isinstance(required, bool)
    return Rule(path, lambda v: v == required and isinstance(v, bool) == is_bool, f"{required!r} or absent", reason)


# Set by Lightning from its Trainer and its data loader, so that "auto" is allowed.
_SET_BY_LIGHTNING = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"
)  # fmt: skip

# Set by DeepSpeed if "auto".
_SET_BY_DEEPSPEED = ("data_types.keep_in_fp32_modules", "pipeline.stages")

_PARTITIONED = "ZenFlow works on ZeRO's partitioned gradients and optimizer states"
_NEEDS_STAGE_3 = "ZeRO stage 3 has parameters in host memory: set stage to 3"
_NOT_ON_DISK = "the worker writes parameters where they are, in host memory"

_RULES = (
    Rule("zero_optimization.stage", lambda stage: type(stage) is int and stage in (1, 2, 3), "1, 2 or 3", _PARTITIONED),
    _only("zero_optimization.contiguous_gradients", True, "gradients are taken from ZeRO's contiguous buckets"),
    _only("zero_optimization.parameter_alignment", False, "the worker needs no alignment"),
    _only("zero_optimization.compute_grad_norm", True, "the norm decides whether a step is applied"),
    _only("zero_optimization.elastic_checkpoint", False, "use DeepSpeed's universal checkpoints instead"),
    _only("zero_optimization.load_from_fp32_weights", True, "a checkpoint is continued from its master weights"),
    Rule("checkpoint.writer", lambda _: False, "absent", "ZenFlow's key async_checkpoints saves in the background"),
    Rule("zero_optimization.cpu_offload_param", lambda value: isinstance(value, bool), "true, false or absent"),
    Rule("zero_optimization.offload_param.device", lambda device: device in ("cpu", "none"), "'cpu' or 'none'", _NOT_ON_DISK),
    _only("managed_gradient_accumulation", True, "Lightning leaves the boundary to DeepSpeed"),
    _only("torch_autocast.enabled", False, "the Trainer's `precision` sets the data type"),
    *(_only(f"optimizer.params.{key}", value, "the worker's update has no other") for key, value in REQUIRED_OPTIONS.items()),
    _only("optimizer.params.fp32_optimizer_states", True, "ZenFlow's key moments_dtype decides"),
    _only("zero_optimization.zero_hpz_partition_size", 1, "a second copy of the weights would not get the worker's updates"),
    *(_only(f"zero_optimization.zero_quantized_{key}", False, "weights and gradients have the model's type")
      for key in ("weights", "nontrainable_weights", "gradients")),
    _only("zero_optimization.offload_optimizer.ratio", 1.0, "all states are in host memory"),
    _only("zero_optimization.offload_optimizer.super_offload", False, "it has an optimizer of its own"),
    _only("expert_parallel.enabled", False, "experts of AutoEP have groups of ranks of their own"),
    Rule("zero_optimization.offload_optimizer.device", lambda device: device in ("cpu", "none"), "'cpu'"),
    Rule("gradient_accumulation_steps", lambda steps: type(steps) is int and steps >= 1,
         "an integer >= 1 that equals the Trainer's accumulate_grad_batches"),
    Rule("gradient_clipping", lambda norm: type(norm) in (int, float) and 0 <= norm < math.inf,
         "a finite number >= 0 (0: off)"),
    Rule("optimizer.type", lambda name: isinstance(name, str) and name.lower() in ("adamw", "adam"), "'AdamW' or 'Adam'"),
    Rule("optimizer", lambda optimizer: "type" in optimizer, "a mapping with a type, 'AdamW' or 'Adam'"),
)  # fmt: skip

# Keywords of Lightning's `DeepSpeedStrategy`; it would ignore some of these.
_OPTION_RULES = (
    _only("zero_optimization", True, _PARTITIONED),
    _only("offload_optimizer_device", "cpu", "the states are in host memory"),
    Rule("offload_parameters", lambda value: isinstance(value, bool), "True, False or absent"),
    _only("offload_params_device", "cpu", _NOT_ON_DISK),
    _only("remote_device", None, "a model is made where its parameters are trained"),
    _only("load_full_weights", False, "a checkpoint in one file is known as such when it is loaded"),
)

# Those that are keys of a DeepSpeed config; the last two of ZeRO's are what `offload_parameters` is there.
_OPTIONS_OF = {
    "zero_optimization": ("stage", "sub_group_size", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter",
                          "allgather_bucket_size", "reduce_bucket_size", "offload_param", "cpu_offload_param"),
    "activation_checkpointing": ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
                                 "synchronize_checkpoint_boundary"),
    "fp16": ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
}  # fmt: skip

# Lightning takes any number and never ends a step with some. A negative norm would not clip.
_TRAINER_RULES = (
    Rule("accumulate_grad_batches", lambda batches: isinstance(batches, int) and batches >= 1, "an integer >= 1"),
    Rule("gradient_clip_val", lambda norm: norm >= 0, "a number >= 0"),
)


def prepare_deepspeed_config(
    config: Mapping[str, Any] | None,
    *,
    accumulate_grad_batches: int | None = None,
    gradient_clip_val: float | None = None,
    precision: str | None = None,
) -> dict[str, Any]:
    """A new DeepSpeed config with ZeRO stage 2 or 3, offload to the CPU and an optimizer without compiled kernels. Idempotent.

    Stage 1 becomes stage 2, whose class DeepSpeed has for both.

    Args:
        config: the user's, without ``zero_optimization.zenflow``, or Lightning's, made from keywords. It is not modified.
        accumulate_grad_batches: this and the others are the Trainer's, if known; the config must agree with them.
        gradient_clip_val: a norm.
        precision: such as "bf16-mixed".

    Raises:
        MisconfigurationException: ZenFlow does not support a setting; names the path of the key, its value and the allowed values.
    """
    result: dict[str, Any] = without(config or {}, None)
    if "bfloat16" in result:
        # The key's old name; DeepSpeed ignores it beside the new one.
        result.setdefault("bf16", result.pop("bfloat16"))
    for key in _SET_BY_LIGHTNING:
        if result.get(key) == "auto":
            del result[key]
    trainer = {"accumulate_grad_batches": accumulate_grad_batches, "gradient_clip_val": gradient_clip_val}
    _refuse(trainer, _TRAINER_RULES, "Trainer")
    _refuse(result, _rules(result, accumulate_grad_batches, gradient_clip_val, precision), "DeepSpeed config")
    if "train_batch_size" in result:
        # DeepSpeed asserts that it equals micro-batch x accumulation x ranks, all of which Lightning sets.
        value = result.pop("train_batch_size")
        rank_zero_info(f"DeepSpeed config: train_batch_size={value!r} is not used: the data loader sets the batch size")
    if accumulate_grad_batches is not None or result.get("gradient_accumulation_steps") == 1:
        result.pop("gradient_accumulation_steps", None)
    zero = result.setdefault("zero_optimization", {})
    assert "zenflow" not in zero, "resolve_config removes this block"
    offloads = offloads_parameters(result)
    # DeepSpeed refuses a deprecated key beside its successor.
    for old in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "offload_param"):
        zero.pop(old, None)
    # The worker's arena is page-locked instead; DeepSpeed's own host buffers stay small.
    zero.update(
        stage=3 if zero.get("stage") == 3 else 2,
        contiguous_gradients=True,
        offload_optimizer={"device": "cpu", "pin_memory": False},
    )
    if offloads:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if "optimizer" in result:
        _prepare_optimizer(result["optimizer"])
    # The worker replaces the torch optimizer from configure_optimizers; DeepSpeed would ask for its own class.
    result["zero_force_ds_cpu_optimizer"] = False
    result.setdefault("zero_allow_untested_optimizer", True)
    # DeepSpeed's throughput log would synchronise with the device twice a step.
    result.setdefault("timers", {}).setdefault("throughput", {}).setdefault("synchronized", False)
    return result


def offloads_parameters(config: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed config keeps the parameters in host memory."""
    values = _flat(config)
    by_old_name = values.get("zero_optimization.cpu_offload_param") is True
    return by_old_name or values.get("zero_optimization.offload_param.device") == "cpu"


def apply_options(options: Mapping[str, Any], config: dict[str, Any] | None) -> None:
    """Writes keywords of Lightning's strategy into the user's DeepSpeed config, if there is one: Lightning does not read them beside it.

    Raises:
        MisconfigurationException: a keyword asks for another place of states or parameters.
    """
    _refuse(options, _OPTION_RULES, "ZenFlowStrategy")
    given = zero = {key: value for key, value in options.items() if value is not None}
    if config is not None:
        if "offload_parameters" in given:
            place = {"device": "cpu" if given["offload_parameters"] else "none"}
            given |= {"offload_param": place, "cpu_offload_param": None}
        for section, keys in _OPTIONS_OF.items():
            of_section = {key: given[key] for key in keys if key in given}
            # Lightning makes the one of fp16, and reads the keywords then.
            if of_section and (config.get(section) or section != "fp16"):
                config[section] = {**_mapping(config.get(section), f"DeepSpeed config: {section}"), **of_section}
        zero = config.get("zero_optimization") or {}
    if given.get("offload_parameters") and zero.get("stage") != 3:
        _refuse(given, [_only("offload_parameters", False, _NEEDS_STAGE_3)], "ZenFlowStrategy")


def set_bucket_size(config: dict[str, Any], model: Module) -> None:
    """Sets `zero_optimization.reduce_bucket_size` to suit a model."""
    trained = sum(whole_shape(p).numel() for p in model.parameters() if p.requires_grad)
    config["zero_optimization"]["reduce_bucket_size"] = bucket_size(trained)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All values by their dotted paths, mappings included."""
    flat = {}
    for key, value in config.items():
        flat[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
    return flat


def without(config: Any, dropped: str | None) -> Any:
    """A deep copy in which no key has the value `dropped`. A key with null is absent, as YAML means it: Lightning and DeepSpeed read some
    of them otherwise.
    """
    if not isinstance(config, Mapping):
        return copy.deepcopy(config)
    is_dropped = {key: isinstance(value, type(dropped)) and value == dropped for key, value in config.items()}
    return {key: without(value, dropped) for key, value in config.items() if not is_dropped[key]}


def _refuse(config: Mapping[str, Any], rules: Iterable[Rule], where: str) -> None:
    values = _flat(config)
    for path, allows, allowed, reason in rules:
        section, _, _ = path.rpartition(".")
        if not isinstance(values.get(section, {}), Mapping):
            raise MisconfigurationException(f"{where}: {section} must be a mapping, got {values[section]!r}")
        value = values.get(path)
        if value is not None and not allows(value):
            because = f": {reason}" if reason else ""
            raise MisconfigurationException(f"{where}: {path} must be {allowed}, got {value!r}{because}")


def _rules(
    config: Mapping[str, Any], accumulate: int | None, clip: float | None, precision: str | None
) -> Iterator[Rule]:
    """`_RULES`, and those that depend on other keys and on the Trainer."""
    yield from _RULES
    values = _flat(config)
    if values.get("zero_optimization.stage") != 3:
        yield _only("zero_optimization.cpu_offload_param", False, _NEEDS_STAGE_3)
        yield _only("zero_optimization.offload_param.device", "none", _NEEDS_STAGE_3)
    if accumulate is not None:
        # 1 is DeepSpeed's default, so it may not have been chosen.
        allowed = f"an integer >= 1 that equals the Trainer's accumulate_grad_batches ({accumulate})"
        yield Rule("gradient_accumulation_steps", lambda steps: steps in (1, accumulate), allowed)
    if clip is not None:
        allowed = f"the Trainer's gradient_clip_val ({clip}) or absent"
        yield Rule("gradient_clipping", lambda norm: norm == clip, allowed)
    if values.get("zero_optimization.reduce_scatter") is not False:
        for path, value in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            yield _only(path, value, "other values need zero_optimization.reduce_scatter false")
    for path, value in values.items():
        if isinstance(value, str) and value == "auto" and path not in _SET_BY_DEEPSPEED:
            allowed = f"a value (Lightning replaces 'auto' only in {', '.join(_SET_BY_LIGHTNING)})"
            yield Rule(path, lambda _: False, allowed)
    if precision is None:
        return
    for key, of_trainer in (("fp16", "16"), ("bf16", "bf16")):
        # Lightning's plugins convert the inputs, DeepSpeed the weights.
        wanted = precision.partition("-")[0] == of_trainer
        instead = f"`Trainer(precision='{'32-true' if wanted else f'{of_trainer}-mixed'}')`"
        yield _only(f"{key}.enabled", wanted, f"the Trainer's precision is {precision!r}; or set {instead}")


def _prepare_optimizer(optimizer: dict[str, Any]) -> None:
    """Makes DeepSpeed build torch's class instead of its own, with DeepSpeed's defaults.

    As before, "AdamW" means decoupled weight decay, and so does "Adam" unless ``adam_w_mode`` is false
    (``engine.get_optimizer_configuration``).
    """
    params = optimizer.setdefault("params", {})
    if not params.get("torch_adam", False):
        # DeepSpeed's optimizers default to no decay, torch's AdamW to 0.01.
        params.setdefault("weight_decay", 0.0)
    for key in ("bias_correction", "fp32_optimizer_states"):
        params.pop(key, None)
    params["torch_adam"] = True
