"""The exception for what a user has set wrongly, and what messages call a front's methods."""

from collections.abc import Iterable
from typing import NamedTuple


class Calls(NamedTuple):
    """What a front's user calls, for messages. The defaults are those of Lightning's Trainer."""

    front: str = "ZenFlowStrategy"
    setup: str = "trainer.fit(model)"
    backward: str = "training_step` or `self.manual_backward"
    clip: str = "Trainer(gradient_clip_val=...)"
    accumulate: str = "use `Trainer(accumulate_grad_batches=...)` or, in manual optimization, several backward passes"
    read: str = "in `on_before_optimizer_step`"
    """Where gradients are there."""
    write: str = "in `on_train_batch_start` or `on_train_batch_end`"
    """Where weights can be written."""


class _Error(Exception):
    """First base of the next class: Python exchanges bases of one layout only."""


class MisconfigurationException(_Error):
    """A setting, a model or a call is not supported; the message says what must be, what it is, and what to do.

    `lightning` and `pytorch_lightning` each have a class of this name, and a program catches that of the package it imports. The front of
    a package makes its class a base of this one (`catch_as`); neither is imported here, since that takes seconds.
    """


def catch_as(other: type[Exception]) -> None:
    """Makes a package's `MisconfigurationException` a base class of ours."""
    if not issubclass(MisconfigurationException, other):
        MisconfigurationException.__bases__ = (other, *MisconfigurationException.__bases__)


def other_backward(calls: Calls) -> MisconfigurationException:
    """The error for gradients of a backward pass that is the user's own."""
    return MisconfigurationException(
        f"{calls.front}: gradients of the weights must come from `{calls.backward}`, got some of another `backward()`: for the"
        " gradient of an input, call `torch.autograd.grad(loss, input)`, which leaves weights alone"
    )


def unused(names: Iterable[str], instead: str = "") -> MisconfigurationException:
    """The error for a step without gradients of some parameters."""
    return MisconfigurationException(
        f"the loss of a step must depend on every trained parameter, got none of {', '.join(names)}: freeze them{instead}"
    )
