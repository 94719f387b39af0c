"""Copies of published weights from the arena into the model, and the age of the model's weights."""

import dataclasses
from collections.abc import Iterable, Set

import torch

from lightning_zenflow.core.device import SideStream
from lightning_zenflow.core.partition import Partition, Range, merge_ranges, ranges_of_block
from lightning_zenflow.deferred.window import UpdateJob
from lightning_zenflow.worker.rank_state import RankState

EXPOSED_COPIES = "h2d copies"
"""Name of the spans in the lane "h2d copies" that no computation hides."""


class Publisher:
    """Copies the weights of finished jobs into the model: during backward, slice by slice, or at the end of the step.

    Copies run on a stream of their own, beside the gradient copies (d2h) and the kernels of backward. A slice's copy is ordered behind the
    event in backward from which on no kernel of the step reads its weights (`UpdateJob.unread`), so a device that runs behind the host
    makes it there, even where the host enqueues it at the end of the step.
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

    def age(self, tile_index: int, step: int) -> int:
        """Gradients that a tile's weights in the model lack, that of `step` included; 1 for weights exact up to the step before."""
        block = self._rank.partition.block_of_tile[tile_index]
        exact_for = self._exact_for[block]
        if exact_for is None:
            exact_for = self._exact_for[block] = step - 1
        return step - exact_for

    def forget_ages(self) -> None:
        """After a flush: all weights are exact."""
        self._exact_for = [None] * len(self._exact_for)

    def upload(self, job: UpdateJob) -> int:
        """Copies the weights of the slices that the step does not read any more; in backward.

        Args:
            job: answered by the worker. Its `copied` is set with the last slices.

        Returns:
            Bytes copied.
        """
        n_bytes = self._copy_unread(job, "h2d copies, in backward")
        if job.copied is None and job.uploaded >= self.trained_slices(job.block):
            job.copied = self._copies.record_event()
        return n_bytes

    def finish(self, job: UpdateJob) -> None:
        """Copies what `upload` has left of an answered job, and orders the current stream behind all of its copies.

        Afterwards its publish buffer and slots may be reused in the order of the current stream.
        """
        self._copy_unread(job, EXPOSED_COPIES)
        if job.uploaded:
            self._copies.join()
        rest = self._ranges[job.block].keys() - job.uploaded
        self._copy(job, (r for index in sorted(rest) for r in self._ranges[job.block][index]), EXPOSED_COPIES)
        self._exact_for[job.block] = job.window.last_step

    def _copy_unread(self, job: UpdateJob, name: str) -> int:
        n_bytes = 0
        for event, slices in job.unread:
            with self._copies.behind(event):
                n_bytes += self._copy(job, (r for i in sorted(slices) for r in self._ranges[job.block][i]), name)
            job.uploaded |= slices
        job.unread.clear()
        return n_bytes

    def _copy(self, job: UpdateJob, ranges: Iterable[Range], name: str) -> int:
        first = self._rank.partition.blocks[job.block].begin
        new_weights = self._rank.arena.publish[job.publish_buffer]
        targets, sources, numel = [], [], 0
        for r in merge_ranges(ranges):
            targets.append(self._rank.weights_at(r.param_group, r.begin, r.numel))
            sources.append(new_weights.narrow(0, r.begin - first, r.numel))
            numel += r.numel
        n_bytes = numel * new_weights.element_size()
        if targets:
            with self._rank.telemetry.tracer.span("h2d copies", name, n_bytes=n_bytes):
                torch._foreach_copy_(targets, sources, non_blocking=True)
        self._rank.telemetry.traffic.h2d_bytes += n_bytes
        return n_bytes
