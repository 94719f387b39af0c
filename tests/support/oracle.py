"""The oracle of a training: the reference (`zenflow_reference`) on the gradients of a test model, one step at a
time, in one process.

From the rest of the package it takes `build_partition`, and of the partition each element's block: blocks may be cut between any two rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zenflow.core.partition import Slice, build_partition, round_up
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.deepspeed.flat_buffers import balanced_order
from zenflow_reference import SynchronousZenFlow


def _slice(p: Tensor, **fields: int) -> Slice:
    is_matrix = p.dim() > 1
    return Slice(columns=p[0].numel() if is_matrix else 1, is_matrix=is_matrix, **fields)


def _pieces_of_rank(
    groups: Sequence[Sequence[Tensor]], rank: int, world_size: int, sub_group_size: int
) -> tuple[list[Slice], list[int]]:
    """Each parameter is cut into equal pieces, and each parameter group into sub-groups.

    A sub-group ends with the piece by which it has `sub_group_size` elements or more.
    """
    slices: list[Slice] = []
    sizes = [0]
    first, number = 0, 0
    for parameters in groups:
        for p in parameters:
            if sizes[-1] >= sub_group_size or (p is parameters[0] and number > 0):
                first = round_up(first + sizes[-1])
                sizes.append(0)
            piece = -(-p.numel() // world_size)
            numel = min(piece, p.numel() - rank * piece)
            if numel > 0:
                at = {"param_group": len(sizes) - 1, "begin": first + sizes[-1], "start": rank * piece}
                slices.append(_slice(p, parameter=number, numel=numel, **at))
            sizes[-1] += piece
            number += 1
    return slices, sizes


def slices_of_rank(
    groups: Sequence[Sequence[Tensor]], rank: int, world_size: int, sub_group_size: int = 0
) -> tuple[list[Slice], list[int]]:
    """Slices of one rank's partition, and the size of its part of each parameter group, or under ZeRO-3 of each sub-group.

    ZeRO-2 lays a parameter group's tensors end to end, in the order of `balanced_order`, pads the run to a multiple of 2 x ranks and gives
    each rank an equal part of it.
    """
    if sub_group_size:
        return _pieces_of_rank(groups, rank, world_size, sub_group_size)
    sizes = [-(-sum(p.numel() for p in parameters) // (2 * world_size)) * 2 for parameters in groups]
    slices, first, number = [], 0, 0
    for param_group, (parameters, size) in enumerate(zip(groups, sizes, strict=True)):
        offset = -rank * size  # of the parameter, from where the rank's part begins
        for index in balanced_order([p.numel() for p in parameters], world_size):
            p = parameters[index]
            begin, end = max(offset, 0), min(offset + p.numel(), size)
            if begin < end:
                at = {"param_group": param_group, "begin": first + begin, "start": begin - offset}
                slices.append(_slice(p, parameter=number + index, numel=end - begin, **at))
            offset += p.numel()
        number += len(parameters)
        first = round_up(first + size)
    return slices, sizes


def places_of_elements(
    groups: Sequence[Sequence[Tensor]], n_blocks: int, world_size: int, sub_group_size: int = 0
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """For each parameter, over all groups, each element's block and its index in the partition, both counted by the rank that holds it,
    and a number of the elements that it shares a scale with.

    Args:
        groups: parameters by group.
        n_blocks: wanted.
        world_size: number of ranks.
        sub_group_size: of ZeRO-3; 0: ZeRO-2.
    """
    found = [[torch.full(p.shape, -1) for parameters in groups for p in parameters] for _ in range(3)]
    for rank in range(world_size):
        slices, sizes = slices_of_rank(groups, rank, world_size, sub_group_size)
        partition = build_partition(slices, sizes, n_blocks)
        blocks, scales = torch.full((2, partition.numel), -1)
        for number, block in enumerate(partition.blocks):
            blocks[block.begin : block.end] = number
        for tile in partition.tiles:
            runs = torch.arange(tile.numel) // 128
            scales[tile.begin : tile.end] = int(scales.max()) + 1 + runs
        for tensors, values in zip(
            found, (blocks, torch.arange(partition.numel), scales * world_size + rank), strict=True
        ):
            to_parameters(tensors, slices, values)
    assert all((places >= 0).all() for of in found for places in of)
    blocks_of, indices, scales_of = found
    return blocks_of, indices, scales_of


def to_parameters(tensors: Sequence[Tensor], slices: Sequence[Slice], values: Tensor) -> None:
    """Copies a rank's values, [numel of the partition], to contiguous tensors with the shapes of all parameters."""
    for s in slices:
        tensors[s.parameter].view(-1)[s.start : s.start + s.numel] = values[s.begin : s.begin + s.numel]


