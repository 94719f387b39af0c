"""A value that trainings change, which overlap and end in any order."""

import itertools
import threading
from collections.abc import Callable

import pytest

from lightning_zenflow.core.process import PutBack


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_the_last_end_restores_what_the_first_begin_found(order: tuple[int, ...]) -> None:
    values = [0]
    put_back = PutBack(lambda: values[-1], values.append)
    ends = []
    for number in (1, 2, 3):
        ends.append(put_back.begin())
        values.append(number)
    for number in order:
        # The one that began last goes on with its own until it ends.
        assert values[-1] in (0, 1, 2, 3)
        ends[number]()
        ends[number]()
    assert values[-1] == 0


def test_each_thread_has_its_own() -> None:
    values = [0]
    put_back = PutBack(lambda: values[-1], values.append, of_thread=True)
    ours = put_back.begin()
    values.append(1)
    thread = threading.Thread(target=put_back.begin)
    thread.start()
    thread.join(60)
    ours()
    assert values[-1] == 0


def test_one_ends_while_another_begins() -> None:
    """As the garbage collector may have it."""
    values = [0]

    def read() -> int:
        if ends:
            ends.pop()()
            return 1  # what it was before
        return values[-1]

    ends: list[Callable[[], None]] = []
    put_back = PutBack(read, values.append)
    ends.append(put_back.begin())
    values.append(1)
    put_back.begin()()
    assert values[-1] == 0
