"""Size of DeepSpeed's gradient buckets. Pure Python."""

_BUCKETS = 32
"""Per step. Gradients leave the device bucket by bucket; with few buckets, copies that could hide behind backward wait for its end."""

SMALLEST_BUCKET, LARGEST_BUCKET = 4_000_000, 200_000_000
"""Elements. Below the smallest, calls cost more than copies; the largest is the default of Lightning's `DeepSpeedStrategy`."""


def bucket_size(numel: int) -> int:
    """Elements per bucket of reduced gradients, for a model with `numel` trained parameters."""
    return min(max(-(-numel // _BUCKETS), SMALLEST_BUCKET), LARGEST_BUCKET)
