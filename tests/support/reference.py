"""The oracle: ZenFlow's rules in one process, one step at a time, in plain torch.

It has no slots, jobs, buffers or worker: the rules need none. Gradients change the exact state in order, whatever weights they were
computed at, so there is one exact state after each step, AdamW's. ZenFlow only decides *which step's* exact weights the model shows at each
element: `ReferenceZenFlow` keeps every step's exact weights and, for each element, the number of the step that is shown.

From the package it takes `build_partition` alone, and of its result the block of each element: blocks may be cut between any two rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zenflow.core.partition import Slice, align, build_partition
from lightning_zenflow.deepspeed.flat_buffers import balanced_order


@dataclass(frozen=True, kw_only=True)
class Group:
    """Hyperparameters of one parameter group in one step."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """True: AdamW; False: Adam, the decay is added to the gradient."""


@dataclass(kw_only=True)
class AdamWState:
    """AdamW's state; each list has one entry a parameter."""

    weights: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    count: int = 0
    """Steps that were applied."""
    skipped: int = 0
    """Steps whose gradient norm was not finite: they changed nothing."""

    @classmethod
    def start(cls, weights: Sequence[Tensor], dtype: torch.dtype) -> "AdamWState":
        """Zero moments, weights in `dtype`."""
        copies = [w.detach().to(dtype, copy=True) for w in weights]
        return cls(
            weights=copies,
            exp_avg=[torch.zeros_like(w) for w in copies],
            exp_avg_sq=[torch.zeros_like(w) for w in copies],
        )

    def step(self, gradients: Sequence[Tensor], groups: Sequence[Group], *, max_norm: float = 0.0) -> float:
        """One step of AdamW: one gradient and one group a parameter; clips by the norm of all gradients where `max_norm` is not 0.

        Returns:
            The factor on the gradients; NaN where their norm is not finite.
        """
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
        if not torch.isfinite(norm):
            self.skipped += 1
            return math.nan
        self.count += 1
        clip = 1 / max(1.0, (norm.item() + 1e-6) / max_norm) if max_norm else 1.0
        for i, (gradient, h) in enumerate(zip(gradients, groups, strict=True)):
            w, m, v = self.weights[i], self.exp_avg[i], self.exp_avg_sq[i]
            g = gradient.to(w.dtype) * clip
            if h.decoupled:
                w = w - h.lr * h.weight_decay * w
            else:
                g = g + h.weight_decay * w
            m = h.beta1 * m + (1 - h.beta1) * g
            v = h.beta2 * v + (1 - h.beta2) * g * g
            m_hat = m / (1 - h.beta1**self.count)
            v_hat = v / (1 - h.beta2**self.count)
            self.weights[i] = w - h.lr * m_hat / (v_hat.sqrt() + h.eps)
            self.exp_avg[i], self.exp_avg_sq[i] = m, v
        return clip


