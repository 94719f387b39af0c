"""What a user gives a strategy: keys of ZenFlow and a DeepSpeed configuration, from a source (`config=`) and from keywords. The DeepSpeed
configuration under ZenFlow: unsupported settings are refused, and those that the engine needs are set. Written against DeepSpeed 0.19.8.

A source is a JSON file, an OmegaConf YAML file, a dict, a ``DictConfig`` or a ``ZenFlowConfig``. Each but the last has keys of
``ZenFlowConfig`` alone, or is a DeepSpeed config, recognised by its keys, perhaps with ``zero_optimization.zenflow``. Keywords go first.

The rules are for settings with which the training would be another one without a word; what DeepSpeed refuses is not validated here.
"""

import copy
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import lightning.pytorch as pl
import torch
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from omegaconf import DictConfig, OmegaConf
from torch.nn import Module

from lightning_zenflow.config import KEYS, ZenFlowConfig, check_keys
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.schedule import bucket_size
from lightning_zenflow.deepspeed.users_module import whole_shape
from lightning_zenflow.deepspeed.users_objects import REQUIRED_OPTIONS

ConfigSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | DictConfig | ZenFlowConfig | None

# One of these makes a config DeepSpeed's, and most have several.
_DEEPSPEED_KEYS = (
    "zero_optimization", "optimizer", "scheduler", "bf16", "bfloat16", "fp16", "data_types", "gradient_clipping",
    "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "communication_data_type", "activation_checkpointing",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user has given a strategy."""

    zenflow: ZenFlowConfig
    """Without what a training changes (`of_one_training`)."""
    deepspeed: dict[str, Any] | None
    """The DeepSpeed configuration, if there is one, without keys of ZenFlow."""
    chooses_buckets: bool
    """Whether the size of DeepSpeed's buckets is chosen for the model."""

    def config_under(self, config: Mapping[str, Any], trainer: pl.Trainer, precision: str) -> dict[str, Any]:
        """`prepare_deepspeed_config` with the Trainer's values; logs that there is no clipping where plain DeepSpeed clips."""
        users = self.deepspeed
        if users is not None and users.get("gradient_clipping") is None and trainer.gradient_clip_val is None:
            rank_zero_info(
                "ZenFlowStrategy does not clip, as nothing sets a norm. Plain DeepSpeed since 0.19.3 clips by a norm of 1.0 then:"
                " set gradient_clipping to 1.0 for the same, to 0 for none"
            )
        # DeepSpeed's throughput log alone reads it. Lightning asks for the training data once more, which not all loaders have.
        return prepare_deepspeed_config(
            {"train_micro_batch_size_per_gpu": 1, **config},
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            gradient_clip_val=trainer.gradient_clip_val,
            precision=precision,
        )


def read_settings(config: ConfigSource, options: Mapping[str, Any], lightnings: type[Any], **keys: Any) -> Settings:
    """Reads and checks the arguments of a strategy: `options` of Lightning's class `lightnings`, `keys` of `ZenFlowConfig` (None: absent),
    and the source of those that are absent, by default the environment variable by which Lightning takes a DeepSpeed configuration.
    """
    if config is None:
        config = os.environ.get(lightnings.DEEPSPEED_ENV_VAR)
    check_keys(options, (*KEYS, *inspect.signature(lightnings).parameters), "ZenFlowStrategy")
    zenflow, deepspeed = resolve_config(config, {key: value for key, value in keys.items() if value is not None})
    _refuse(options, _OPTION_RULES, "ZenFlowStrategy")
    if deepspeed is not None:
        instead = "beside a DeepSpeed config (of `config` or of PL_DEEPSPEED_CONFIG_PATH) write the setting into it"
        _refuse(options, (_only(k, None, instead) for k in options if k not in _BESIDE_CONFIG), "ZenFlowStrategy")
    if offloads_parameters(deepspeed or {}) or options.get("offload_parameters"):
        if unused := zenflow.without_effect_on_host:
            rank_zero_info(
                f"ZenFlow: {', '.join(unused)} has no effect with parameters in host memory: nothing is late"
            )
        zenflow = zenflow.with_weights_on_host()
    buckets = _flat(deepspeed or {}).get("zero_optimization.reduce_bucket_size", options.get("reduce_bucket_size"))
    return Settings(zenflow=zenflow, deepspeed=deepspeed, chooses_buckets=buckets in (None, "auto"))


def of_one_training(config: ZenFlowConfig) -> ZenFlowConfig:
    """The configuration of a training. Runs must repeat where the user asks torch for it; `Trainer(deterministic=...)` does as well."""
    # Measured memory changes no bit.
    if not (config.depends_on_measurements and torch.are_deterministic_algorithms_enabled()):
        return config
    fixed = config.without_measurements()
    rank_zero_info(
        f"ZenFlow: torch's deterministic algorithms are on, so that runs must repeat: update_interval={fixed.update_interval},"
        f" publish_lag={fixed.publish_lag}, offload_ratio={fixed.offload_ratio}, and no measured time changes them. If steps wait for the"
        " CPU, set others"
    )
    return fixed


def resolve_config(config: ConfigSource, overrides: Mapping[str, Any]) -> tuple[ZenFlowConfig, dict[str, Any] | None]:
    """Reads a source of `read_settings`, which stays as it is; `overrides` are keys of ``ZenFlowConfig`` given as keywords. Returns the
    validated config, and a copy of the DeepSpeed config without its ``zenflow`` block, or None if the source has none.
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
    if not any(key in _DEEPSPEED_KEYS for key in content):
        check_keys(content, KEYS, origin)
        return content, None
    for key in ("zenflow", *KEYS):
        if key in content:
            raise MisconfigurationException(
                f"{origin}: {key} must be absent beside keys of DeepSpeed, got {content[key]!r}: write it into zero_optimization.zenflow"
            )
    zero = content.get("zero_optimization")
    # With this block, DeepSpeed would start its own ZenFlow.
    block = zero.pop("zenflow", None) if isinstance(zero, dict) else None
    where = f"{origin}, zero_optimization.zenflow"
    if not isinstance(block, dict | None):
        raise MisconfigurationException(f"{where} must be a mapping, got {block!r}")
    # DeepSpeed's own result; all other keys of its ZenFlow are those of `ZenFlowConfig`.
    keys = {key: value for key, value in (block or {}).items() if key != "steps_per_epoch"}
    check_keys(keys, KEYS, where)
    # DeepSpeed's key for the same share, under stage 3 only.
    ratio = _flat(content).get("zero_optimization.offload_optimizer.ratio")
    if ratio is not None and keys.setdefault("offload_ratio", ratio) != ratio:
        raise MisconfigurationException(
            f"{origin}: zero_optimization.offload_optimizer.ratio must be absent beside zero_optimization.zenflow.offload_ratio,"
            f" got {ratio!r} and {keys['offload_ratio']!r}"
        )
    return keys, content


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


_PARTITIONED = "ZenFlow works on ZeRO's partitioned gradients and optimizer states"
_NEEDS_STAGE_3 = "ZeRO stage 3 has parameters in host memory: set stage to 3"
_NOT_ON_DISK = "the worker writes parameters where they are, in host memory"

_RULES = (
    Rule("zero_optimization.stage", lambda stage: type(stage) is int and stage in (1, 2, 3), "1, 2 or 3", _PARTITIONED),
    _only("zero_optimization.parameter_alignment", False, "the worker needs no alignment"),
    _only("zero_optimization.compute_grad_norm", True, "the norm decides whether a step is applied"),
    _only("zero_optimization.elastic_checkpoint", False, "use DeepSpeed's universal checkpoints instead"),
    _only("zero_optimization.load_from_fp32_weights", True, "a checkpoint is continued from its master weights"),
    Rule("checkpoint.writer", lambda _: False, "absent", "ZenFlow's key async_checkpoints saves in the background"),
    Rule("zero_optimization.offload_param.device", lambda device: device in ("cpu", "none"), "'cpu' or 'none'", _NOT_ON_DISK),
    _only("managed_gradient_accumulation", True, "Lightning leaves the boundary to DeepSpeed"),
    _only("torch_autocast.enabled", False, "the Trainer's `precision` sets the data type"),
    *(_only(f"optimizer.params.{key}", value, "the worker's update has no other") for key, value in REQUIRED_OPTIONS.items()),
    _only("zero_optimization.zero_hpz_partition_size", 1, "a second copy of the weights would not get the worker's updates"),
    *(_only(f"zero_optimization.zero_quantized_{key}", False, "weights and gradients have the model's type")
      for key in ("weights", "nontrainable_weights", "gradients")),
    _only("expert_parallel.enabled", False, "experts of AutoEP have groups of ranks of their own"),
    Rule("zero_optimization.offload_optimizer.device", lambda device: device in ("cpu", "none"), "'cpu'"),
    Rule("gradient_clipping", lambda norm: type(norm) in (int, float) and 0 <= norm < math.inf,
         "a finite number >= 0 (0: off)"),
    Rule("optimizer.type", lambda name: str(name).lower() in ("adamw", "adam"), "'AdamW' or 'Adam'"),
)  # fmt: skip

# Keywords of Lightning's `DeepSpeedStrategy`; it would ignore some of these.
_OPTION_RULES = (
    _only("zero_optimization", True, _PARTITIONED),
    _only("offload_optimizer_device", "cpu", "the states are in host memory"),
    _only("offload_params_device", "cpu", _NOT_ON_DISK),
    _only("remote_device", None, "a model is made where its parameters are trained"),
)

# Those that Lightning reads beside a DeepSpeed config; all others are keys of one.
_BESIDE_CONFIG = (
    "accelerator", "parallel_devices", "cluster_environment", "precision", "precision_plugin", "process_group_backend", "timeout",
    "logging_level", "remote_device", "load_full_weights", "exclude_frozen_parameters",
)  # fmt: skip

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

    Stage 1 becomes stage 2, whose class DeepSpeed has for both. `config` is the user's, without ``zero_optimization.zenflow``, or
    Lightning's, made from keywords; it is not modified, and must agree with the Trainer's values, if these are known.
    """
    result: dict[str, Any] = without(config or {}, None)
    if "bfloat16" in result:
        # The key's old name; DeepSpeed ignores it beside the new one.
        result.setdefault("bf16", result.pop("bfloat16"))
    # Set by Lightning from its Trainer and its data loader.
    of_trainer = {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    }
    result = {key: value for key, value in result.items() if key not in of_trainer or value != "auto"}
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
        # Torch's class instead of DeepSpeed's own, whose optimizers default to no decay, torch's AdamW to 0.01.
        params = result["optimizer"].setdefault("params", {})
        if not params.get("torch_adam", False):
            params.setdefault("weight_decay", 0.0)
        for key in ("bias_correction", "fp32_optimizer_states"):
            params.pop(key, None)
        params["torch_adam"] = True
    # The worker replaces the torch optimizer from configure_optimizers; DeepSpeed would ask for its own class.
    result["zero_force_ds_cpu_optimizer"] = False
    result.setdefault("zero_allow_untested_optimizer", True)
    # DeepSpeed's throughput log would synchronise with the device twice a step.
    result.setdefault("timers", {}).setdefault("throughput", {}).setdefault("synchronized", False)
    return result


def offloads_parameters(config: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed config keeps the parameters in host memory."""
    values = _flat(config)
    by_old_name = bool(values.get("zero_optimization.cpu_offload_param"))
    return by_old_name or values.get("zero_optimization.offload_param.device") == "cpu"


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
    """A deep copy without keys of the value `dropped`: for null as YAML means it, which Lightning and DeepSpeed read otherwise."""
    if not isinstance(config, Mapping):
        return copy.deepcopy(config)
    return {key: without(value, dropped) for key, value in config.items() if value != dropped}


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
    for path, value in values.items():
        # DeepSpeed drops it elsewhere, or refuses it.
        if value == "auto" and path.startswith(("optimizer.", "scheduler.")):
            yield Rule(path, lambda _: False, "a value, which Lightning does not choose")
    if precision is None:
        return
    for key, of_trainer in (("fp16", "16"), ("bf16", "bf16")):
        # Lightning's plugins convert the inputs, DeepSpeed the weights.
        wanted = precision.partition("-")[0] == of_trainer
        instead = f"`Trainer(precision='{'32-true' if wanted else f'{of_trainer}-mixed'}')`"
        yield _only(f"{key}.enabled", wanted, f"the Trainer's precision is {precision!r}; or set {instead}")
