"""Reads the ``config=`` argument in any of its forms: the result is a validated ``ZenFlowConfig`` and a DeepSpeed config.

Sources are a DeepSpeed JSON file, an OmegaConf YAML file, a dict, a ``DictConfig`` or a ``ZenFlowConfig``. Each but the last has one of
three forms:

- flat: keys of ``ZenFlowConfig``;
- sections: ``zenflow:`` with keys of ``ZenFlowConfig`` and ``deepspeed:`` with a DeepSpeed config;
- a DeepSpeed config, recognised by its keys, with or without a ``zero_optimization.zenflow`` block in the keys of DeepSpeed's own ZenFlow.

Precedence: keywords, the ``zenflow:`` section, the ``zero_optimization.zenflow`` block, the defaults.
"""

import copy
import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_zenflow.config import KEYS, ConfigValueError, ZenFlowConfig, check_keys

ConfigSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | DictConfig | ZenFlowConfig | None

_SECTIONS = ("zenflow", "deepspeed")

# Top-level keys that DeepSpeed 0.19 reads (deepspeed/runtime/config.py and the modules it calls) or reports as removed. They distinguish
# the forms; other keys of a DeepSpeed config are ignored, as by DeepSpeed, unless they are nearly one of these.
_DEEPSPEED_KEYS = frozenset({
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency",
    "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "disable_python_gc", "dump_state", "eigenvalue",
    "elasticity", "expert_parallel", "flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op",
    "gradient_clipping", "gradient_predivide_factor", "graph_harvesting", "hybrid_engine", "log_level",
    "managed_gradient_accumulation", "memory_breakdown", "nebula", "optimizer", "pipeline", "prescale_gradients",
    "progressive_layer_drop", "quantize_training", "scheduler", "seq_parallel_communication_data_type", "sequence_parallel_size",
    "sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast",
    "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size",
    "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
})  # fmt: skip

# The keys of DeepSpeed's own ZenFlow (deepspeed/runtime/zenflow/zenflow_config.py). All but the last are keys of `ZenFlowConfig`.
_DEEPSPEED_ZENFLOW_KEYS = (
    "topk_ratio",
    "select_strategy",
    "select_interval",
    "update_interval",
    "full_warm_up_rounds",
    "overlap_step",
    "offload",
    "auto_ratio",
    "pt_reserved_cores_perc",
    "steps_per_epoch",
)


def resolve_config(config: ConfigSource, overrides: Mapping[str, Any]) -> tuple[ZenFlowConfig, dict[str, Any] | None]:
    """Reads a config in any of its forms.

    Args:
        config: the source, never modified; None if all keys are keywords.
        overrides: keys of ``ZenFlowConfig`` given as keywords.

    Returns:
        The validated config, and a deep copy of the DeepSpeed config without its ``zenflow`` block, or None if the source has none.

    Raises:
        MisconfigurationException: a file is missing, of an unknown type or malformed; a key is unknown or in the wrong place.
        ConfigValueError: a value is not allowed.
    """
    check_keys(overrides, KEYS, "keyword arguments")
    if config is None:
        return ZenFlowConfig(**overrides), None
    if isinstance(config, ZenFlowConfig):
        return dataclasses.replace(config, **overrides), None

    origin, content = _read(config)
    zenflow, deepspeed = _split(content, origin)
    if deepspeed is not None:
        _refuse_misspelled(deepspeed, origin)
    block = _take_zenflow_block(deepspeed, origin) if deepspeed is not None else {}
    given = {**zenflow, **overrides}
    values = {**_from_deepspeed_zenflow(block, given), **given}
    try:
        return ZenFlowConfig.from_mapping(values), deepspeed
    except ConfigValueError as error:
        if error.key in overrides:
            raise
        raise ConfigValueError(f"{origin}: {error}", error.key) from None