def adamw_reference(
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    groups: Sequence[Sequence[Group]],
    *,
    max_norm: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> AdamWState:
    """AdamW on a fixed sequence of gradients.

    Args:
        weights: one tensor a parameter.
        gradients: for each step, one tensor a parameter.
        groups: for each step, one group a parameter.
        max_norm: largest norm of the whole gradient; 0 means no clipping.
        dtype: of the arithmetic and of the result.
    """
    state = AdamWState.start(weights, dtype)
    for of_step, groups_of_step in zip(gradients, groups, strict=True):
        state.step(of_step, groups_of_step, max_norm=max_norm)
    return state


def factored_second_moment(gradients: Sequence[Tensor], *, beta2: float) -> tuple[Tensor, Tensor]:
    """Running means of the squares of each row and of each column of a matrix's gradients, [rows, columns] each, in float64."""
    row = column = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        squares = gradient.double().square()
        row = beta2 * row + (1 - beta2) * squares.mean(1)
        column = beta2 * column + (1 - beta2) * squares.mean(0)
    return row, column


def pieces_of_rank(
    groups: Sequence[Sequence[Tensor]], rank: int, world_size: int, sub_group_size: int
) -> tuple[list[Slice], list[int]]:
    """As `slices_of_rank`, under ZeRO-3: each parameter is cut into equal pieces, and each parameter group into sub-groups.

    A sub-group ends with the piece by which it has `sub_group_size` elements or more.
    """
    slices: list[Slice] = []
    sizes = [0]
    first, number = 0, 0
    for parameters in groups:
        for p in parameters:
            if sizes[-1] >= sub_group_size or (p is parameters[0] and number > 0):
                first = align(first + sizes[-1])
                sizes.append(0)
            piece = -(-p.numel() // world_size)
            numel = min(piece, p.numel() - rank * piece)
            if numel > 0:
                is_matrix = p.dim() > 1
                slices.append(
                    Slice(
                        parameter=number,
                        param_group=len(sizes) - 1,
                        begin=first + sizes[-1],
                        start=rank * piece,
                        numel=numel,
                        columns=p[0].numel() if is_matrix else 1,
                        is_matrix=is_matrix,
                    )
                )
            sizes[-1] += piece
            number += 1
    return slices, sizes


def slices_of_rank(groups: Sequence[Sequence[Tensor]], rank: int, world_size: int) -> tuple[list[Slice], list[int]]:
    """Slices of one rank's partition, and the size of its part of each parameter group.

    ZeRO-2 lays a parameter group's tensors end to end, in the order of `balanced_order`, pads the run to a multiple of 2 x ranks and gives
    each rank an equal part of it.
    """
    sizes = [-(-sum(p.numel() for p in parameters) // (2 * world_size)) * 2 for parameters in groups]
    slices, first, number = [], 0, 0
    for param_group, (parameters, size) in enumerate(zip(groups, sizes, strict=True)):
        offset = -rank * size  # of the parameter, from where the rank's part begins
        for index in balanced_order([p.numel() for p in parameters], world_size):
            p = parameters[index]
            begin, end = max(offset, 0), min(offset + p.numel(), size)
            if begin < end:
                is_matrix = p.dim() > 1
                slices.append(
                    Slice(
                        parameter=number + index,
                        param_group=param_group,
                        begin=first + begin,
                        start=begin - offset,
                        numel=end - begin,
                        columns=p[0].numel() if is_matrix else 1,
                        is_matrix=is_matrix,
                    )
                )
            offset += p.numel()
        number += len(parameters)
        first = align(first + size)
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
    blocks, indices, scales = (
        [torch.full((p.numel(),), -1) for parameters in groups for p in parameters] for _ in range(3)
    )
    for rank in range(world_size):
        if sub_group_size:
            slices, sizes = pieces_of_rank(groups, rank, world_size, sub_group_size)
        else:
            slices, sizes = slices_of_rank(groups, rank, world_size)
        partition = build_partition(slices, sizes, n_blocks)
        ends = torch.tensor([block.end for block in partition.blocks])
        scale_of = torch.full((partition.numel,), -1)
        for tile in partition.tiles:
            runs = torch.arange(tile.numel) // 128
            scale_of[tile.begin : tile.end] = int(scale_of.max()) + 1 + runs
        for s in slices:
            places = torch.arange(s.begin, s.begin + s.numel)
            indices[s.parameter][s.start : s.start + s.numel] = places
            blocks[s.parameter][s.start : s.start + s.numel] = torch.searchsorted(ends, places, right=True)
            scales[s.parameter][s.start : s.start + s.numel] = scale_of[places] * world_size + rank
    assert all((places >= 0).all() for places in (*blocks, *indices, *scales))
    shapes = [p.shape for parameters in groups for p in parameters]
    of_blocks, of_indices, of_scales = (
        [x.view(shape) for x, shape in zip(of, shapes, strict=True)] for of in (blocks, indices, scales)
    )
    return of_blocks, of_indices, of_scales


def owned_elements(gradient: Tensor, topk_ratio: float) -> Tensor:
    """Which elements of a parameter the device owns if they are selected by this gradient: bool, of its shape."""
    if topk_ratio == 0 or topk_ratio == 1 or gradient.dim() < 2:
        return torch.full(gradient.shape, topk_ratio > 0)
    matrix = gradient.reshape(gradient.shape[0], -1)
    squared_norms = matrix.double().square().sum(0).tolist()
    best_first = sorted(range(len(squared_norms)), key=lambda column: (-squared_norms[column], column))
    chosen = best_first[: max(1, round(topk_ratio * len(best_first)))]
    owned = torch.zeros_like(matrix, dtype=torch.bool)
    owned[:, chosen] = True
    return owned.view(gradient.shape)


@dataclass(kw_only=True)
class ReferenceZenFlow:
    """The oracle of a training under ZenFlow.

    Args:
        module: a `models.TestModule` in the type it is trained in; its parameters always hold the weights that ZenFlow shows.
        hyperparameters: of each parameter group, for a step counted from 0.
    """

    module: Any
    hyperparameters: Callable[[int], Sequence[Group]]
    topk_ratio: float
    update_interval: int
    publish_lag: int
    warm_up: int = 0
    accumulate: int = 1
    max_norm: float = 0.0
    world_size: int = 1
    sub_group_size: int = 0
    """Of ZeRO-3; 0: ZeRO-2."""

    steps: int = 0
    """Steps done."""
    exact: list[list[Tensor]] = field(default_factory=list)
    """[step][parameter]: the exact weights after each step; entry 0 holds the initial ones."""
    owned: list[Tensor] | None = None
    """For each parameter, which elements the device owns; None until they are selected."""

    def __post_init__(self) -> None:
        self.parameter_groups: list[list[nn.Parameter]] = self.module.parameter_groups()
        self.parameters = [p for parameters in self.parameter_groups for p in parameters]
        self.state = AdamWState.start(self.parameters, torch.float32)
        self.exact.append(list(self.state.weights))
        self.blocks = self.places(self.update_interval)[0]
        self.shown_step = [torch.zeros(p.shape, dtype=torch.int64) for p in self.parameters]
        """For each parameter and element, the step whose exact weight the model shows."""

    def places(self, n_blocks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """As `places_of_elements`."""
        return places_of_elements(self.parameter_groups, n_blocks, self.world_size, self.sub_group_size)

    def step(self) -> list[list[float]]:
        """One optimizer step.

        Returns:
            The losses, [micro-batch][rank].
        """
        losses, gradients = self.gradients()
        groups = self.hyperparameters(self.steps)
        of_parameters = [h for h, of_group in zip(groups, self.parameter_groups, strict=True) for _ in of_group]
        skipped_before = self.state.skipped
        self.state.step(gradients, of_parameters, max_norm=self.max_norm)
        self.steps += 1
        self.exact.append(list(self.state.weights))

        warm_up = max(self.warm_up, 1 if self.topk_ratio > 0 else 0)
        selecting = self.topk_ratio > 0 and self.steps >= warm_up and self.owned is None
        if self.steps <= warm_up or selecting:
            self._publish_everything()
        else:
            self._publish_what_is_due()
        # A step that was skipped says nothing about columns: the next one selects instead.
        if selecting and self.state.skipped == skipped_before:
            self.owned = [owned_elements(g, self.topk_ratio) for g in gradients]
        self._show()
        return losses

    def flush(self) -> None:
        """Closes all windows and shows the exact weights."""
        self._publish_everything()
        self._show()

    def follow(self, shown: Sequence[Tensor]) -> None:
        """Takes the weights of another run for the next step's gradient, so that rounding differences do not grow with the steps."""
        with torch.no_grad():
            for p, theirs in zip(self.parameters, shown, strict=True):
                p.copy_(theirs)

    def gradients(self) -> tuple[list[list[float]], list[Tensor]]:
        """Losses, and the mean over ranks of the gradients at the shown weights, summed over micro-batches in the model's type."""
        losses: list[list[float]] = []
        total: list[Tensor | None] = [None] * len(self.parameters)
        for micro in range(self.accumulate):
            losses.append([])
            of_ranks = []
            for rank in range(self.world_size):
                loss = self.module.loss(self.steps, micro, rank)
                losses[-1].append(loss.item())
                self.module.zero_grad()
                (loss / self.accumulate).backward()
                of_ranks.append([p.grad for p in self.parameters])
            for i, gradients in enumerate(zip(*of_ranks, strict=True)):
                if gradients[0] is not None:
                    mean = torch.stack([g / self.world_size for g in gradients]).sum(0)
                    so_far = total[i]
                    total[i] = mean if so_far is None else so_far + mean
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(total, self.parameters, strict=True)]
        return losses, [g.detach() for g in filled]

    def _publish_everything(self) -> None:
        for shown_step in self.shown_step:
            shown_step.fill_(self.steps)

    def _publish_what_is_due(self) -> None:
        """Blocks that were submitted `publish_lag` steps ago; and, always, what the device owns."""
        submitted = self.steps - self.publish_lag
        for i, (shown_step, block) in enumerate(zip(self.shown_step, self.blocks, strict=True)):
            # Where everything was published since then, the window was closed early and nothing is left to publish.
            due = (block % self.update_interval == submitted % self.update_interval) & (shown_step < submitted)
            shown_step[due] = submitted
            if self.owned is not None:
                shown_step[self.owned[i]] = self.steps

    def _show(self) -> None:
        with torch.no_grad():
            for i, p in enumerate(self.parameters):
                history = torch.stack([weights[i] for weights in self.exact])
                p.copy_(history.gather(0, self.shown_step[i].unsqueeze(0)).squeeze(0))
