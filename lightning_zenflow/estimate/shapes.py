"""Shapes of a model's trained parameters, for the cost model.

Their sources are an `nn.Module` (also on the meta device), a Hugging Face config, or the number of parameters alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_zenflow.config import ConfigValueError
from lightning_zenflow.core.partition import row_length
from lightning_zenflow.topk.importance import column_count

_WIDTH_PER_LAYER = 128

_MATRICES_PER_LAYER = 12


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Parameters of equal shape, in their [out, rest] view."""

    rows: int
    columns: int
    count: int = 1
    """Number of such parameters."""

    @property
    def numel(self) -> int:
        """Elements of one."""
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """Shapes of a model's trained parameters."""

    name: str
    matrices: Sequence[Matrix]
    vector_numel: int = 0
    """Elements of all trained parameters of fewer than two dimensions."""
    frozen_numel: int = 0
    """Elements of frozen parameters, which take device memory only."""

    @property
    def numel(self) -> int:
        """Elements of all trained parameters."""
        return self.vector_numel + sum(m.count * m.numel for m in self.matrices)

    @property
    def largest_numel(self) -> int:
        """Elements of the largest matrix."""
        return max((m.numel for m in self.matrices), default=0)

    @property
    def factor_numel(self) -> int:
        """Elements of the factored second moments of the provisional update: one per row and one per column."""
        return sum(m.count * (m.rows + m.columns) for m in self.matrices)

    def device_owned_numel(self, topk_ratio: float) -> int:
        """Device-owned elements: the selected columns of each matrix, and all vectors unless `topk_ratio` is 0."""
        selected = sum(m.count * m.rows * column_count(m.columns, topk_ratio) for m in self.matrices)
        return selected + self.vector_numel if topk_ratio > 0 else 0


def shapes_of_module(module: nn.Module, name: str = "") -> ModelShapes:
    """Counts a module's parameters, shared ones once.

    Args:
        module: on any device.
        name: for the report; the name of the class by default.
    """
    counts: dict[tuple[int, int], int] = {}
    vector_numel = frozen_numel = 0
    for p in module.parameters():
        columns = row_length(p)
        if not p.requires_grad:
            frozen_numel += p.numel()
        elif columns:
            shape = p.numel() // columns, columns
            counts[shape] = counts.get(shape, 0) + 1
        else:
            vector_numel += p.numel()
    return ModelShapes(
        name=name or type(module).__name__,
        matrices=[Matrix(rows=rows, columns=columns, count=count) for (rows, columns), count in counts.items()],
        vector_numel=vector_numel,
        frozen_numel=frozen_numel,
    )


def shapes_of_hugging_face_config(path_or_name: str) -> ModelShapes:
    """Counts the parameters of a causal language model by its Hugging Face config.

    Args:
        path_or_name: a folder with a config.json, such a file, or a name on the Hugging Face Hub, which downloads the config only.

    Raises:
        ConfigValueError: the config is missing or is not that of a causal language model, or transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigValueError(
            f"hf_config needs transformers ({error}): pip install 'lightning-zenflow[examples]'", "hf_config"
        ) from error
    untyped: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(path_or_name)
        with torch.device("meta"):
            model: nn.Module = untyped.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigValueError(
            "hf_config must be a folder with a config.json, such a file, or the name of a causal language model on the Hugging Face"
            f" Hub, got {path_or_name!r}: {error}",
            "hf_config",
        ) from error
    path = Path(path_or_name)
    return shapes_of_module(model, path.parent.name if path.is_file() else path.name)


def shapes_of_count(params: float) -> ModelShapes:
    """Assumes a transformer of square matrices with the given number of parameters.

    Its width is 128 times the number of layers, with 12 matrices of width x width in each layer (attention 4, MLP 8), as in Llama-2 7B.
    """
    if not (math.isfinite(params) and params >= 1):
        raise ConfigValueError(f"params must be a finite number >= 1, got {params!r}", "params")
    numel = round(params)
    width = max(1, round((numel * _WIDTH_PER_LAYER / _MATRICES_PER_LAYER) ** (1 / 3)))
    count, rest = divmod(numel, width * width)
    rows, vector_numel = divmod(rest, width)
    matrices = [Matrix(rows=width, columns=width, count=count), Matrix(rows=rows, columns=width)]
    return ModelShapes(
        name="Transformer", matrices=[m for m in matrices if m.count * m.rows], vector_numel=vector_numel
    )
