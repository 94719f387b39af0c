"""Copies of published weights from the arena into the model, and the age of the model's weights."""

import dataclasses
from collections.abc import Iterable, Set

import torch

from lightning_zenflow.core.device import Event, SideStream
from lightning_zenflow.core.partition import Partition, Range, merge_ranges, ranges_of_block
from lightning_zenflow.worker.rank_state import RankState

EXPOSED_COPIES = "h2d copies"
"""Name of the spans in the lane "h2d copies" that no computation hides."""


class Publisher:
    """Copies new weights of blocks from publish buffers into the model: during backward, slice by slice, or at the end of the step.

    Copies in backward run on a stream of their own, beside the gradient copies (d2h) and the kernels of backward. They are ordered behind
    an event, so a device that runs behind the host makes them in backward, even where the host enqueues them at the end of the step.
    """

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._copies = SideStream(rank.device)
        # For each block the last step that its weights are exact for, not counting provisional updates since then; None: after a flush.
        self._exact_for: list[int | None] = [None] * len(rank.partition.blocks)
        self.use(rank.partition)

    def use(self, partition: Partition) -> None:
        """Publishes the ranges of this partition from now on. It differs from `RankState.partition` in its ranges only."""
        # For each block its trained ranges by slice, divided at tiles.
        self._ranges: list[dict[int, list[Range]]] = [{} for _ in partition.blocks]
        for number, block in enumerate(partition.blocks):
            for r in ranges_of_block(partition, block):
                for tile in (partition.tiles[index] for index in block.tiles):
                    begin, end = max(r.begin, tile.begin), min(r.end, tile.end)
                    if begin < end:
                        part = dataclasses.replace(r, begin=begin, end=end)
                        self._ranges[number].setdefault(tile.slice, []).append(part)

    def trained_slices(self, block: int) -> Set[int]:
        """Slices that have a trained part in a block."""
        return self._ranges[block].keys()

    def age(self, block: int, step: int) -> int:
        """Gradients that a block's weights in the model lack, that of `step` included; 1 for weights exact up to the step before."""
        exact_for = self._exact_for[block]
        if exact_for is None:
            exact_for = self._exact_for[block] = step - 1
        return step - exact_for

    def forget_ages(self) -> None:
        """After a flush: all weights are exact."""
        self._exact_for = [None] * len(self._exact_for)

    def copy_behind(self, event: Event, block: int, buffer: int, slices: Iterable[int], name: str) -> int:
        """Copies the weights of some slices of a block on the stream of the copies, behind an event.

        Args:
            event: from which on no kernel of the step reads or updates these weights.
            block: index into `Partition.blocks`.
            buffer: publish buffer with the block's new weights.
            slices: of `trained_slices`.
            name: of the span.

        Returns:
            Bytes copied.
        """
        with self._copies.behind(event):
            return self._copy(block, buffer, slices, name)

    def copied(self) -> Event:
        """An event behind all copies of `copy_behind`."""
        return self._copies.record_event()

    def finish(self, block: int, buffer: int, rest: Iterable[int], *, last_step: int, joins: bool) -> None:
        """Copies the slices that `copy_behind` has left, and orders the current stream behind all of the block's copies.

        Args:
            block: index into `Partition.blocks`.
            buffer: publish buffer with the block's new weights. It may be reused afterwards, in the order of the current stream.
            rest: slices that are left.
            last_step: the last step that the new weights are exact for.
            joins: whether `copy_behind` has copied any.
        """
        if joins:
            self._copies.join()
        self._copy(block, buffer, rest, EXPOSED_COPIES)
        self._exact_for[block] = last_step

    def _copy(self, block: int, buffer: int, slices: Iterable[int], name: str) -> int:
        first = self._rank.partition.blocks[block].begin
        new_weights = self._rank.arena.publish[buffer]
        targets, sources, numel = [], [], 0
        for r in merge_ranges(r for index in sorted(slices) for r in self._ranges[block][index]):
            targets.append(self._rank.weights_at(r.param_group, r.begin, r.numel))
            sources.append(new_weights.narrow(0, r.begin - first, r.numel))
            numel += r.numel
        n_bytes = numel * new_weights.element_size()
        if targets:
            with self._rank.telemetry.tracer.span("h2d copies", name, n_bytes=n_bytes):
                torch._foreach_copy_(targets, sources, non_blocking=True)
        self._rank.telemetry.traffic.h2d_bytes += n_bytes
        return n_bytes
