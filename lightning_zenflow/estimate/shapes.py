"""Shapes of a model's parameters: of an `nn.Module`, also on the meta device, or by a number of parameters alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_zenflow.core.partition import column_count, row_length

if TYPE_CHECKING:
    from torch import nn

_WIDTH_PER_LAYER, _MATRICES_PER_LAYER = 128, 12


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """Shapes of a model's trained parameters."""

    matrices: Sequence[tuple[int, int]]
    """Rows and columns of each parameter in its [out, rest] view."""
    vector_numel: int = 0
    """Elements of all trained parameters of fewer than two dimensions."""
    frozen_numel: int = 0
    """Elements of frozen parameters, which take device memory only."""

    @property
    def numel(self) -> int:
        """Elements of all trained parameters."""
        return self.vector_numel + sum(rows * columns for rows, columns in self.matrices)

    @property
    def factor_numel(self) -> int:
        """Elements of the factored second moments of the provisional update: one per row and one per column."""
        return sum(rows + columns for rows, columns in self.matrices)

    def device_owned_numel(self, topk_ratio: float) -> int:
        """Device-owned elements: the selected columns of each matrix, and all vectors unless `topk_ratio` is 0."""
        selected = sum(rows * column_count(columns, topk_ratio) for rows, columns in self.matrices)
        return selected + self.vector_numel if topk_ratio > 0 else 0


def shapes_of_module(module: "nn.Module") -> ModelShapes:
    """Counts a module's parameters, shared ones once."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return ModelShapes(
        matrices=[(p.numel() // n, n) for p in trained if (n := row_length(p.shape))],
        vector_numel=sum(p.numel() for p in trained if not row_length(p.shape)),
        frozen_numel=sum(p.numel() for p in module.parameters() if not p.requires_grad),
    )


def shapes_of_count(params: float) -> ModelShapes:
    """Assumes a transformer of square matrices with the given number of parameters.

    Its width is 128 times the number of layers, with 12 matrices of width x width in each layer (attention 4, MLP 8), as in Llama-2 7B.

    Raises:
        ValueError: the number is not finite, or below 1.
    """
    if not (math.isfinite(params) and params >= 1):
        raise ValueError(f"params must be a finite number >= 1, got {params!r}")
    width = max(1, round((params * _WIDTH_PER_LAYER / _MATRICES_PER_LAYER) ** (1 / 3)))
    count, rest = divmod(round(params), width * width)
    rows, vector_numel = divmod(rest, width)
    matrices = [(width, width)] * count + [(rows, width)] * (rows > 0)
    return ModelShapes(matrices=matrices, vector_numel=vector_numel)
