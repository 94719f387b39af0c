"""DeepSpeed's engines: of the model that is trained, with ZenFlow's optimizer in the place of DeepSpeed's, and of models that are not."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import deepspeed.runtime.engine as engine_module
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn import Module, Parameter

from lightning_zenflow.core.overrides import missing_overrides
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer


@contextmanager
def zenflow_optimizer(
    factory: Callable[..., ZenFlowZeroOptimizer], module: Module
) -> Iterator[list[ZenFlowZeroOptimizer]]:
    """Makes ``deepspeed.initialize`` build its ZeRO-1/2 optimizer with `factory`; an error in the context destroys the optimizer.

    Private: the engine constructs `DeepSpeedZeroOptimizer` by a module-level name in ``deepspeed.runtime.engine`` and has no other
    extension point. The name is replaced inside this context only.

    Args:
        factory: makes the optimizer, with DeepSpeed's arguments.
        module: the model that DeepSpeed initialises in this context. Parameters in another memory format (`torch.channels_last`) are
            contiguous from now on.

    Returns:
        The optimizer, at the end of the context.

    Raises:
        RuntimeError: this version of DeepSpeed builds its optimizer in another way.
    """
    missing = missing_overrides(ZenFlowZeroOptimizer, DeepSpeedZeroOptimizer)
    if vars(engine_module).get("DeepSpeedZeroOptimizer") is not DeepSpeedZeroOptimizer or missing:
        raise _unsupported(f"missing in DeepSpeedZeroOptimizer: {missing}" if missing else "no name to replace")
    built: list[ZenFlowZeroOptimizer] = []
    scalars = _lay_out_for_broadcast(module)

    def restore_scalars() -> None:
        for scalar in scalars:
            scalar.data = scalar.data.view(())

    def build(*args: Any, **kwargs: Any) -> ZenFlowZeroOptimizer:
        restore_scalars()
        built.append(factory(*args, **kwargs))
        return built[-1]

    engine_module.DeepSpeedZeroOptimizer = build
    try:
        yield built
        if not built:
            raise _unsupported("its engine built another optimizer")
    except BaseException:
        # The engine failed after it had built its optimizer; no other component holds the worker.
        for unused in built:
            unused.destroy()
            unused.close(keep_state=False)
        raise
    finally:
        restore_scalars()
        engine_module.DeepSpeedZeroOptimizer = DeepSpeedZeroOptimizer


def inference_engine(module: Module, config: Mapping[str, Any], device: torch.device) -> Any:
    """DeepSpeed's engine of a model without optimizer, which converts its weights to the precision of the training's configuration."""
    settings = {"train_micro_batch_size_per_gpu": 1, **{key: config[key] for key in ("fp16", "bf16") if key in config}}
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=device.index),
        config=settings,
        model=module,
        model_parameters=[],
        dist_init_required=False,
    )
    return engine


def _lay_out_for_broadcast(module: Module) -> list[Parameter]:
    """Makes every parameter contiguous, with a dimension at least; returns the scalars, which need their shape back for the optimizer.

    DeepSpeed's engine broadcasts each parameter as a tensor of bytes, which torch makes of such memory only. Its optimizer, which comes
    next, copies all trained parameters into contiguous memory anyway.
    """
    scalars = [p for p in module.parameters() if p.dim() == 0]
    for parameter in module.parameters():
        flat = parameter.data.reshape(-1)
        if flat.stride() != (1,):
            # Not by `contiguous`: it leaves the stride of one element as it is.
            flat = flat.clone(memory_format=torch.contiguous_format)
        parameter.data = flat.view(parameter.shape or (1,))
    return scalars


def _unsupported(what: str) -> RuntimeError:
    return RuntimeError(
        f"lightning_zenflow cannot enter DeepSpeed {deepspeed.__version__} ({what}); it is tested with 0.19.8:"
        " install that version or a newer lightning-zenflow"
    )
