"""DeepSpeed's engines: one that is built with ZenFlow's optimizer in the place of DeepSpeed's, and one of a model that is not trained."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch.nn import Module, Parameter

from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.release import note_users_flags, remove_hooks


@contextmanager
def in_place_of_deepspeeds(
    ours: type[ZenFlowOptimizer], factory: Callable[..., Any], module: Module
) -> Iterator[list[Any]]:
    """Makes ``deepspeed.initialize`` build its optimizer with `factory`; an error in the context destroys the optimizer.

    Private: the engine finds its optimizer's class by a name in a module, and has no other extension point. The name is replaced inside
    this context only.

    Args:
        ours: the class of the stage of ZeRO. DeepSpeed's class must have its overrides.
        factory: makes the optimizer, with DeepSpeed's arguments.
        module: the model that DeepSpeed initialises in this context. Parameters in another memory format (`torch.channels_last`) are
            contiguous from now on.

    Returns:
        The optimizer, at the end of the context.

    Raises:
        RuntimeError: this version of DeepSpeed builds its optimizer in another way; or another thread is in this context.
    """
    base, namespace = ours.__bases__[-1], ours.namespace
    name = base.__name__
    missing = missing_overrides(ours, base)
    found = vars(namespace).get(name)
    if getattr(found, "__module__", None) == __name__:
        raise RuntimeError(
            "another training runs in this process and is being set up, in another thread: DeepSpeed sets up one at a time; run them one"
            " after the other, or each in a process of its own"
        )
    if found is not base or missing:
        raise _unsupported(f"missing in {name}: {missing}" if missing else "no name to replace")
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

    setattr(namespace, name, build)
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
        setattr(namespace, name, base)


def inference_engine(module: Module, config: Mapping[str, Any], device: torch.device) -> Any:
    """DeepSpeed's engine of a model without optimizer, which converts its weights to the precision of the training's configuration and,
    under stage 3, divides them. Hooks of an engine before are removed; the user's stay.
    """
    remove_hooks(module)
    note_users_flags(module)
    keys = ("fp16", "bf16", *(["zero_optimization"] if config["zero_optimization"]["stage"] == 3 else []))
    settings = {"train_micro_batch_size_per_gpu": 1, **{key: config[key] for key in keys if key in config}}
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=device.index or 0),
        config=settings,
        model=module,
        model_parameters=[],
        dist_init_required=False,
    )
    return engine


def missing_overrides(subclass: type, base: type) -> list[str]:
    """Methods that `subclass` overrides and `base` does not define, so that the library would never call them.

    Args:
        subclass: a class, any of whose bases in this package may mark methods with `override`. Names that one of these bases defines
            without the mark are the package's own.
        base: a class of another library among its bases.
    """
    package = __name__.partition(".")[0]
    marked: dict[bool, set[str]] = {True: set(), False: set()}
    for owner in subclass.__mro__:
        if owner.__module__.partition(".")[0] == package:
            for name, member in vars(owner).items():
                # A property or a class method is made of a function, which has the mark.
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                marked[getattr(function, "__override__", False)].add(name)
    return sorted(name for name in marked[True] - marked[False] if not hasattr(base, name))


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


def _unsupported(what: str) -> RuntimeError:
    return RuntimeError(
        f"lightning_zenflow cannot enter DeepSpeed {deepspeed.__version__} ({what}); it is tested with 0.19.8:"
        " install that version or a newer lightning-zenflow"
    )
