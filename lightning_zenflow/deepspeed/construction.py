"""Construction of DeepSpeed's engines: with ZenFlow's optimizer in the place of DeepSpeed's, and of a model that is not trained."""

import argparse
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_zenflow.core.process import one_at_a_time
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.users_module import note_users_flags, remove_hooks


@contextmanager
def in_place_of_deepspeeds(
    ours: type[ZenFlowOptimizer], factory: Callable[..., Any], module: Module
) -> Iterator[list[Any]]:
    """Makes ``deepspeed.initialize`` build its optimizer with `factory`; an error in the context destroys the optimizer.

    Private: the engine finds its optimizer's class by a name in a module, and has no other extension point.

    Args:
        ours: the class of the stage of ZeRO.
        factory: makes the optimizer, with DeepSpeed's arguments.
        module: the model that DeepSpeed initialises in this context. Parameters in another memory format (`torch.channels_last`) are
            contiguous from now on.

    Yields:
        A list, which holds the optimizer at the end of the context.

    Raises:
        RuntimeError: this version of DeepSpeed builds its optimizer in another way.
    """
    built: list[Any] = []
    note_users_flags(module)
    scalars = _lay_out_for_broadcast(module)

    def restore_scalars() -> None:
        for scalar in scalars:
            scalar.data = scalar.data.view(())
        scalars.clear()

    def build(*args: Any, **kwargs: Any) -> Any:
        restore_scalars()
        built.append(factory(*args, **kwargs))
        return built[-1]

    try:
        with patch.object(ours.namespace, ours.__bases__[-1].__name__, build):
            yield built
        if not built:
            raise RuntimeError(
                f"lightning_zenflow cannot enter DeepSpeed {deepspeed.__version__}, whose engine built another optimizer; it is tested with"
                " 0.19.8: install that version or a newer lightning-zenflow"
            )
    except BaseException:
        # The engine failed after it had built its optimizer; no other component holds the worker.
        for unused in built:
            unused.destroy()
            unused.training.end(keep_state=False)
        raise
    finally:
        restore_scalars()


def training_engine(
    module: Module, optimizer: Optimizer | None, config: dict[str, Any], device: torch.device, scheduler: Any = None
) -> DeepSpeedEngine:
    """DeepSpeed's engine of a model that is trained, with the optimizer that its configuration has if there is no other."""
    engine, *_ = deepspeed.initialize(
        args=_device_of(device),
        config=config,
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        optimizer=optimizer,
        lr_scheduler=scheduler,
        dist_init_required=False,
    )
    return engine


@one_at_a_time()
def inference_engine(module: Module, config: Mapping[str, Any], device: torch.device) -> Any:
    """DeepSpeed's engine of a model without optimizer, whose weights get the precision of the training's configuration and, under stage 3,
    are divided. Hooks of an engine before are removed; the user's stay.
    """
    remove_hooks(module)
    note_users_flags(module)
    keys = ("fp16", "bf16", *(["zero_optimization"] if config["zero_optimization"]["stage"] == 3 else []))
    settings = {"train_micro_batch_size_per_gpu": 1, **{key: config[key] for key in keys if key in config}}
    # In bf16 it prints the memory in use, on six lines.
    with redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            args=_device_of(device), config=settings, model=module, model_parameters=[], dist_init_required=False
        )
    return engine


def _device_of(device: torch.device) -> argparse.Namespace:
    """How DeepSpeed is told a rank's device, a CPU's too."""
    return argparse.Namespace(device_rank=device.index or 0)


def _lay_out_for_broadcast(module: Module) -> list[Parameter]:
    """Makes every parameter contiguous, with a dimension at least; returns the scalars, which need their shape back for the optimizer.

    DeepSpeed's engine broadcasts each parameter as a tensor of bytes, which torch makes of such memory only. Its optimizer, which comes
    next, copies all trained parameters into contiguous memory anyway.
    """
    # Stage 3 may have partitioned some before, which have no memory.
    whole = [p for p in module.parameters() if not is_zero_param(p)]
    scalars = [p for p in whole if p.dim() == 0]
    for parameter in whole:
        flat = parameter.data.reshape(-1)
        if flat.stride() != (1,):
            # Not by `contiguous`: it leaves the stride of one element as it is.
            flat = flat.clone(memory_format=torch.contiguous_format)
        parameter.data = flat.view(parameter.shape or (1,))
    return scalars
