"""What `JobQueue` keeps of gradients on their way: open windows, jobs in flight, and how the one becomes the other."""

from dataclasses import dataclass, field

import torch

from lightning_zenflow.native.protocol import Rule
from lightning_zenflow.schedule.compensation import StalenessCompensation
from lightning_zenflow.telemetry.counters import Completion


@dataclass(kw_only=True)
class Window:
    """The open window of one block: one slot for each step since the last hand-over."""

    first_step: int
    slots: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class UpdateJob:
    """A closed window on its way through the worker."""

    job_id: int
    block: int
    last_step: int
    """Of the steps that it applies."""
    due_step: int
    slots: list[int]
    publish_buffer: int
    filled: torch.cuda.Event | None = None
    """Of an early round on a CUDA device: when its block's gradient had been copied, and its weights were not read any more in the step."""
    completion: Completion | None = None
    """The worker's answer, once it has been read."""
    early: set[int] = field(default_factory=set)
    """Slices whose weights have been copied into the model in backward."""


@dataclass(kw_only=True)
class JobCounts:
    """Numbers that only grow."""

    bytes_in_backward: int = 0
    """Published weights that were copied in backward; part of `Traffic.h2d_bytes`."""
    gradients: int = 0
    """Gradients (one step's, of one block) that have become visible in the model's weights."""
    age_steps: int = 0
    """Sum over these of the steps between the gradient's own and the one at whose end it became visible."""


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """How the worker turns windows into weights."""

    rule: Rule
    prediction: StalenessCompensation
    """How far weights run ahead of the exact ones."""

    @property
    def exact(self) -> bool:
        """Whether host-owned weights are the master weights of some step at all times."""
        return not (self.prediction.looks_ahead or self.prediction.moves)
