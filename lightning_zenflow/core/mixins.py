"""The base class of mixins of classes of other libraries."""

from typing import Any

OtherBases: Any = object
"""What comes after a mixin in the order of base classes. `Any` for the type checker: there are several such classes."""
