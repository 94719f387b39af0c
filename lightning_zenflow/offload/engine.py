"""The optimizer around a training, DeepSpeed's or another one: what it gives at the start, and what it is asked for later."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_zenflow.core.partition import Slice
from lightning_zenflow.core.step_inputs import GroupHyperparameters


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """This rank's part of the training state, as the optimizer around the step holds it."""

    optimizer: Optimizer
    """The user's."""
    groups: Sequence[Mapping[str, Tensor]]
    """For each of its groups the parameters that are trained, by name; all of them, in this order, are what `Slice.parameter` counts."""
    shapes: Mapping[str, torch.Size]
    """Of the whole parameters, by name, in the same order."""
    piece_of: Callable[[Tensor], Tensor] | None = None
    """This rank's piece of a parameter that the ranks divide, with padding, or the parameter where it is whole, after training; None: all
    are whole."""
    masters: Sequence[Tensor]
    """The rank's flat fp32 partitions, parameters of the optimizer, whose memory is replaced by the arena's."""
    slices: Sequence[Slice]
    """Parts of the model's parameters that lie in the partitions."""
    weights: Sequence[Tensor]
    """For each flat partition the model's weights, which the values of `masters` equal. In place only their lengths and type count."""
    device: torch.device
    """Training device, on which the gradients are."""
    in_place: bool = False
    """Whether the weights are to be in host memory, where the worker writes them: `RankState.weights` then take the place of `weights`,
    until the arena is closed. Forked processes do not have that memory."""
    release_weights: Callable[[], None] | None = None
    """Frees the memory of the model's weights where they are to be in place: when the arena has master weights, before the rest of it takes
    memory."""
    group: dist.ProcessGroup | None
    """Data-parallel ranks; None: this one alone, without `torch.distributed`."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Those of all groups."""
        return {name: p for group in self.groups for name, p in group.items()}


class Engine(Protocol):
    """What a training asks of the optimizer around it."""

    loss_scale: float
    """Factor that the loss is multiplied by before backward."""

    def read_groups(self) -> list[GroupHyperparameters]:
        """Present hyperparameters of each flat partition; never waits for a device."""

    def gather_weights(self) -> None:
        """Exchanges the ranks' updated weights, where that is not done when they are used."""

    def take_weights(self) -> None:
        """Copies weights that are in place (`RankState.weights`) to memory of their own, before the arena's is freed; may be called in the
        middle of the engine's construction.
        """

    def join_reads(self) -> None:
        """Orders the training stream behind reads of weights on streams of the engine's."""

    def refuse_use(self) -> None:
        """Raises MisconfigurationException if no training can go on at present."""

    def refuse_other_backward(self) -> None:
        """Raises MisconfigurationException if there are gradients of a backward pass that the front has not begun."""

    def has_ended(self) -> None:
        """Called when the worker has ended."""
