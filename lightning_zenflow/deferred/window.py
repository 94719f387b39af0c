"""Records of the deferred update: open windows, and update jobs in flight."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from lightning_zenflow.core.device import Event
from lightning_zenflow.telemetry.counters import Completion
from lightning_zenflow.worker.supervisor import Submission


@dataclass(kw_only=True)
class Window:
    """Open window of one block: one gradient slot for each step that is not committed to the block's state."""

    first_step: int
    slots: list[int] = field(default_factory=list)
    shown_until: int
    """Last step whose gradient the published weights have. `first_step`, where the job before applied that step tentatively; earlier than
    the step before it, where steps were committed by a job whose weights were not shown."""

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
    has_tentative: bool
    """Whether the window's last gradient is applied to the published weights only, and stays in the next window."""
    due_step: int
    """Step at whose end the weights are published."""
    publish_buffer: int
    is_shown: bool = True
    """Whether the weights are copied into the model."""
    submission: Submission
    """The job's message to the worker."""
    completion: Completion | None = None
    """The worker's answer, once `JobsInFlight` has taken it and the slots that are free with it."""
    held_slots: Sequence[int] = ()
    """Slots that become free with the job."""
    holds_buffer: bool = True
    """Whether the publish buffer is to be given back with the job."""
    unread: list[tuple[Event, Set[int]]] = field(default_factory=list)
    """Slices that are still to be copied, and the event from which on no kernel of the step in which the job is due reads or updates their
    weights."""
    uploaded: set[int] = field(default_factory=set)
    """Slices whose weights have been copied into the model behind such an event."""
    copied: Event | None = None
    """Behind the copies in backward, once all of the weights have been copied there."""


@dataclass(kw_only=True)
class JobCounts:
    """Counters of published jobs since the start."""

    bytes_in_backward: int = 0
    """Bytes of published weights that were copied during backward; part of `Traffic.h2d_bytes`."""
    in_backward: int = 0
    """Jobs that were submitted in backward."""
    late: int = 0
    """Those of them that were not done when the training thread ended their step; a CUDA device may have ended it later."""
    gradients: int = 0
    """Gradients (of one step and one block) that have become visible in the model's weights."""
    age_steps: int = 0
    """Sum, over these gradients, of the steps between the gradient's own step and the one at whose end it became visible."""

    def add(self, job: UpdateJob, step: int) -> None:
        """Adds a job that has been published at the end of `step`."""
        self.in_backward += job.has_tentative
        if job.is_shown:
            n = job.window.last_step - job.window.shown_until
            self.gradients += n
            self.age_steps += n * (step - job.window.last_step) + n * (n - 1) // 2