def _read(config: str | os.PathLike[str] | Mapping[str, Any] | DictConfig) -> tuple[str, dict[str, Any]]:
    """The name of the source in errors, and its content in plain containers owned by the caller."""
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        return str(path), _read_file(path)
    if isinstance(config, DictConfig):
        return "config", _to_plain(config, "config")
    if isinstance(config, Mapping):
        # A DeepSpeed dict may hold objects without a node type in OmegaConf, such as a torch.dtype.
        return "config", _to_plain(
            OmegaConf.create(copy.deepcopy(dict(config)), flags={"allow_objects": True}), "config"
        )
    raise MisconfigurationException(
        "config must be the path of a DeepSpeed JSON file or an OmegaConf YAML file, a dict, a DictConfig or a ZenFlowConfig, got"
        f" {config!r}"
    )


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix.lower() not in (".json", ".yaml", ".yml"):
        raise MisconfigurationException(
            f"config must be a file named *.json (DeepSpeed), *.yaml or *.yml (OmegaConf), got {str(path)!r}"
        )
    if not path.is_file():
        raise MisconfigurationException(f"config must be an existing file, got {str(path)!r}")
    try:
        if path.suffix.lower() == ".json":
            content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
        else:
            content = OmegaConf.load(path)
    except (ValueError, OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        # OmegaConf raises OSError for a file that holds a single number.
        raise MisconfigurationException(f"{path}: cannot be read as {path.suffix[1:].upper()}: {error}") from error
    if isinstance(content, DictConfig):
        return _to_plain(content, str(path))
    if not isinstance(content, dict):
        raise MisconfigurationException(f"{path}: the top level must be a mapping, got a {type(content).__name__}")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    duplicates = sorted({key for key in keys if keys.count(key) > 1})
    if duplicates:
        raise ValueError(f"duplicate key {duplicates[0]!r}")
    return dict(pairs)


def _to_plain(config: Any, origin: str) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise MisconfigurationException(f"{origin}: {error}") from error
    if not isinstance(plain, dict):
        raise MisconfigurationException(f"{origin}: the top level must be a mapping, got {plain!r}")
    return {str(key): value for key, value in plain.items()}


def _split(content: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The keys for ``ZenFlowConfig`` and the DeepSpeed config, according to the form of `content`."""
    if any(section in content for section in _SECTIONS):
        misplaced = [key for key in content if key in _DEEPSPEED_KEYS]
        if misplaced:
            raise MisconfigurationException(
                f"{origin}: {misplaced[0]!r} is a key of DeepSpeed; move it into the section `deepspeed:`, or drop the sections and"
                " move ZenFlow's keys into zero_optimization.zenflow"
            )
        check_keys(content, _SECTIONS, origin)
        zenflow = _section(content, "zenflow", origin) or {}
        check_keys(zenflow, KEYS, f"{origin}, section zenflow")
        return zenflow, _section(content, "deepspeed", origin)
    if any(key in _DEEPSPEED_KEYS for key in content):
        misplaced = [key for key in content if key in KEYS]
        if misplaced:
            raise MisconfigurationException(
                f"{origin}: {misplaced[0]!r} is a key of ZenFlow; beside DeepSpeed's keys, move it into zero_optimization.zenflow, or use"
                " two sections, `zenflow:` and `deepspeed:`"
            )
        return {}, content
    check_keys(content, (*KEYS, *sorted(_DEEPSPEED_KEYS)), origin)
    return content, None


def _refuse_misspelled(deepspeed: Mapping[str, Any], origin: str) -> None:
    for key in deepspeed.keys() - _DEEPSPEED_KEYS:
        near = difflib.get_close_matches(key, _DEEPSPEED_KEYS, n=1, cutoff=0.9)
        if near:
            raise MisconfigurationException(
                f"{origin}: unknown key {key!r} (did you mean {near[0]!r}?), which DeepSpeed would ignore"
            )


def _section(content: dict[str, Any], name: str, origin: str) -> dict[str, Any] | None:
    section = content.get(name)
    if section is not None and not isinstance(section, dict):
        raise MisconfigurationException(f"{origin}: {name} must be a mapping, got {section!r}")
    return section


def _take_zenflow_block(deepspeed: dict[str, Any], origin: str) -> dict[str, Any]:
    """Removes and returns ``zero_optimization.zenflow``, with which DeepSpeed would start its own ZenFlow."""
    zero_optimization = deepspeed.get("zero_optimization")
    if not isinstance(zero_optimization, dict):
        return {}
    block = zero_optimization.pop("zenflow", None)
    if block is None:
        return {}
    where = f"{origin}, zero_optimization.zenflow"
    if not isinstance(block, dict):
        raise MisconfigurationException(f"{where} must be a mapping, got {block!r}")
    check_keys(block, _DEEPSPEED_ZENFLOW_KEYS, where)
    return block


def _from_deepspeed_zenflow(block: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Translates a ``zero_optimization.zenflow`` block, as written for DeepSpeed, for ``ZenFlowConfig``.

    Args:
        block: the block.
        given: keys that override it; they are left out of the result.
    """
    values = {key: value for key, value in block.items() if key != "steps_per_epoch" and key not in given}
    interval = values.get("update_interval")
    if isinstance(interval, int) and "max_update_interval" not in given:
        # DeepSpeed has no such bound, and its file no key to raise it.
        values["max_update_interval"] = max(interval, KEYS["max_update_interval"].default)
    return values
