"""The exception for what a user has set wrongly, which both of Lightning's packages know."""


class _Base(Exception):
    """Python allows further base classes of a class only beside one that is not built in."""


class MisconfigurationException(_Base):
    """A setting, a model or a call is not supported; the message says what must be, what it is, and what to do.

    `lightning` and `pytorch_lightning` each have a class of this name, and a program catches that of the package it imports. This is one
    of each whose strategy's names are registered (`raise_also_as`); neither is imported here, since that takes seconds.
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
