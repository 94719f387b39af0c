"""Records of the deferred update: open windows, and update jobs in flight."""

from dataclasses import dataclass, field

import torch

from lightning_zenflow.telemetry.counters import Completion


@dataclass(kw_only=True)
class Window:
    """Open window of one block: one gradient slot for each step since its last submission."""

    first_step: int
    slots: list[int] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Last step whose gradient the window holds; the one before `first_step` where it holds none."""
        return self.first_step + len(self.slots) - 1


@dataclass(kw_only=True)
class UpdateJob:
    """A closed window, from its submission until its weights are in the model."""

    job_id: int
    block: int
    window: Window
    due_step: int
    """Step at whose end the weights are published."""
    publish_buffer: int
    filled: torch.cuda.Event | None = None
    """Of a job submitted in backward on a CUDA device: the block's gradient has been copied, and its weights are not read any more in the
    step."""
    completion: Completion | None = None
    """The worker's answer, once it has been read."""
    uploaded: set[int] = field(default_factory=set)
    """Slices whose weights have been copied into the model during backward."""


@dataclass(kw_only=True)
class JobCounts:
    """Counters of published jobs since the start."""

    bytes_in_backward: int = 0
    """Bytes of published weights that were copied during backward; part of `Traffic.h2d_bytes`."""
    gradients: int = 0
    """Gradients (of one step and one block) that have become visible in the model's weights."""
    age_steps: int = 0
    """Sum, over these gradients, of the steps between the gradient's own step and the one at whose end it became visible."""
