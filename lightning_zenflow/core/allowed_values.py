"""Domains of configuration values: sets of allowed values that name themselves in errors and documents. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class Domain:
    """A set of allowed values; ``a | b`` is the union of two.

    Args:
        text: names the set, so that "must be {text}" completes a sentence.
        contains: whether any object is a member.
        convert: a member in the type in which it is stored.
    """

    text: str
    contains: Callable[[Any], bool]
    convert: Callable[[Any], Any]

    def __or__(self, other: "Domain") -> "Domain":
        return Domain(
            f"{self.text} or {other.text}",
            lambda value: self.contains(value) or other.contains(value),
            lambda value: (self if self.contains(value) else other).convert(value),
        )


def number(minimum: float, maximum: float, *, above_minimum: bool = False) -> Domain:
    """Real numbers within inclusive bounds, as float.

    Args:
        minimum: the lower bound.
        maximum: the upper bound, finite.
        above_minimum: excludes the lower bound.
    """
    text = (
        f"a number > {minimum:g} and <= {maximum:g}" if above_minimum else f"a number from {minimum:g} to {maximum:g}"
    )

    def contains(value: Any) -> bool:
        # bool is a number in Python, but `topk_ratio: true` is a mistake.
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        # NaN fails every comparison.
        return is_number and minimum <= value <= maximum and not (above_minimum and value == minimum)

    return Domain(text, contains, float)


def integer(minimum: int, maximum: int | None = None) -> Domain:
    """Integers within inclusive bounds, as int."""
    text = f"an integer >= {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"

    def contains(value: Any) -> bool:
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        return is_integer and value >= minimum and (maximum is None or value <= maximum)

    return Domain(text, contains, int)


def integers(text: str, condition: Callable[[Sequence[int]], bool]) -> Domain:
    """Sequences of non-negative integers that satisfy a condition, as list."""
    item = integer(0)

    def contains(value: Any) -> bool:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return False
        return all(map(item.contains, value)) and condition(value)

    return Domain(text, contains, lambda value: [int(number) for number in value])


def one_of(*words: str) -> Domain:
    """Some strings."""
    return Domain(" or ".join(map(repr, words)), lambda value: isinstance(value, str) and value in words, str)


AUTO = one_of("auto")

BOOLEAN = Domain("true or false", lambda value: isinstance(value, bool), bool)