@dataclass(kw_only=True)
class Oracle:
    """The oracle of a training under ZenFlow.

    Args:
        case: what is trained, a `cases.Case`.
        module: its model in the type it is trained in; its parameters always hold the weights that ZenFlow shows.
    """

    case: Any
    module: Any
    world_size: int = 1

    steps: int = 0
    """Steps done."""

    def __post_init__(self) -> None:
        self.parameter_groups: list[list[nn.Parameter]] = self.module.parameter_groups()
        self.parameters = [p for parameters in self.parameter_groups for p in parameters]
        self.zenflow = SynchronousZenFlow(
            weights=self.parameters,
            blocks=self.places(self.case.update_interval)[0],
            topk_ratio=self.case.topk_ratio,
            update_interval=self.case.update_interval,
            publish_lag=self.case.publish_lag,
            warm_up=self.case.warm_up,
            max_norm=self.case.max_norm or 0.0,
            select_interval=select if isinstance(select := self.case.keys()["select_interval"], int) else 0,
        )
        self._frozen: list[int] = []

    def places(self, n_blocks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """As `places_of_elements`."""
        return places_of_elements(self.parameter_groups, n_blocks, self.world_size, self.case.sub_group_size)

    def groups(self, step: int) -> list[GroupHyperparameters]:
        """Hyperparameters of each parameter in a step, counted from 0."""
        of_groups = zip(self.case.optimizer.groups(step), self.parameter_groups, strict=True)
        return [h for h, parameters in of_groups for _ in parameters]

    def follow_freezing(self) -> list[int]:
        """Parameters that the module freezes in the next step; where they change, the weights are exact."""
        self.module.on_train_batch_start(torch.tensor(0), self.steps * self.case.accumulate)
        frozen = [i for i, p in enumerate(self.parameters) if not p.requires_grad]
        if frozen != self._frozen:
            self.zenflow.start_over()
            self.show()
        # So that autograd goes through all that it goes through in the training.
        for p in self.parameters:
            p.requires_grad_()
        self._frozen = frozen
        return frozen

    def step(self, predicted: Sequence[Tensor] | None = None) -> list[list[float]]:
        """One optimizer step.

        Args:
            predicted: as of `SynchronousZenFlow.step`.

        Returns:
            The losses, [micro-batch][rank].
        """
        frozen = self.follow_freezing()
        losses, gradients = self.gradients()
        given = [None if i in frozen else g for i, g in enumerate(gradients)]
        self.zenflow.step(given, self.groups(self.steps), predicted)
        self.steps += 1
        self.show()
        return losses

    def flush(self) -> None:
        """Closes all windows and shows the exact weights."""
        self.zenflow.flush()
        self.show()

    def show(self) -> None:
        """Writes what is shown to the module."""
        self.follow(self.zenflow.shown)

    def follow(self, shown: Sequence[Tensor]) -> None:
        """Takes the weights of another run for the next step's gradient, so that rounding differences do not grow with the steps."""
        with torch.no_grad():
            for p, theirs in zip(self.parameters, shown, strict=True):
                p.copy_(theirs)

    def gradients(self) -> tuple[list[list[float]], list[Tensor]]:
        """Losses, and the mean over ranks of the gradients at the shown weights, summed over micro-batches in the model's type."""
        losses: list[list[float]] = []
        total: list[Tensor | None] = [None] * len(self.parameters)
        for micro in range(self.case.accumulate):
            losses.append([])
            of_ranks = []
            for rank in range(self.world_size):
                loss = self.module.loss(self.steps, micro, rank)
                losses[-1].append(loss.item())
                self.module.zero_grad()
                (loss / self.case.accumulate).backward()
                of_ranks.append([p.grad for p in self.parameters])
            for i, gradients in enumerate(zip(*of_ranks, strict=True)):
                if of_ranks_that_use_it := [g / self.world_size for g in gradients if g is not None]:
                    mean = torch.stack(of_ranks_that_use_it).sum(0)
                    so_far = total[i]
                    total[i] = mean if so_far is None else so_far + mean
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(total, self.parameters, strict=True)]
        return losses, [g.detach() for g in filled]
