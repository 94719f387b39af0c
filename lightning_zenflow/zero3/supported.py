"""Checks that refuse what ZenFlow does not support under stage 3."""

from typing import Any

import torch

from lightning_zenflow.engine.supported import refuse_features


def refuse_unsupported(zero_optimizer: Any) -> None:
    """Refuses features that only DeepSpeed's engine knows of; the rules of the configuration have been applied before."""
    parameters = [p for sub_group in zero_optimizer.fp16_groups for p in sub_group]
    features = {
        # Private: where DeepSpeed's AutoEP puts the parameters of experts. Others have the groups of all ranks.
        "mixture of experts with expert parallelism": any(
            not getattr(p, "allreduce", True) or getattr(p, "ds_zero_placement_family", "replicated") != "replicated"
            for p in parameters
        ),
        "tensor parallelism": zero_optimizer.model_parallel_group is not None,
        "sequence parallelism": zero_optimizer.sequence_parallel_size > 1,
        "master weights or gradients in half precision": zero_optimizer.master_weights_and_grads_dtype != torch.float32,
        "data_types.grad_accum_dtype other than the model's": (
            zero_optimizer.gradient_accumulation_dtype != zero_optimizer.dtype
        ),
    }
    refuse_features(features)
