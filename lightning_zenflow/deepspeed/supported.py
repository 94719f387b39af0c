"""Checks that refuse what ZenFlow or DeepSpeed cannot train. Each raises `MisconfigurationException`, which says what, and why."""

from collections.abc import Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.utils import z3_leaf_module
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from lightning_zenflow.core.errors import MisconfigurationException


def refuse_features(zero_optimizer: Any, of_stage: Mapping[str, bool]) -> None:
    """Refuses features that only DeepSpeed's engine knows of; the rules of the configuration have been applied before.

    Args:
        zero_optimizer: DeepSpeed's.
        of_stage: whether a feature is present, by its name, of those for which the stages of ZeRO have names of their own.
    """
    features = {
        **of_stage,
        "sequence parallelism": zero_optimizer.sequence_parallel_size > 1,
        "data_types.grad_accum_dtype other than the model's": (
            zero_optimizer.gradient_accumulation_dtype != zero_optimizer.dtype
        ),
    }
    for feature, present in features.items():
        if present:
            raise MisconfigurationException(f"ZenFlowStrategy does not support {feature}; turn it off")


def refuse_unsupported_callbacks(callbacks: Iterable[pl.Callback], lightning: ModuleType, *, in_pieces: bool) -> None:
    """Refuses a callback that cannot work with a DeepSpeed optimizer, before it changes the model.

    Args:
        callbacks: the Trainer's.
        lightning: the Trainer's package.
        in_pieces: whether each rank will have only its pieces of the weights (stage 3).
    """
    kinds = lightning.callbacks
    for callback in callbacks:
        absent = f"{type(callback).__name__} must be absent"
        refused = {
            kinds.LearningRateFinder: (
                "LearningRateFinder and `Tuner.lr_find` put a scheduler of their own on a torch optimizer, which DeepSpeed's is not: find"
                " the learning rate with another strategy and a model that fits, such as Trainer(strategy='auto')"
            ),
            kinds.BaseFinetuning: (
                f"{absent}: it adds parameter groups in mid-run, and the ranks divide all of them at set-up; give"
                " `configure_optimizers` all parameters, and set their `requires_grad` in `on_train_epoch_start`"
            ),
            kinds.StochasticWeightAveraging: (
                f"{absent}: it replaces the weights of a torch optimizer; use `WeightAveraging`"
            ),
        }
        if in_pieces:
            refused[kinds.WeightAveraging] = (
                f"{absent} with stage=3: it averages whole weights, and each rank has only its pieces; use stage=2"
            )
        for kind, reason in refused.items():
            if isinstance(callback, kind):
                raise MisconfigurationException(f"ZenFlowStrategy: {reason}")


def refuse_unsupported_module(module: Module) -> None:
    """Refuses, before anything is set up, sparse gradients, weights that cannot be converted, and trained parameters whose elements
    share memory, since DeepSpeed copies each element to a place of its own.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name or type(part).__name__}.sparse must be False, got True: gradients must be dense"
            )
    first_at: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        must, found = "be a real tensor of at most 32 bits", ""
        # Lightning's precision plugin for DeepSpeed would convert these without a word.
        if tensor.is_complex():
            found = f"{tensor.dtype}: its imaginary part would be lost; keep it as `torch.view_as_real(...)`"
        elif type(tensor) is torch.nn.Parameter and tensor.dtype == torch.float64:
            found = f"{tensor.dtype}: call `module.float()`"
        # Subclasses may have no memory that can be compared.
        elif type(tensor) is torch.nn.Parameter and tensor.numel() > 0 and not tensor.is_meta:
            other_name, other = first_at.setdefault(tensor.data_ptr(), (name, tensor))
            trained = tensor.requires_grad or other.requires_grad
            must = "have memory for each of its elements, which is no other parameter's"
            if trained and any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
                found = (
                    "an expanded tensor: make the smaller tensor the parameter and expand it in `forward`, or clone it"
                )
            elif trained and other is not tensor:
                found = f"that of {other_name}: to share weights, assign the parameter itself and not its `data`"
        if found:
            raise MisconfigurationException(f"ZenFlowStrategy: {name} must {must}, got {found}")


def refuse_features_of_stage_3(zero_optimizer: Any) -> None:
    """As `refuse_features`, and modules that are compiled in another way than in place."""
    parameters = [p for sub_group in zero_optimizer.fp16_groups for p in sub_group]
    features = {
        # Private: where DeepSpeed's AutoEP puts the parameters of experts. Others have the groups of all ranks.
        "mixture of experts with expert parallelism": any(
            not getattr(p, "allreduce", True) or getattr(p, "ds_zero_placement_family", "replicated") != "replicated"
            for p in parameters
        ),
        "tensor parallelism": zero_optimizer.model_parallel_group is not None,
        "master weights or gradients in half precision": zero_optimizer.master_weights_and_grads_dtype != torch.float32,
    }
    refuse_features(zero_optimizer, features)
    for name, part in zero_optimizer.module.named_modules():
        # It passes attributes on to what it wraps, DeepSpeed's records of parameters among them.
        if isinstance(part, OptimizedModule):
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name} must be compiled in place with stage=3, got the result of torch.compile, a module around it that"
                " DeepSpeed does not see through: use `module.compile()`"
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
