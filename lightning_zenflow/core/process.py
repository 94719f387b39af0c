"""What the trainings of a process have in common: they may overlap, in several threads too, end in any order, and be forked."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

_LIMIT_S = 1800.0
"""Of the wait for another thread: torch's own of a collective."""

_set_up = threading.RLock()
_inherited: dist.ProcessGroup | None = None


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Context of a set-up or an end, which change names of DeepSpeed and torch; a second thread waits."""
    lock = _set_up
    if not lock.acquire(timeout=_LIMIT_S):
        raise RuntimeError(
            f"another training of this process has been set up or ended for {_LIMIT_S:g} s, in another thread, and DeepSpeed does one at a"
            " time; run them one after the other, or each in a process of its own"
        )
    try:
        yield
    finally:
        lock.release()


class PutBack:
    """A value of the process, or of each thread, that trainings note when they begin and put back when they end. One that ends before a
    later one hands on what it has noted, so that the last end restores what the first begin has found.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object], *, of_thread: bool = False) -> None:
        self._read, self._write, self._of_thread = read, write, of_thread
        self._notes: list[dict[str, Any]] = []
        # The garbage collector may end a training within each call.
        self._lock = threading.RLock()

    def begin(self) -> Callable[[], None]:
        """Notes the value; what is returned ends that, and may be called again."""
        note: dict[str, Any] = {"thread": threading.get_ident() if self._of_thread else 0}
        with self._lock:
            self._notes.append(note)
            # Unless an end has just handed on its own.
            note.setdefault("before", self._read())
        return partial(self._end, note)

    def _end(self, note: dict[str, Any]) -> None:
        with self._lock:
            of_thread = [n for n in self._notes if n["thread"] == note["thread"]]
            for number in (i for i, known in enumerate(of_thread) if known is note):
                self._notes[:] = [known for known in self._notes if known is not note]
                if later := of_thread[number + 1 :]:
                    later[0]["before"] = note["before"]
                else:
                    self._write(note["before"])


_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""By which ranks find each other: Lightning's launcher and DeepSpeed set them for a training and leave them behind."""


def _write_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


variables = PutBack(lambda: {name: os.environ.get(name) for name in _VARIABLES}, _write_variables)
threads = PutBack(torch.get_num_threads, torch.set_num_threads, of_thread=True)


def refuse_inherited_group() -> None:
    """Refuses collectives in a process that was forked from one with a process group, whose threads it does not have."""
    if _inherited is not None and dist.group.WORLD is _inherited:
        raise RuntimeError(
            "this process was forked from one with a process group of torch.distributed, as a training leaves it, whose threads it does not"
            " have: call `torch.distributed.destroy_process_group()` before the fork, or start processes by 'spawn' instead of 'fork'"
        )


def _note_fork() -> None:
    global _inherited, _set_up
    _inherited, _set_up = dist.group.WORLD, threading.RLock()


os.register_at_fork(after_in_child=_note_fork)
