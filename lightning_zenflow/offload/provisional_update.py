"""Provisional updates of host-owned weights: applied during backward, replaced by the next publish."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import Slice
from lightning_zenflow.core.schedule import StaggeredSchedule, StalenessCompensation, UpdateSchedule
from lightning_zenflow.core.step_inputs import StepScale
from lightning_zenflow.kernels.base import Destination, Factors, RoundingNoise, SecondMoment, SquaredNorms
from lightning_zenflow.offload.rank_state import Block, RankState, StepContext

_SEED = 20251205


@dataclass(kw_only=True, slots=True)
class Update:
    """A provisional update of a slice's full rows or of a part of them, without its size."""

    step: int
    weights: Tensor
    """[rows, width]; of the model."""
    gradient: Tensor
    """[rows, width], model dtype; on the device, or in the slot of the step."""
    factors: Factors
    beta1: float
    """Decay of the first moment in the step."""
    in_slot: bool = False
    """Whether the gradient must be copied to the device first."""

    def part(self, place: Destination) -> "Update":
        """The update of one tile; itself, where that has all rows."""
        if place.slot.shape == self.weights.shape:
            return self
        rows, width = place.slot.shape
        row, column = divmod(place.begin, self.weights.shape[1])
        factors = Factors(
            row_scale=self.factors.row_scale.narrow(0, row, rows),
            col_scale=self.factors.col_scale.narrow(1, column, width),
            finite=self.factors.finite,
        )
        weights, gradient = place.part_of(self.weights), place.part_of(self.gradient)
        return replace(self, weights=weights, gradient=gradient, factors=factors)


