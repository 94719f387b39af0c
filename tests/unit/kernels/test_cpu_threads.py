"""The threads that share a pass of the CPU's kernels."""

import os
import signal

import pytest
import torch

from lightning_zenflow.kernels.base import CpuKernels
from processes import wait_for


def test_no_thread_works_behind_an_interrupted_call() -> None:
    """A signal comes within a pass, or between two."""

    def n_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    kernels, gradient = CpuKernels(), torch.ones(1024, 1024, dtype=torch.float32)
    before, handler = torch.get_num_threads(), signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    try:
        torch.set_num_threads(3)
        kernels.route(gradient, (), per_axis=True)  # with torch's own threads, which stay
        expected = n_threads()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            while True:
                kernels.route(gradient, (), per_axis=True)
        # A thread that has been waited for is listed a moment longer.
        wait_for(lambda: n_threads() <= expected)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        torch.set_num_threads(before)
