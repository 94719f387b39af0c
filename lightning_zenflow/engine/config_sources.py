"""Reads the ``config=`` argument in any of its forms: the result is a validated ``ZenFlowConfig`` and a DeepSpeed config.

Sources are a DeepSpeed JSON file, an OmegaConf YAML file, a dict, a ``DictConfig`` or a ``ZenFlowConfig``. Each but the last has one of
three forms:

- flat: keys of ``ZenFlowConfig``;
- sections: ``zenflow:`` with keys of ``ZenFlowConfig`` and ``deepspeed:`` with a DeepSpeed config;
- a DeepSpeed config, recognised by its keys, with or without a ``zero_optimization.zenflow`` block.

Precedence: keywords, the ``zenflow:`` section, the ``zero_optimization.zenflow`` block, the defaults.
"""

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from omegaconf import DictConfig, OmegaConf

from lightning_zenflow.config import KEYS, ZenFlowConfig, check_keys
from lightning_zenflow.core.errors import MisconfigurationException

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
