"""ZenFlow's optimizer in the place of one of DeepSpeed's, while DeepSpeed's engine is built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import deepspeed

from lightning_zenflow.core.overrides import missing_overrides
from lightning_zenflow.engine.optimizer import ZenFlowOptimizer


@contextmanager
def in_place_of(
    base: type[Any], module: ModuleType, factory: Callable[..., Any], ours: type[ZenFlowOptimizer]
) -> Iterator[list[Any]]:
    """Makes ``deepspeed.initialize`` build its optimizer with `factory`; an error in the context destroys the optimizer.

    Private: the engine finds its optimizer's class by a name in a module, and has no other extension point. The name is replaced inside
    this context only.

    Args:
        base: DeepSpeed's class.
        module: where the engine finds it, by the name of the class.
        factory: makes the optimizer, with DeepSpeed's arguments.
        ours: the class whose overrides DeepSpeed's must have.

    Returns:
        The optimizer, at the end of the context.

    Raises:
        RuntimeError: this version of DeepSpeed builds its optimizer in another way.
    """
    name = base.__name__
    missing = missing_overrides(ours, base)
    if vars(module).get(name) is not base or missing:
        raise _unsupported(f"missing in {name}: {missing}" if missing else "no name to replace")
    built: list[Any] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        built.append(factory(*args, **kwargs))
        return built[-1]

    setattr(module, name, build)
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
        setattr(module, name, base)


def _unsupported(what: str) -> RuntimeError:
    return RuntimeError(
        f"lightning_zenflow cannot enter DeepSpeed {deepspeed.__version__} ({what}); it is tested with 0.19.8:"
        " install that version or a newer lightning-zenflow"
    )
