"""Checks that refuse what ZenFlow does not support under stage 1 and 2."""

from typing import Any

from lightning_zenflow.engine.supported import refuse_features


def refuse_unsupported(zero_optimizer: Any) -> None:
    """Refuses features that only DeepSpeed's engine knows of; the rules of the configuration have been applied before."""
    features = {
        "mixture of experts": zero_optimizer.has_moe_layers,
        "sequence parallelism": zero_optimizer.sequence_parallel_size > 1,
        "master weights or gradients in half precision": zero_optimizer.low_precision_master_weights_and_grads,
        "data_types.grad_accum_dtype other than the model's": (
            zero_optimizer.gradient_accumulation_dtype != zero_optimizer.dtype
        ),
    }
    refuse_features(features)
