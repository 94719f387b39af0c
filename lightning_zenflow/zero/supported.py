"""Checks that refuse modules, precisions and engine features that ZenFlow or DeepSpeed cannot train. Each error says why."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_zenflow.core.distributed import raise_together


def refuse_unsupported(zero_optimizer: Any) -> None:
    """Refuses features that only DeepSpeed's engine knows of; the rules of the configuration have been applied before.

    Raises:
        MisconfigurationException: names the feature.
    """
    refused = {
        "mixture of experts": zero_optimizer.has_moe_layers,
        "sequence parallelism": zero_optimizer.sequence_parallel_size > 1,
        "master weights or gradients in half precision": zero_optimizer.low_precision_master_weights_and_grads,
        "data_types.grad_accum_dtype other than the model's": (
            zero_optimizer.gradient_accumulation_dtype != zero_optimizer.dtype
        ),
    }
    for feature, present in refused.items():
        if present:
            raise MisconfigurationException(f"ZenFlowStrategy does not support {feature}; turn it off")


def refuse_unused(names: Iterable[str]) -> None:
    """Refuses a step that did not use all parameters, where DeepSpeed's `ignore_unused_parameters` is false. A collective.

    Args:
        names: of the parameters without a gradient that this rank holds a part of.

    Raises:
        MisconfigurationException: names them.
    """
    listed = ", ".join(names)
    message = (
        f"the loss of a step must depend on every trained parameter, got none of {listed}: freeze them, or set DeepSpeed's"
        " zero_optimization.ignore_unused_parameters to true"
    )
    raise_together(MisconfigurationException(message) if listed else None, MisconfigurationException)


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
                " up trainable and freeze it after that, with the Trainer in `on_train_start`"
            )


def refuse_unsupported_training(module: pl.LightningModule, callbacks: Iterable[pl.Callback]) -> None:
    """Refuses manual optimization, and callbacks that cannot work with a DeepSpeed optimizer, before they change the model.

    Raises:
        MisconfigurationException: names the attribute or the callback.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "ZenFlowStrategy: automatic_optimization must be True, got False: manual optimization has no defined step at which"
            " deferred updates could be submitted"
        )
    for callback in callbacks:
        if isinstance(callback, LearningRateFinder):
            raise MisconfigurationException(
                "ZenFlowStrategy: LearningRateFinder and `Tuner.lr_find` put a scheduler of their own on a torch optimizer,"
                " which DeepSpeed's is not: find the learning rate with another strategy and a model that fits, such as"
                " Trainer(strategy='auto')"
            )
        # Private; Lightning keeps it nowhere else. True by default.
        if isinstance(callback, ModelPruning) and callback._use_lottery_ticket_hypothesis:
            raise MisconfigurationException(
                "ZenFlowStrategy: ModelPruning's use_lottery_ticket_hypothesis must be False, got"
                f" {callback._use_lottery_ticket_hypothesis!r}: it replaces the memory of weights by copies, which are not trained"
            )


def refuse_unsupported_module(module: Module) -> None:
    """Refuses what cannot be trained, before anything is set up for the module: sparse gradients, weights that cannot be converted, and
    trained parameters whose elements share memory, since DeepSpeed copies each element to a place of its own.

    Raises:
        MisconfigurationException: names the submodule, the parameter or the buffer.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            name = name or type(part).__name__
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name}.sparse must be False, got True: gradients must be dense"
            )
    first_at: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        must = "be a real tensor of at most 32 bits"
        if is_lazy(tensor):
            found = "an uninitialized one: run the module on one batch before, which gives its lazy layers their shapes"
        # Lightning's precision plugin for DeepSpeed would convert these without a word.
        elif tensor.is_complex():
            found = f"{tensor.dtype}: its imaginary part would be lost; keep it as `torch.view_as_real(...)`"
        elif type(tensor) is not torch.nn.Parameter:
            # Subclasses may have no memory that can be compared.
            continue
        elif tensor.dtype == torch.float64:
            found = f"{tensor.dtype}: call `module.float()`"
        elif tensor.is_meta or tensor.numel() == 0:
            continue
        else:
            must, found = _shared_memory(name, tensor, first_at)
        if found:
            raise MisconfigurationException(f"ZenFlowStrategy: {name} must {must}, got {found}")


def _shared_memory(name: str, parameter: Tensor, first_at: dict[int, tuple[str, Tensor]]) -> tuple[str, str]:
    """What a parameter must have, and what it has, where elements share memory; else nothing. Notes the parameter by its address."""
    is_expanded = any(n > 1 and not step for n, step in zip(parameter.shape, parameter.stride(), strict=True))
    if parameter.requires_grad and is_expanded:
        found = "an expanded tensor: make the smaller tensor the parameter and expand it in `forward`, or clone it"
        return "have memory for each of its elements", found
    other_name, other = first_at.setdefault(parameter.data_ptr(), (name, parameter))
    if other is not parameter and (other.requires_grad or parameter.requires_grad):
        found = f"that of {other_name}, which is another parameter: to share weights, assign the parameter itself and not its `data`"
        return "have memory of its own", found
    return "", ""


def refuse_moved(names: Iterable[str]) -> None:
    """Refuses weights whose memory was replaced: updates reach them at their addresses, and nowhere else.

    Args:
        names: of the parameters; the first one is named.

    Raises:
        MisconfigurationException: says what to do.
    """
    for name in names:
        raise MisconfigurationException(
            f"ZenFlowStrategy: {name} must keep its memory, got another one since set-up, as by `parameter.data = ...`,"
            " `module.to(...)` or `module.load_state_dict(..., assign=True)`: updates do not reach it there. To give it other values, use"
            " deepspeed.utils.safe_set_full_fp32_param"
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


def several_devices_in_notebook(devices: int) -> MisconfigurationException:
    """The error for several devices in a notebook or at Python's prompt; Lightning's own advises a strategy that does not offload.

    Args:
        devices: their number, over all nodes.
    """
    return MisconfigurationException(
        f"ZenFlowStrategy: in a notebook or at Python's prompt devices must be 1, got {devices}, since the other processes would run the"
        " program's file, and there is none; use devices=1, or write the training to a file (`%%writefile train.py`) and run that"
        " (`!python train.py`)"
    )
