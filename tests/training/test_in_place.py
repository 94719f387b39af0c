"""Weights in host memory that the worker writes where they are: AdamW's bits, and those of copies, whatever happens between two steps. That
every forward pass sees AdamW's weights: test_optimizer_in_backward.
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
from torch import Tensor

from direct_step import direct_step
from eventful_training import SHAPES, assert_same_training, random_tensors, train
from harness import Case, run_here
from lightning_zenflow.core.device import PAGE_BYTES, SideStream
from lightning_zenflow.core.partition import Partition, build_partition
from lightning_zenflow.native import Tentative
from lightning_zenflow.offload import build
from lightning_zenflow.offload.clip_verification import WeightsInPlace
from lightning_zenflow.offload.jobs import JobQueue
from lightning_zenflow.worker.process import JobMessage
from lightning_zenflow.worker.supervisor import SupervisedWorker
from processes import wait_for
from recorded_device.device import RecordedDevice
from recorded_device.tensors import DEVICE
from recorded_device.watch import recorded_device
from same_bits import assert_is_adamw, assert_same_run

CASE = Case(
    steps=9,
    model_options={"shapes": SHAPES},
    topk_ratio=0,
    update_interval=1,
    publish_lag=0,
    loop="direct",
    strategy_options={"in_place": True},
)
NETWORK = replace(CASE, model="Perceptron", model_options={"widths": [61, 67, 71, 73, 16]})
EXACT_KEYS = {"topk_ratio": 0, "update_interval": 1, "publish_lag": 0}
COPIES: dict[str, Any] = {**EXACT_KEYS, "weight_prediction": 0, "provisional_scale": 0, "clip_prediction": False}
CLIPPED = replace(
    CASE, max_norm=1e3, model_options={"shapes": ((40, 41), (350,)), "factors": dict.fromkeys((2, 5, 6), 1e6)}
)
"""In two blocks; some steps are clipped."""


@pytest.fixture
def same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are copied have the blocks of those in place, on which predicted clip factors depend."""

    def of_pages(*args: Any, multiple: int | None) -> Partition:
        return build_partition(*args, multiple=multiple or PAGE_BYTES // 4)

    monkeypatch.setattr(build, "build_partition", of_pages)


def test_no_weight_is_copied() -> None:
    """The trajectory is drawn by tests/fuzz, among others."""
    run = run_here(NETWORK)
    assert_is_adamw(NETWORK, run, shown=True)
    assert not any(map(sum, run.h2d_bytes))


def test_clipped_steps_in_a_row_are_counted_up_to_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a step whose blocks are all submitted again no fetch waits for its word: the next step does."""
    begin, counts = WeightsInPlace.begin, list[int]()

    def noted(self: WeightsInPlace, *args: Any, **options: Any) -> Any:
        counts.append(self.n_clipped)
        return begin(self, *args, **options)

    monkeypatch.setattr(WeightsInPlace, "begin", noted)
    run_here(CLIPPED)
    assert counts == [0, 0, 0, 1, 0, 0, 1, 2, 0]


@pytest.mark.usefixtures("same_blocks")
def test_the_bits_of_copies() -> None:
    """With predicted factors, of weights and moments in 16 bits."""
    case = replace(NETWORK, max_norm=0.5, precision="bf16-true").with_keys(
        moments_dtype="bfloat16", clip_prediction=True
    )
    in_place = run_here(case)
    assert in_place.in_backward_jobs > 0
    assert_same_run(in_place, run_here(case.with_keys(in_place=False)))


@pytest.mark.parametrize(
    ("change", "usual"),
    [
        *((change, 0.0) for change in ("", "a learning rate", "a norm", "not finite")),
        ("a learning rate", 1e6),
        ("a norm", 1e6),
    ],
)
def test_blocks_are_submitted_again_where_the_factor_was_in_doubt(
    change: str, usual: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clipping one of them, which says with which factor the step was applied; all of them where that is another one, or where a
    hook changes what they were shown with. Weights that are copied, with a largest norm that is usual, are published again too.
    """
    keys = COPIES if usual else {"in_place": True}
    sent: list[JobMessage] = []
    enqueue = SupervisedWorker.enqueue
    monkeypatch.setattr(SupervisedWorker, "enqueue", lambda self, job: (sent.append(job), enqueue(self, job))[1])
    shown = []
    for in_backward in (True, False):
        with direct_step([random_tensors(50)], max_norm=usual, overlap_step=in_backward, **keys) as direct:
            for step in range(3):
                gradients = random_tensors(step)
                if step == 1 and change == "not finite":
                    gradients[0][0, 0] = torch.inf
                sent.clear()
                direct.backward(gradients)
                direct.join()
                n_blocks = len(direct.parts.jobs.submitted_in_backward)
                if step == 1 and change == "a learning rate":
                    direct.optimizer.param_groups[0]["lr"] /= 2
                direct.training.max_norm = 1.0 if step == 1 and change == "a norm" else usual
                direct.step.step()
                direct.training.max_norm = usual
                direct.fetch()
                # What has been fetched need not be waited for: DeepSpeed may fetch it ahead.
                assert all(map(direct.parts.jobs.is_written, range(len(direct.parts.rank.partition.slices))))
                shown.append([flat.clone() for flat in direct.shown])
                if usual:
                    assert step != 1 or (n_blocks > 1) == in_backward
                    continue
                again = sum(job.tentative is Tentative.CORRECTION for job in sent)
                # Behind a step that was clipped, nothing is known of the next one.
                all_in_doubt = (step == 1 and change) or (step == 2 and change == "a norm")
                expected = n_blocks if all_in_doubt else 1
                if step == 1 and change == "not finite":
                    # Blocks of the last gradient were not shown with the step.
                    expected = 1 + n_blocks - len(direct.parts.rank.blocks.of_slice[0])
                assert again == (expected if in_backward else 0)
                assert (n_blocks > 1) == in_backward
    torch.testing.assert_close(shown[:3], shown[3:], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_bits_do_not_depend_on_when_the_worker_begins(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the step's factor is there, or behind it: moments that have been rounded in between would show.

    Of parameters that are smaller than a block, so that none commits early: a job in backward commits the gradient of the step before.
    """
    shapes = [(41, 43)] * 9
    kinds: set[Tentative] = set()
    enqueue = SupervisedWorker.enqueue
    monkeypatch.setattr(
        SupervisedWorker, "enqueue", lambda self, job: (kinds.add(job.tentative), enqueue(self, job))[1]
    )
    shown = []
    for is_late in (False, True):
        keys = {"max_norm": 1.0, "moments_dtype": dtype, "clip_prediction": False}
        with direct_step([random_tensors(50, shapes=shapes)], in_place=True, **keys) as direct:
            for step in range(4):
                gradients, jobs = random_tensors(step, shapes=shapes), direct.parts.jobs

                def are_done(jobs: JobQueue = jobs) -> bool:
                    return all(map(jobs.in_flight.has_answers, jobs.submitted_in_backward))

                for index in reversed(range(len(gradients))):
                    # The last block only: there are slots for few more than the blocks of a step.
                    if index == 0 and is_late:
                        wait_for(are_done)
                        os.kill(direct.parts.rank.worker.pid, signal.SIGSTOP)
                    direct.receive(index, gradients[index], last=True)
                direct.join()
                if not is_late:
                    wait_for(are_done)
                # Or the last block's prediction would be right.
                direct.training.max_norm = 0.5
                direct.step.step()
                direct.training.max_norm = 1.0
                if is_late:
                    os.kill(direct.parts.rank.worker.pid, signal.SIGCONT)
                direct.fetch()
                shown.append([flat.clone() for flat in direct.shown])
    assert kinds == {
        Tentative.NONE,
        Tentative.CORRECTION,
        Tentative.TRUE_IF_KNOWN if dtype == "float32" else Tentative.PREDICTED,
    }
    torch.testing.assert_close(shown[:4], shown[4:], rtol=0, atol=0)


@pytest.mark.usefixtures("same_blocks")
@pytest.mark.parametrize(
    ("keys", "of_copies"),
    [
        ({"clip_prediction": True, "accumulate_on": "host"}, {}),
        ({"overlap_step": False}, {}),
        ({"max_norm": 1e6}, {"overlap_step": False}),
    ],
    ids=["predicted, on the host", "at the end", "true factors"],
)
def test_steps_that_do_not_end_and_workers_that_die(keys: dict[str, Any], of_copies: dict[str, Any]) -> None:
    """The weights of every forward pass are those of copies, with predicted clip factors or without."""
    options = {"max_norm": 30.0, "loss_scale": 4.0, "max_worker_restarts": 1000, **EXACT_KEYS, **keys}
    with direct_step([random_tensors(50)], **{**options, **of_copies}) as copies:
        expected = train(copies)
    for deaths in (0, 0.3):
        with direct_step([random_tensors(50)], in_place=True, **options) as direct:
            assert_same_training(train(direct, deaths), expected)
            restarts = direct.parts.rank.telemetry.worker_restarts
        assert (restarts > 5) == (deaths > 0)
        # The arena is freed, the weights are not.
        assert all(map(torch.equal, direct.shown, expected[-1][-len(direct.shown) :]))


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
