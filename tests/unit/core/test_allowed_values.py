"""Domains: members, their stored type, and texts."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from lightning_zenflow.core.allowed_values import AUTO, BOOLEAN, Domain, integer, integers, number, one_of

PAIRS = integers("a pair", lambda numbers: len(numbers) == 2)
NEVER_NUMBERS = [None, True, False, "4", "auto ", "", [1], [], {}, math.nan, math.inf, -math.inf, 10**400, 1j]


@pytest.mark.parametrize(
    ("domain", "members", "others"),
    [
        (number(0, 1), [0, 1, 0.5, 1e-300, np.float32(0.25), Fraction(1, 4)], [*NEVER_NUMBERS, -1e-9, 1.001, 2]),
        (number(0, 5, above_minimum=True), [1e-9, 5], [*NEVER_NUMBERS, 0, 0.0, -1, 5.1]),
        (integer(1, 4), [1, 4, np.int64(3)], [*NEVER_NUMBERS, 0, 5, 1.0, 2.5]),
        (integer(0), [0, 10**400], [*NEVER_NUMBERS[:-2], -1, 1.0]),
        (PAIRS, [[0, 1], (1, 1), range(2)], [None, 2, "01", b"01", {0, 1}, [1], [0, 1, 2], [0, -1], [0, True], [0, 1.0]]),
        (one_of("a", "b"), ["a", "b"], [None, 1, "", "A", ["a"], "a "]),
        (BOOLEAN, [True, False], [None, 0, 1, "true", "auto", []]),
        (integer(1) | AUTO, [1, "auto"], [None, 0, "Auto", True]),
    ],
)  # fmt: skip
def test_members(domain: Domain, members: list[Any], others: list[Any]) -> None:
    assert [value for value in members if not domain.contains(value)] == []
    assert [value for value in others if domain.contains(value)] == []


def test_members_are_stored_in_one_type() -> None:
    for domain, value, stored in [
        (number(0, 1), 1, 1.0),
        (number(0, 1), np.float32(0.5), 0.5),
        (integer(0), np.int64(7), 7),
        (PAIRS, (np.int64(1), 2), [1, 2]),
        (number(0, 1) | AUTO, "auto", "auto"),
        (integer(1) | PAIRS, range(2), [0, 1]),
    ]:
        converted = domain.convert(value)
        assert (converted, type(converted)) == (stored, type(stored))


def test_texts() -> None:
    assert number(0, 1e6).text == "a number from 0 to 1e+06"
    assert number(0, 1e6, above_minimum=True).text == "a number > 0 and <= 1e+06"
    assert (integer(0).text, integer(1, 4).text) == ("an integer >= 0", "an integer from 1 to 4")
    assert (integer(0) | one_of("a", "b")).text == "an integer >= 0 or 'a' or 'b'"
