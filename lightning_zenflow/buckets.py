"""How large DeepSpeed's gradient buckets are where the user has not said it."""

from collections.abc import Mapping
from typing import Any

from torch.nn import Module

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
