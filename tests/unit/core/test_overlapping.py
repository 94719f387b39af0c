"""A value that trainings change, which overlap and end in any order."""

import itertools
import threading

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
        assert values[-1] == 3
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
