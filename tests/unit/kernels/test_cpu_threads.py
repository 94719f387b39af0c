"""The threads that share a pass of the CPU's kernels."""

import time
from concurrent.futures import Future
from threading import Event

import pytest

from lightning_zenflow.kernels.cpu import _in_parallel


def test_no_thread_works_behind_an_interrupted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted, ended = Event(), list[int]()

    def run(part: int, begin: int, end: int) -> None:
        interrupted.wait()
        time.sleep(0.02)  # the call would have returned by then
        ended.append(part)

    def interrupt(future: Future[None]) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _in_parallel(run, [(0, 0, 1), (1, 1, 2), (2, 2, 3)])
    assert sorted(ended) == [0, 1, 2]
