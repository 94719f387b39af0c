"""Checks that refuse what ZenFlow does not support under stage 3."""

from functools import partial
from typing import Any

import torch
from deepspeed.utils import z3_leaf_module
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from lightning_zenflow.core.errors import MisconfigurationException
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
    for name, part in zero_optimizer.module.named_modules():
        # It passes attributes on to what it wraps, DeepSpeed's records of parameters among them.
        if isinstance(part, OptimizedModule):
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name} must be compiled in place with stage=3, got the result of torch.compile, a module around it that"
                " DeepSpeed does not see through: use `module.compile()`"
            )


def refuse_second_gradient(name: str) -> None:
    """Refuses a second gradient of a parameter in one backward pass, when the first may have been applied."""
    raise MisconfigurationException(
        f"ZenFlowStrategy: {name} must have one gradient in a backward pass with stage=3, got a second: it is used more than once, and at"
        " least once in re-entrant checkpointing, which is a backward pass of its own, or in a leaf module that runs more than once; use"
        " torch.utils.checkpoint with use_reentrant=False"
    )


def check_inputs_of_leaf_modules(module: Module) -> list[RemovableHandle]:
    """Hooks that refuse inputs of leaf modules (`set_z3_leaf_modules`) with which DeepSpeed would take gradients before they are computed.

    It takes them when those of the positional arguments are there; torch calls its hook at once where none of these needs one.
    """
    leaves = ((name, part) for name, part in module.named_modules() if z3_leaf_module(part))
    return [part.register_forward_pre_hook(partial(_refuse_input_without_gradient, name)) for name, part in leaves]


def _refuse_input_without_gradient(name: str, module: Module, args: tuple[object, ...]) -> None:
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    if trains and not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        raise MisconfigurationException(
            f"ZenFlowStrategy: a positional argument of {name}, a leaf module of ZeRO stage 3, must require a gradient, got none that"
            " does: DeepSpeed takes the gradients of the module's parameters when that of its input is there; call `requires_grad_()` on"
            " the input"
        )
