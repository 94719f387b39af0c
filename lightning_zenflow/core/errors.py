"""The exception for what a user has set wrongly, which both of Lightning's packages know."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException as LightningsException
from typing_extensions import Self, override


class MisconfigurationException(LightningsException):
    """A setting, a model or a call is not supported; the message says what must be, what it is, and what to do.

    `lightning` and `pytorch_lightning` each have a class of this name, and a program catches that of the package it imports. This is one
    of Lightning's; after `raise_also_as` each instance is one of the other package's, too.
    """

    def __new__(cls, *args: Any) -> Self:
        """An instance of both packages' class."""
        error: Self = super().__new__(_of_both.get(cls, cls), *args)
        return error

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return MisconfigurationException, self.args


_of_both: dict[type, Any] = {}
"""The class of the instances, where there is a further package."""


def raise_also_as(other: type[Exception]) -> None:
    """Makes every `MisconfigurationException` of this package an instance of a further class as well."""
    bases = MisconfigurationException, other
    _of_both[MisconfigurationException] = type("MisconfigurationException", bases, {"__module__": __name__})
