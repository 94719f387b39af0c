"""Checks that refuse modules, precisions and engine features that ZenFlow or DeepSpeed cannot train. Each error says why."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor


def refuse_unsupported(zero_optimizer: Any) -> None:
    """Refuses features that only DeepSpeed's engine knows of; the configuration has been checked before.

    Raises:
        MisconfigurationException: names the feature.
    """
    refused = {
        "mixture of experts": zero_optimizer.has_moe_layers,
        "model parallelism": zero_optimizer.model_parallel_world_size > 1,
        "sequence parallelism": zero_optimizer.sequence_parallel_size > 1,
        "master weights or gradients in half precision": zero_optimizer.low_precision_master_weights_and_grads,
        "torch_autocast": zero_optimizer.torch_autocast_gradscaler is not None,
        "data_types.grad_accum_dtype other than the model's": (
            zero_optimizer.gradient_accumulation_dtype != zero_optimizer.dtype
        ),
    }
    for feature, present in refused.items():
        if present:
            raise MisconfigurationException(f"ZenFlowStrategy does not support {feature}; turn it off")


def frozen_parameters(
    named: Iterable[tuple[str, Tensor]], groups: Iterable[Mapping[str, Sequence[Tensor]]]
) -> dict[str, Tensor]:
    """The parameters of an optimizer that do not require gradients, by name.

    Args:
        named: names and parameters of the model.
        groups: the optimizer's parameter groups.
    """
    optimized = {id(parameter) for group in groups for parameter in group["params"]}
    return {name: p for name, p in named if id(p) in optimized and not p.requires_grad}


def refuse_unfrozen(frozen_at_setup: Mapping[str, Tensor]) -> None:
    """Refuses to unfreeze a parameter that was frozen at setup, since DeepSpeed does not train it.

    Args:
        frozen_at_setup: those parameters, by name.

    Raises:
        MisconfigurationException: names the parameter.
    """
    for name, parameter in frozen_at_setup.items():
        if parameter.requires_grad:
            raise MisconfigurationException(
                f"{name}.requires_grad must be False, got True: DeepSpeed trains only parameters that required gradients at setup; set it"
                " up trainable and freeze it in `on_train_start`"
            )


def refuse_unsupported_module(module: pl.LightningModule) -> None:
    """Refuses manual optimization, sparse gradients and 0-D parameters, before anything is set up for the module.

    Raises:
        MisconfigurationException: names the attribute, the submodule or the parameter.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "ZenFlowStrategy: automatic_optimization must be True, got False: manual optimization has no defined step at which"
            " deferred updates could be submitted"
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name or type(part).__name__}.sparse must be False, got True: gradients must be dense"
            )
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name} must have at least one dimension, such as (1,), got shape (): DeepSpeed cannot send it"
            )


def refuse_unsupported_precision(precision: object) -> None:
    """Refuses fp16 if DeepSpeed's device has no fp16 instructions.

    Args:
        precision: Lightning's name, such as "16-mixed".

    Raises:
        MisconfigurationException: names the supported precisions.
    """
    # Imported here because the first call of get_accelerator fixes DeepSpeed's choice.
    from deepspeed.accelerator import get_accelerator

    if precision in ("16-true", "16-mixed") and not get_accelerator().is_fp16_supported():
        raise MisconfigurationException(
            f"ZenFlowStrategy: precision must be '32-true', 'bf16-true' or 'bf16-mixed', got {precision!r}: this device has no fp16"
            " instructions"
        )


def refuse_missing_loss(output: object) -> None:
    """Refuses None from `training_step`. Lightning's DeepSpeed plugin checks only the last micro-batch of a step.

    Args:
        output: the result of `training_step`.

    Raises:
        MisconfigurationException: says how to skip a batch instead.
    """
    if output is None:
        raise MisconfigurationException(
            "ZenFlowStrategy: training_step must return a loss, got None: all ranks reduce gradients in every micro-batch, so a rank that"
            " skips one would block the others (to skip a batch, return any output times zero)"
        )


def several_optimizers() -> MisconfigurationException:
    """The error for several optimizers; Lightning's own advises manual optimization, which is not supported either."""
    return MisconfigurationException(
        "ZenFlowStrategy: configure_optimizers must return one optimizer, got several; put the parameters into its parameter groups"
    )
