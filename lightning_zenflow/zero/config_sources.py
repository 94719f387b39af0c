"""From whatever the user passes as ``config=`` to a validated ``ZenFlowConfig`` and a DeepSpeed config.

Sources: a DeepSpeed JSON file, an OmegaConf YAML file, a dict, a ``DictConfig`` or a ``ZenFlowConfig``. But for the
last, each may hold one of three forms:

- flat: keys of ``ZenFlowConfig``;
- sections: ``zenflow:`` with keys of ``ZenFlowConfig`` and ``deepspeed:`` with a DeepSpeed config;
- a DeepSpeed config, recognised by its keys, whose optional ``zero_optimization.zenflow`` block has the keys of
  DeepSpeed's own ZenFlow.

Where a key is given more than once, keywords win over the ``zenflow:`` section, that over the
``zero_optimization.zenflow`` block, and that over the default.
"""

import copy
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_zenflow.config import ConfigValueError, ZenFlowConfig, default_value, unknown_key_message, zenflow_keys

ConfigSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | DictConfig | ZenFlowConfig | None

_SECTIONS = ("zenflow", "deepspeed")

# Top-level keys that DeepSpeed 0.19 reads (deepspeed/runtime/config.py and the modules it calls) or names as removed.
# DeepSpeed ignores others, so the list tells forms apart and is not used to refuse a key of a DeepSpeed config.
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

# The keys of DeepSpeed's own ZenFlow (deepspeed/runtime/zenflow/zenflow_config.py); all but the last are keys of ours.
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
    """Read a config in any of its forms.

    Args:
        config: the source, never modified; None where there are only keywords.
        overrides: keys of ``ZenFlowConfig`` that the user gave as keywords.

    Returns:
        The validated config, and a deep copy of the DeepSpeed config without its ``zenflow`` block, or None where the
        source has none.

    Raises:
        MisconfigurationException: a file is missing, of an unknown kind or malformed; a key is unknown or in the wrong
            place.
        ValueError: a value is not allowed; the message names key, value and what is allowed.
    """
    _check_keys(overrides, zenflow_keys(), "keyword arguments")
    if config is None:
        return ZenFlowConfig(**overrides), None
    if isinstance(config, ZenFlowConfig):
        return dataclasses.replace(config, **overrides), None

    origin, content = _read(config)
    zenflow, deepspeed = _split(content, origin)
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
    """The source's name for messages and its content as plain containers that belong to the caller."""
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        return str(path), _read_file(path)
    if isinstance(config, DictConfig):
        return "config", _to_plain(config, "config")
    if isinstance(config, Mapping):
        # Objects that OmegaConf has no node for may be in a DeepSpeed dict; they pass through.
        return "config", _to_plain(
            OmegaConf.create(copy.deepcopy(dict(config)), flags={"allow_objects": True}), "config"
        )
    raise MisconfigurationException(
        f"config={config!r}: allowed is the path of a DeepSpeed JSON or an OmegaConf YAML file, a dict, a DictConfig or a "
        "ZenFlowConfig"
    )


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix.lower() not in (".json", ".yaml", ".yml"):
        raise MisconfigurationException(
            f"config={str(path)!r}: allowed is a file named *.json (DeepSpeed), *.yaml or *.yml (OmegaConf)"
        )
    if not path.is_file():
        raise MisconfigurationException(f"config={str(path)!r}: there is no such file")
    try:
        if path.suffix.lower() == ".json":
            content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
        else:
            content = OmegaConf.load(path)
    except (ValueError, OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        # OmegaConf reports a file that holds a bare number as an OSError.
        raise MisconfigurationException(f"{path}: cannot be read as {path.suffix[1:].upper()}: {error}") from error
    if isinstance(content, DictConfig):
        return _to_plain(content, str(path))
    if not isinstance(content, dict):
        raise MisconfigurationException(
            f"{path}: allowed is a mapping of keys to values at the top, not a {type(content).__name__}"
        )
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    duplicates = sorted({key for key in keys if keys.count(key) > 1})
    if duplicates:
        raise ValueError(f"the key {duplicates[0]!r} is there twice")
    return dict(pairs)


def _to_plain(config: Any, origin: str) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise MisconfigurationException(f"{origin}: {error}") from error
    if not isinstance(plain, dict):
        raise MisconfigurationException(f"{origin}: allowed is a mapping of keys to values at the top, not {plain!r}")
    return {str(key): value for key, value in plain.items()}


def _split(content: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The keys for ``ZenFlowConfig`` and the DeepSpeed config, by the form that `content` has."""
    if any(section in content for section in _SECTIONS):
        misplaced = [key for key in content if key in _DEEPSPEED_KEYS]
        if misplaced:
            raise MisconfigurationException(
                f"{origin}: {misplaced[0]!r} is DeepSpeed's: beside a section `zenflow:` it belongs in `deepspeed:`; without "
                "sections, ZenFlow's keys belong in zero_optimization.zenflow"
            )
        _check_keys(content, _SECTIONS, origin)
        zenflow = _section(content, "zenflow", origin) or {}
        _check_keys(zenflow, zenflow_keys(), f"{origin}, section zenflow")
        return zenflow, _section(content, "deepspeed", origin)
    if any(key in _DEEPSPEED_KEYS for key in content):
        misplaced = [key for key in content if key in zenflow_keys()]
        if misplaced:
            raise MisconfigurationException(
                f"{origin}: {misplaced[0]!r} is ZenFlow's: beside DeepSpeed's keys it belongs in zero_optimization.zenflow, or "
                "there are two sections, `zenflow:` and `deepspeed:`"
            )
        return {}, content
    for key in content:
        if key not in zenflow_keys():
            raise MisconfigurationException(
                unknown_key_message(origin, key, (*zenflow_keys(), *sorted(_DEEPSPEED_KEYS)))
            )
    return content, None


def _section(content: dict[str, Any], name: str, origin: str) -> dict[str, Any] | None:
    section = content.get(name)
    if section is not None and not isinstance(section, dict):
        raise MisconfigurationException(f"{origin}: {name}={section!r}: allowed is a mapping of keys to values")
    return section


def _check_keys(keys: Iterable[object], known: tuple[str, ...], where: str) -> None:
    for key in keys:
        if key not in known:
            raise MisconfigurationException(unknown_key_message(where, key, known))


def _take_zenflow_block(deepspeed: dict[str, Any], origin: str) -> dict[str, Any]:
    """Remove and return ``zero_optimization.zenflow``; if it stayed, DeepSpeed would start its own ZenFlow."""
    zero_optimization = deepspeed.get("zero_optimization")
    if not isinstance(zero_optimization, dict):
        return {}
    block = zero_optimization.pop("zenflow", None)
    if block is None:
        return {}
    where = f"{origin}, zero_optimization.zenflow"
    if not isinstance(block, dict):
        raise MisconfigurationException(f"{where}={block!r}: allowed is a mapping of keys to values")
    _check_keys(block, _DEEPSPEED_ZENFLOW_KEYS, where)
    return block


def _from_deepspeed_zenflow(block: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a ``zero_optimization.zenflow`` block for ``ZenFlowConfig``, so that a file written for DeepSpeed
    works unchanged.

    Keys in `given` win over the block and are left out.
    """
    values = {key: value for key, value in block.items() if key != "steps_per_epoch" and key not in given}
    interval = values.get("update_interval")
    if isinstance(interval, int) and "max_update_interval" not in given:
        # DeepSpeed has no such bound, hence no key by which its file could lift it.
        values["max_update_interval"] = max(interval, default_value("max_update_interval"))
    return values
