"""Provisional updates that come after a window but before its publish, which would undo them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_zenflow.auto_schedule import Pace
from lightning_zenflow.device_memory import has_room
from lightning_zenflow.stand_in import Move, StandIn
from lightning_zenflow.traffic import Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """One move of a part of a slice."""

    step: int
    move: Move
    begin: int
    gradient: Tensor
    """[rows, width], on the device or in page-locked host memory."""


class RepeatedMoves:
    """Repeats moves of later steps after a publish, in their order.

    A round that is published d steps after its window closed overwrites the weights with the exact state of its own steps. What the
    stand-in had moved in the d steps since then would be lost until the next publish: S steps later. Only blocks with a round in flight
    are concerned, so the gradients to be kept are d / S times the model's. They stay on the device where it has room; otherwise they come
    back from the pages in host memory, which on a CPU are read where they are.

    Args:
        stand_in: moves weights; None: nothing is ever kept.
        n_bytes: of all of the rank's gradients.
        pace: the present S and d.
        traffic: where copied bytes are counted.
    """

    def __init__(self, stand_in: StandIn | None, n_bytes: int, pace: Callable[[], Pace], traffic: Traffic) -> None:
        self._stand_in = stand_in
        self._n_bytes = n_bytes
        self._pace = pace
        self._traffic = traffic
        self._on_device: dict[Pace, bool] = {}
        self._kept: dict[int, list[_Kept]] = {}

    def keep(self, block: int, step: int, move: Move, begin: int, gradient: Tensor, page: Tensor) -> None:
        """Remembers a move of a part of a block that has a round in flight; in backward.

        Args:
            block: index into `Partition.blocks`.
            step: the gradient's.
            move: see `StandIn.apply`; so is `begin`.
            begin: see there.
            gradient: [rows, width], model dtype, on the weights' device; its memory is used again after this call.
            page: the same on the host; stays as it is until a round with `step` is published, since it belongs to that round.
        """
        if gradient.device != page.device:
            pace = self._pace()
            if pace not in self._on_device:
                n_bytes = self._n_bytes * pace.publish_lag / pace.update_interval
                self._on_device[pace] = has_room(n_bytes, gradient.device)
            if self._on_device[pace]:
                page = gradient.clone()
        kept = _Kept(step=step, move=move, begin=begin, gradient=page)
        self._kept.setdefault(block, []).append(kept)

    def published(self, last_steps: Mapping[int, int]) -> None:
        """Moves what was just overwritten.

        Args:
            last_steps: for each published block the last step that its weights are exact for.
        """
        for block, last in last_steps.items():
            later = [kept for kept in self._kept.pop(block, ()) if kept.step > last]
            for kept in later:
                assert self._stand_in is not None, "it has made the move"
                gradient = kept.gradient.to(kept.move.factors.of_rows.device, non_blocking=True)
                if gradient is not kept.gradient:
                    self._traffic.up_bytes += gradient.numel() * gradient.element_size()
                self._stand_in.apply(kept.move, kept.begin, gradient, kept.step - last)
            if later:
                self._kept[block] = later

    def clear(self) -> None:
        """Forgets everything, after a flush."""
        self._kept.clear()
