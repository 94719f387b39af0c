"""Steps after an interrupted backward pass, without DeepSpeed: the same bits, no slot lost, and order on a device that runs behind."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.recorded_device.tensors import CPU, DEVICE
from benchmarks.recorded_device.watch import recorded_device
from direct_step import DirectStep
from lightning_zenflow.deferred.jobs import JobQueue
from lightning_zenflow.worker.supervisor import SupervisedWorker

SHAPES = ((12, 8), (5,), (3, 7), (6, 6))
SCHEDULES = [(1, 0), (1, 1), (4, 1)]


def random(seed: int, device: torch.device = CPU) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]


@contextmanager
def training(device: torch.device = CPU, **keys: Any) -> Iterator[DirectStep]:
    direct = DirectStep(random(0, device), topk_ratio=0, weight_prediction=0, provisional_scale=0, **keys)
    try:
        yield direct
    finally:
        direct.close()


def steps(direct: DirectStep, numbers: Sequence[int], device: torch.device = CPU) -> None:
    for number in numbers:
        direct.backward(random(number, device))
        join(direct)
        direct.step.step()


def interrupted(direct: DirectStep, seed: int, device: torch.device = CPU) -> None:
    """The backward pass of a step whose first gradient never comes."""
    gradients = random(seed, device)
    for index in reversed(range(1, len(gradients))):
        direct.step.receive(index, gradients[index].flatten(), last=True)
    join(direct)


def join(direct: DirectStep) -> None:
    """As `ZenFlowZeroOptimizer.reduce_ipg_grads`, behind the copies of gradients."""
    direct.parts.step.rank.d2h.join()


@pytest.mark.parametrize(("update_interval", "publish_lag"), SCHEDULES)
def test_interrupted_steps_take_no_slot_and_change_nothing(update_interval: int, publish_lag: int) -> None:
    states = []
    for n_interrupted in (0, 40):
        with training(update_interval=update_interval, publish_lag=publish_lag) as direct:
            steps(direct, (1, 2, 3))
            for number in range(n_interrupted):
                interrupted(direct, 100 + number)
                direct.step.flush()
            direct.step.flush()
            steps(direct, (4, 5, 6))
            direct.step.flush()
            states.append(direct.state())
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("update_interval", "publish_lag"), SCHEDULES)
def test_a_step_after_an_interrupted_one_is_in_order(
    update_interval: int, publish_lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that were read again after the interruption, and words that the worker waits for again."""
    # No answer comes in backward, so that its copies are left to the flush.
    monkeypatch.setattr(SupervisedWorker, "has_answered", lambda *_: False)
    with (
        recorded_device() as device,
        training(DEVICE, update_interval=update_interval, publish_lag=publish_lag) as direct,
    ):
        steps(direct, range(1, 6), DEVICE)
        interrupted(direct, 6, DEVICE)
        if publish_lag > 0:
            direct.weights.clone()
        direct.step.flush()
        steps(direct, range(6, 9), DEVICE)
        direct.step.flush()
    assert not device.order.races


def test_a_word_that_no_job_waits_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception between the word of a block and its job: the flush forgets the word when it has arrived."""
    write = JobQueue._write_word

    def interrupting(self: JobQueue, *arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(JobQueue, "_write_word", write)
        write(self, *arguments, **options)
        raise KeyboardInterrupt

    with recorded_device() as device, training(DEVICE, update_interval=1, publish_lag=0) as direct:
        steps(direct, (1, 2, 3), DEVICE)
        monkeypatch.setattr(JobQueue, "_write_word", interrupting)
        with pytest.raises(KeyboardInterrupt):
            direct.backward(random(4, DEVICE))
        join(direct)
        direct.step.flush()
        steps(direct, (4, 5), DEVICE)
        direct.step.flush()
    assert not device.order.races
    # The host's own writes are in no order that the device would record.
    assert "jobs._forget_words" in {o.place for o in device.order.operations if o.kind == "host wait"}
