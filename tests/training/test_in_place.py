"""Weights in host memory that the worker writes where they are: the bits of copies, and in order with what reads them. That every forward
pass sees AdamW's weights: test_optimizer_in_backward.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_optimizer_in_backward import NOTHING_LATE, same_blocks  # noqa: F401
from torch import Tensor

from direct_step import DirectStep, direct_step
from eventful_training import random_tensors
from harness import run_here
from lightning_zenflow.core.device import SideStream
from lightning_zenflow.offload.jobs import JobQueue
from processes import wait_for
from recorded_device.device import RecordedDevice
from recorded_device.tensors import DEVICE
from recorded_device.watch import recorded_device
from same_bits import assert_same_run


@pytest.mark.usefixtures("same_blocks")
def test_weights_in_place_have_the_bits_of_copies() -> None:
    """With predicted factors, of weights and moments in 16 bits."""
    case = replace(NOTHING_LATE["a network"], precision="bf16-true", max_norm=0.5)
    case = case.with_keys(moments_dtype="bfloat16", clip_prediction=True)
    in_place = run_here(case.with_keys(in_place=True))
    assert in_place.in_backward_jobs > 0
    assert_same_run(in_place, run_here(case))


def are_done(direct: DirectStep) -> bool:
    """Whether the worker has done all that was submitted in backward."""
    return all(map(direct.parts.jobs.in_flight.has_answers, direct.parts.jobs.submitted_in_backward))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_bits_do_not_depend_on_when_the_worker_begins(dtype: str) -> None:
    """Before the step's factor is there, or behind it: moments that have been rounded in between would show.

    Of parameters that are smaller than a block, so that none commits early: a job in backward commits the gradient of the step before.
    """
    shapes, shown = [(41, 43)] * 9, []
    for is_late in (False, True):
        keys = {"max_norm": 1.0, "moments_dtype": dtype, "clip_prediction": False}
        with direct_step([random_tensors(50, shapes=shapes)], in_place=True, **keys) as direct:
            for step in range(4):
                gradients, pid = random_tensors(step, shapes=shapes), direct.parts.rank.worker.pid
                for index in reversed(range(len(gradients))):
                    # The last block only: there are slots for few more than the blocks of a step.
                    if index == 0 and is_late:
                        wait_for(lambda: are_done(direct))
                        os.kill(pid, signal.SIGSTOP)
                    direct.receive(index, gradients[index], last=True)
                direct.join()
                if not is_late:
                    wait_for(lambda: are_done(direct))
                # Or the last block's prediction would be right.
                direct.training.max_norm = 0.5
                direct.step.step()
                direct.training.max_norm = 1.0
                os.kill(pid, signal.SIGCONT)
                direct.fetch()
                shown.append([flat.clone() for flat in direct.shown])
    torch.testing.assert_close(shown[:4], shown[4:], rtol=0, atol=0)


def record(**keys: Any) -> tuple[RecordedDevice, list[Tensor]]:
    """A training whose kernels read weights on the device, into which a stream of its own copies them from the host, forward and backward.

    Some steps are interrupted: the gradients of the first parameters never come. Flushes between forward and backward publish anew. Returns
    the exact state at the end as well.
    """
    with recorded_device() as device:
        fetches, inputs = device.new_stream(), random_tensors(7, DEVICE)
        with direct_step([random_tensors(50, DEVICE)], max_norm=30.0, in_place=True, **keys) as direct:

            def fetch(index: int) -> Tensor:
                """One parameter's weights; the current stream is behind the copy."""
                direct.fetch(index)
                s = direct.parts.rank.partition.slices[index]
                with device.on(fetches):
                    weights = direct.shown[0].narrow(0, s.begin, s.numel).to(DEVICE, non_blocking=True)
                device.current.wait_stream(fetches)
                device.order.keep_for(weights.untyped_storage().data_ptr(), device.current.name)
                return weights.mul_(inputs[index].flatten())

            for event in ["", "", "flush", "interrupted", "", "flush", "interrupted", ""]:
                for index in range(len(inputs)):
                    fetch(index)
                if event == "flush":
                    direct.step.flush()
                for index in reversed(range(2 if event == "interrupted" else 0, len(inputs))):
                    direct.receive(index, fetch(index), last=True)
                direct.join()
                if event == "interrupted":
                    direct.step.flush()
                else:
                    direct.step.step()
            direct.step.flush()
            state = direct.state()
        assert direct.parts.rank.telemetry.h2d_bytes == 0
    return device, state


@pytest.mark.parametrize("keys", [{}, {"overlap_step": False}], ids=["in backward", "at the end"])
def test_the_worker_writes_behind_the_last_reads(keys: dict[str, Any]) -> None:
    device, state = record(**keys)
    assert not device.order.races
    assert not any(t.isnan().any() for t in state)


@contextmanager
def not_behind(side: Any, event: Any = None, *, reads: Any = None) -> Iterator[None]:
    """`SideStream.behind`, in no order."""
    with side._runtime.on(side._stream):
        yield
    if reads is not None:
        side._runtime.keep_for(side._stream, reads)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a word that is not behind the gradients": lambda patch: patch.setattr(SideStream, "behind", not_behind),
    "a flush during a forward pass": lambda patch: patch.setattr(JobQueue, "_wait_for_readers", lambda _: None),
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_races_are_found(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[error](monkeypatch)
    device, _ = record()
    assert re.search("read by copy_ in the model .* write by replay to a publish buffer", str(device.order.races))