class ProvisionalUpdate:
    """Updates the host-owned weights of a rank during backward (`kernels.base`).

    Where a job in flight overwrites a block's weights at the end of the step, the update is *kept* and applied behind that publish. Its
    gradient stays on the device where the device has room; otherwise it is copied back from its slot in host memory.

    Matrices only, and of them full rows: the at most two rows of a slice that ZeRO's partition cuts wait for their publish. Device-owned
    entries are updated as well, and overwritten by their exact values in the same step. Before any step has been applied, a step updates
    nothing here, and its gradient is not in the second moment, so that an unclipped one never is. Ranks use different rounding noise.
    """

    def __init__(self, rank: RankState, compensation: StalenessCompensation) -> None:
        self._rank = rank
        self._compensation = compensation
        number = 0 if rank.group is None else dist.get_rank(rank.group)
        self._noise = RoundingNoise(_SEED + number, rank.device)
        self._clip = torch.full((), torch.nan, dtype=torch.float32, device=rank.device)
        # On the gradients of the open step. Both stay in their memory: backward and the step use different streams.
        self._factor = self._clip.clone()
        # For each slice its full rows in the model, [rows, columns].
        self._rows = [_full_rows(s, rank.weights_at(s.param_group, s.begin, s.numel)) for s in rank.partition.slices]
        # By slice, from the first gradient that is late on: a run that stays at S = 1, d = 0 has none.
        self._moments: dict[int, SecondMoment] = {}
        self._keeps_on_device: dict[StaggeredSchedule, bool] = {}
        # Since the last flush: for blocks with late gradients the last step that their weights are exact for, not counting provisional
        # updates; and the updates that are applied again after a publish.
        self._exact_for: dict[Block, int] = {}
        self._kept: dict[Block, list[Update]] = {}

    def open(self, loss_scale: float) -> None:
        """Begins a step, before its first gradient."""
        torch.div(self._clip, loss_scale, out=self._factor)

    def forget_weights(self) -> None:
        """Drops the memory of the weights, and what was kept for updates of them, when training has ended."""
        self._rows = [None for _ in self._rows]
        self.flushed()

    def applies_to(self, slice_index: int) -> bool:
        """Whether a slice has rows to update."""
        return self._rows[slice_index] is not None

    def apply_gradient(
        self,
        context: StepContext,
        slice_index: int,
        gradient: Tensor,
        squared_norms: SquaredNorms,
        late: Sequence[tuple[Block, Destination]],
    ) -> None:
        """Updates the weights of a slice that it `applies_to`: now, or after the publish of a job in flight. The gradient, [rows, columns],
        is of the slice's full rows; its memory may be reused after the work that this call enqueues. `late` has for each of their tiles the
        block, and the part of the rows with the gradient's slot, but for resident blocks.
        """
        step, schedule = context.number, context.schedule
        rows, h = self._rows[slice_index], context.inputs.groups[self._rank.partition.slices[slice_index].param_group]
        assert rows is not None
        factors = self._rank.kernels.factored_step_(
            self._moment(slice_index), squared_norms, beta2=h.beta2, lr=h.lr, scale=self._factor
        )
        whole = Update(step=step, weights=rows, gradient=gradient, factors=factors, beta1=h.beta1)
        # The age: gradients that the block's weights lack, this one included.
        of_tiles = [(step - self._exact_for.setdefault(block, step - 1), block.is_overwritten) for block, _ in late]
        is_whole = sum(place.slot.numel() for _, place in late) == rows.numel()
        if is_whole and len(set(of_tiles)) == 1 and not of_tiles[0][1]:
            self._apply(whole, of_tiles[0][0], schedule)
            return
        for (block, place), (age, is_overwritten) in zip(late, of_tiles, strict=True):
            update = whole.part(place)
            if is_overwritten:
                self._keep(block, update, place.slot, schedule)
            else:
                self._apply(update, age, schedule)

    def end_step(self, scale: StepScale, loss_scale: float) -> None:
        """Keeps the clip coefficient of a step that was applied."""
        self._clip.copy_(torch.where(scale.finite, scale.factor * loss_scale, self._clip))

    def published(self, last_steps: Mapping[Block, int], schedule: StaggeredSchedule) -> None:
        """Applies kept updates, but for those that the published weights have. `last_steps` has for each published block the last step that
        its weights are exact for.
        """
        for block, last in last_steps.items():
            self._exact_for[block] = last
            for update in self._kept.pop(block, ()):
                if update.step > last:
                    ready = update
                    if update.in_slot:
                        self._rank.d2h.join()
                        ready = replace(update, gradient=update.gradient.to(self._rank.device, non_blocking=True))
                        self._rank.telemetry.h2d_bytes += update.gradient.nbytes
                    self._apply(ready, update.step - last, schedule)

    def flushed(self) -> None:
        """Drops all kept updates: all weights are exact."""
        self._kept.clear()
        self._exact_for.clear()

    def state_dict(self) -> dict[str, Any]:
        """Second moments, last clip coefficient and position in the rounding noise, on the CPU."""
        return {
            "second_moments": [
                tuple(t.cpu() for t in self._moments[index]) if index in self._moments else None
                for index in range(len(self._rows))
            ],
            "clip": self._clip.cpu(),
            "noise": self._noise.offsets.getstate(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`, for the same slices."""
        self._moments.clear()
        for index, saved in enumerate(state["second_moments"]):
            for ours, theirs in () if saved is None else zip(self._moment(index), saved, strict=True):
                ours.copy_(theirs)
        self._clip.copy_(state["clip"])
        self._noise.offsets.setstate(state["noise"])

    def _keep(self, block: Block, update: Update, slot: Tensor, schedule: StaggeredSchedule) -> None:
        """Keeps an update of a tile whose block has a job in flight, with the gradient in its slot or a copy of it."""
        runtime = runtime_of(self._rank.device)
        if not runtime.runs_behind:
            # The memory of a CPU device is the slots'.
            update.gradient = slot
        else:
            if schedule not in self._keeps_on_device:
                n_bytes = self._rank.partition.numel * self._rank.dtype.itemsize * schedule.kept_share
                self._keeps_on_device[schedule] = runtime.room() >= n_bytes
            update.in_slot = not self._keeps_on_device[schedule]
            update.gradient = slot if update.in_slot else update.gradient.clone()
        self._kept.setdefault(block, []).append(update)

    def _moment(self, slice_index: int) -> SecondMoment:
        """The second moment of a slice; makes it, without any step in it."""
        if slice_index not in self._moments:
            full_rows = self._rows[slice_index]
            assert full_rows is not None
            rows, columns = full_rows.shape
            self._moments[slice_index] = SecondMoment.zeros(rows, columns, full_rows.device)
        return self._moments[slice_index]

    def _apply(self, update: Update, age: int, schedule: UpdateSchedule) -> None:
        size = self._compensation.scale(schedule, update.beta1, age)
        self._rank.kernels.provisional_update_(update.weights, update.gradient, update.factors, self._noise, size=size)


def _full_rows(s: Slice, weights: Tensor) -> Tensor | None:
    """Full rows of a slice; None where there are too few: a single row or column has no factored second moment."""
    offset = -s.start % s.columns
    rows = (s.numel - offset) // s.columns
    if not s.is_matrix or rows < 2 or s.columns < 2:
        return None
    return weights.narrow(0, offset, rows * s.columns).view(rows, s.columns)
