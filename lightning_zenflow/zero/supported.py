"""What of a user's module is refused, with the reason, because ZenFlow or DeepSpeed cannot train it. Pure checks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor


def refuse_unsupported(zero_optimizer: Any) -> None:
    """Refuses what only DeepSpeed's engine can know; everything else was refused with the configuration.

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
            raise MisconfigurationException(f"ZenFlowStrategy does not support {feature}")


def frozen_parameters(
    named: Iterable[tuple[str, Tensor]], groups: Iterable[Mapping[str, Sequence[Tensor]]]
) -> dict[str, Tensor]:
    """The parameters of an optimizer that require no gradient.

    Args:
        named: the model's parameters and their names.
        groups: the optimizer's parameter groups.
    """
    optimized = {id(parameter) for group in groups for parameter in group["params"]}
    return {name: p for name, p in named if id(p) in optimized and not p.requires_grad}


def refuse_unfrozen(frozen_at_setup: Mapping[str, Tensor]) -> None:
    """Says so where a parameter was unfrozen that DeepSpeed does not train.

    Raises:
        MisconfigurationException: names the parameter.
    """
    for name, parameter in frozen_at_setup.items():
        if parameter.requires_grad:
            raise MisconfigurationException(
                f"{name}.requires_grad=True: allowed is False for a parameter that was frozen when training was set up, since DeepSpeed"
                " trains those only that required gradients then; set it up trainable and freeze it in `on_train_start`"
            )


def refuse_unsupported_module(module: pl.LightningModule) -> None:
    """Refuses a module before anything is set up for it.

    Raises:
        MisconfigurationException: it optimizes manually, or has sparse gradients or a parameter without dimensions; names which.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "ZenFlowStrategy: automatic_optimization=False: allowed is True; manual optimization has no defined step at which"
            " deferred updates could be handed over"
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name or type(part).__name__}.sparse=True: allowed is False; sparse gradients are not supported"
            )
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name} has shape (): allowed is at least one dimension, such as (1,); DeepSpeed cannot send others"
            )


def refuse_unsupported_precision(precision: object) -> None:
    """Refuses fp16 where the device that DeepSpeed uses has no instructions for it.

    Args:
        precision: Lightning's name of it, such as "16-mixed".

    Raises:
        MisconfigurationException: names the precisions that are allowed.
    """
    # Imported here: DeepSpeed chooses the accelerator when it is asked first.
    from deepspeed.accelerator import get_accelerator

    if precision in ("16-true", "16-mixed") and not get_accelerator().is_fp16_supported():
        raise MisconfigurationException(
            f"ZenFlowStrategy: precision={precision!r}: allowed is '32-true', 'bf16-true' or 'bf16-mixed' here; this device has no"
            " instructions for 16-bit floats of type fp16"
        )


def refuse_missing_loss(output: object) -> None:
    """Refuses what `training_step` returned if it is None. Lightning's plugin for DeepSpeed notices in a step's last micro-batch only.

    Raises:
        MisconfigurationException: says why a micro-batch cannot be skipped, and what does instead.
    """
    if output is None:
        raise MisconfigurationException(
            "ZenFlowStrategy: training_step returned None: allowed is a loss; all ranks reduce gradients in every micro-batch, so"
            " one that skips it would leave the others waiting (a loss of zero times any output skips a batch)"
        )


def several_optimizers() -> MisconfigurationException:
    """The error for several optimizers; Lightning's own advises manual optimization, which is refused as well."""
    return MisconfigurationException(
        "ZenFlowStrategy: configure_optimizers returned several optimizers: allowed is one; put the parameters into groups of"
        " one optimizer"
    )
