"""A training on given gradients with steps that clip, overflow or do not end, and with workers that die."""

import os
import random
import signal
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from direct_step import DirectStep
from recorded_device.tensors import CPU

SHAPES = ((131, 61), (8, 3, 3, 50), (53, 71), (370,), (3, 1511), (1,), (5, 2, 2))
"""In place of eight to eleven blocks, which end inside rows."""
EVENTS = ["step", "step", "clipped", "step", "step", "clipped", "flush", "step", "not finite", "step", "interrupted"]
EVENTS += ["step", "step", "accumulated", "interrupted", "clipped", "interrupted", "interrupted", "accumulated"]
EVENTS += ["not finite in the end", "flush", "clipped", "interrupted behind the norm", "step", "step"]


def random_tensors(seed: int, device: torch.device = CPU, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    """Weights, or gradients of one step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def train(direct: DirectStep, deaths: float = 0) -> list[list[Tensor]]:
    """Runs `EVENTS` with weights of `SHAPES`.

    Args:
        direct: the step. Its largest norm is 1 in clipped steps.
        deaths: probability that the worker is killed, before each gradient and each end of a step.

    Returns:
        What the model shows after each event, and the exact state at the end.
    """
    shown: list[list[Tensor]] = []
    draw, max_norm = random.Random(1), direct.training.max_norm

    def kill() -> None:
        if draw.random() < deaths:
            # So that it may be anywhere in what it has been given.
            time.sleep(draw.uniform(0, 0.001))
            os.kill(direct.parts.rank.worker.current.pid, signal.SIGKILL)

    for number, event in enumerate(EVENTS):
        gradients = random_tensors(number)
        if event.startswith("not finite"):
            gradients[0 if event == "not finite in the end" else 3][7] = torch.nan
        direct.training.max_norm = 1.0 if event == "clipped" else max_norm
        if event == "accumulated":
            direct.backward(random_tensors(100 + number), last=False)
        for index in reversed(range(2 if event == "interrupted" else 0, len(SHAPES) if event != "flush" else 0)):
            kill()
            direct.receive(index, gradients[index], last=True)
        direct.join()
        if event == "interrupted behind the norm":
            direct.step.gradient_norm()
        kill()
        if event in ("flush", "interrupted", "interrupted behind the norm"):
            direct.step.flush()
        else:
            direct.step.step()
        direct.fetch()
        shown.append([flat.clone() for flat in direct.shown])
    direct.step.flush()
    return [*shown, direct.state()]
