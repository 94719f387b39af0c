"""A value that trainings change, which overlap; in any order: `test_trainings_that_overlap_end_in_any_order` of tests/fabric."""

import threading

from lightning_zenflow.core.process import PutBack


def test_the_last_end_restores_what_the_first_begin_of_its_thread_found() -> None:
    values = [0]
    put_back = PutBack(lambda: values[-1], values.append, of_thread=True)
    first = put_back.begin()
    values.append(1)
    second = put_back.begin()
    values.append(2)
    thread = threading.Thread(target=put_back.begin)
    thread.start()
    thread.join(60)
    for _ in range(2):
        first()
    assert values[-1] == 2
    second()
    assert values[-1] == 0
