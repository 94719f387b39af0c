"""The exception for what a user has set wrongly, which both of Lightning's packages know."""

from lightning.fabric.utilities.exceptions import MisconfigurationException as LightningsException


class MisconfigurationException(LightningsException):
    """A setting, a model or a call is not supported; the message says what must be, what it is, and what to do.

    `lightning` and `pytorch_lightning` each have a class of this name, and a program catches that of the package it imports. This is one
    of Lightning's, and `raise_also_as` makes it one of the other package's.
    """


def raise_also_as(other: type[Exception]) -> None:
    """Makes every `MisconfigurationException` of this package an instance of a further class as well."""
    if not issubclass(MisconfigurationException, other):
        MisconfigurationException.__bases__ = (*MisconfigurationException.__bases__, other)


def other_backward() -> MisconfigurationException:
    """The error for gradients of a backward pass that is the user's own."""
    return MisconfigurationException(
        "ZenFlowStrategy: gradients of the weights must come from the loss that `training_step` returns, or that `fabric.backward` gets,"
        " got some of another `backward()`: for the gradient of an input, call `torch.autograd.grad(loss, input)`, which leaves weights"
        " alone"
    )
