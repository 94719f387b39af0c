"""Provisional updates that come after a window but before its publish, which would undo them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_zenflow.stand_in import Move, StandIn


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """One move of some rows."""

    step: int
    move: Move
    first_row: int
    gradient: Tensor


class RepeatedMoves:
    """Repeats moves of later steps after a publish, in their order.

    A round that is published d steps after its window closed overwrites the weights with the exact state of its own steps. What the
    stand-in had moved in the d steps since then would be lost until the next publish: S steps later. Only the blocks that have a round in
    flight are concerned, so 2 d / S bytes a parameter are held where the gradient is not in host memory already.

    Args:
        stand_in: moves weights; None: nothing is ever kept.
    """

    def __init__(self, stand_in: StandIn | None) -> None:
        self._stand_in = stand_in
        self._kept: dict[int, list[_Kept]] = {}

    def keep(self, block: int, step: int, move: Move, first_row: int, gradient: Tensor) -> None:
        """Remembers a move of rows of a block that has a round in flight.

        Args:
            block: index into `Partition.blocks`.
            step: the gradient's.
            move: see `StandIn.apply`; so are `first_row` and `gradient`.
            first_row: see there.
            gradient: [rows, columns], model dtype, on the weights' device; must stay as it is until a round with `step` is published.
        """
        kept = _Kept(step=step, move=move, first_row=first_row, gradient=gradient)
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
                self._stand_in.apply(kept.move, kept.first_row, kept.gradient)
            if later:
                self._kept[block] = later

    def clear(self) -> None:
        """Forgets everything, after a flush."""
        self._kept.clear()
