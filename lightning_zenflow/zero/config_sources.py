"""Reads the ``config=`` argument in any of its forms: the result is a validated ``ZenFlowConfig`` and a DeepSpeed config.

Sources are a DeepSpeed JSON file, an OmegaConf YAML file, a dict, a ``DictConfig`` or a ``ZenFlowConfig``. Each but the last has one of
three forms:

- flat: keys of ``ZenFlowConfig``;
- sections: ``zenflow:`` with keys of ``ZenFlowConfig`` and ``deepspeed:`` with a DeepSpeed config;
- a DeepSpeed config, recognised by its keys, with or without a ``zero_optimization.zenflow`` block in the keys of DeepSpeed's own ZenFlow.

Precedence: keywords, the ``zenflow:`` section, the ``zero_optimization.zenflow`` block, the defaults.
"""

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig as DeepSpeedZenFlowConfig
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_zenflow.config import KEYS, ZenFlowConfig, check_keys

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


def resolve_config(config: ConfigSource, overrides: Mapping[str, Any]) -> tuple[ZenFlowConfig, dict[str, Any] | None]:
    """Reads a config in any of its forms.

    Args:
        config: the source, never modified; None if all keys are keywords.
        overrides: keys of ``ZenFlowConfig`` given as keywords.

    Returns:
        The validated config, and a copy of the DeepSpeed config without its ``zenflow`` block, or None if the source has none.

    Raises:
        MisconfigurationException: a file is missing, of an unknown type or malformed; a key is unknown or in the wrong place.
        ValueError: a value is not allowed.
    """
    # Wrong keywords are not the source's.
    given = ZenFlowConfig(**overrides)
    if config is None:
        return given, None
    if isinstance(config, ZenFlowConfig):
        return config.replace(**overrides), None
    origin = str(config) if isinstance(config, str | os.PathLike) else "config"
    zenflow, deepspeed = _split(_read(config, origin), origin)
    values = {**_take_zenflow_block(deepspeed or {}, origin), **zenflow, **overrides}
    try:
        return ZenFlowConfig(**values), deepspeed
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None


def _read(config: str | os.PathLike[str] | Mapping[str, Any] | DictConfig, origin: str) -> dict[str, Any]:
    """The content of a source in plain containers of its own; interpolations are resolved."""
    content: Any
    try:
        if isinstance(config, str | os.PathLike):
            content = _read_file(Path(config))
        elif isinstance(config, DictConfig):
            content = config
        elif isinstance(config, Mapping):
            # A DeepSpeed dict may hold objects without a node type in OmegaConf, such as a torch.dtype.
            content = OmegaConf.create(dict(config), flags={"allow_objects": True})
        else:
            raise MisconfigurationException(
                "config must be the path of a DeepSpeed JSON file or an OmegaConf YAML file, a dict, a DictConfig or a ZenFlowConfig, got"
                f" {config!r}"
            )
        if OmegaConf.is_config(content):
            content = OmegaConf.to_container(content, resolve=True, throw_on_missing=True)
    except (ValueError, OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        # OmegaConf raises OSError for a file that holds a single number.
        raise MisconfigurationException(f"{origin}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise MisconfigurationException(f"{origin}: the top level must be a mapping, got {content!r}")
    return content


def _read_file(path: Path) -> Any:
    kind = path.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise MisconfigurationException(
            f"config must be a file named *.json (DeepSpeed), *.yaml or *.yml (OmegaConf), got {str(path)!r}"
        )
    if not path.is_file():
        raise MisconfigurationException(f"config must be an existing file, got {str(path)!r}")
    if kind == ".json":
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=dict_raise_error_on_duplicate_keys)
    return OmegaConf.load(path)


def _split(content: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The keys for ``ZenFlowConfig`` and the DeepSpeed config, according to the form of `content`."""
    if any(section in content for section in _SECTIONS):
        check_keys(content, _SECTIONS, origin)
        for name, section in content.items():
            if not isinstance(section, dict | None):
                raise MisconfigurationException(f"{origin}: {name} must be a mapping, got {section!r}")
        zenflow, deepspeed = content.get("zenflow") or {}, content.get("deepspeed")
        check_keys(zenflow, KEYS, f"{origin}, section zenflow")
    elif any(key in _DEEPSPEED_KEYS for key in content):
        zenflow, deepspeed = {}, content
    else:
        check_keys(content, (*KEYS, *sorted(_DEEPSPEED_KEYS)), origin)
        return content, None
    for key in map(str, deepspeed or {}):
        if key in KEYS:
            raise MisconfigurationException(
                f"{origin}: {key!r} is a key of ZenFlow; beside DeepSpeed's keys, move it into zero_optimization.zenflow, or use two"
                " sections, `zenflow:` and `deepspeed:`"
            )
        near = difflib.get_close_matches(key, _DEEPSPEED_KEYS, n=1, cutoff=0.9)
        if near and key not in _DEEPSPEED_KEYS:
            raise MisconfigurationException(
                f"{origin}: unknown key {key!r} (did you mean {near[0]!r}?), which DeepSpeed would ignore"
            )
    return zenflow, deepspeed


def _take_zenflow_block(deepspeed: dict[str, Any], origin: str) -> dict[str, Any]:
    """Removes and returns ``zero_optimization.zenflow``, with which DeepSpeed would start its own ZenFlow."""
    zero_optimization = deepspeed.get("zero_optimization")
    block = zero_optimization.pop("zenflow", None) if isinstance(zero_optimization, dict) else None
    where = f"{origin}, zero_optimization.zenflow"
    if not isinstance(block, dict | None):
        raise MisconfigurationException(f"{where} must be a mapping, got {block!r}")
    check_keys(block or {}, DeepSpeedZenFlowConfig.model_fields, where)
    # DeepSpeed's own result; all other keys are those of `ZenFlowConfig`.
    return {key: value for key, value in (block or {}).items() if key != "steps_per_epoch"}
