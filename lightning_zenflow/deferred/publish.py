"""Copies of published weights from the arena into the model, and the age of the model's weights."""

import dataclasses
from collections.abc import Collection, Iterable, Set
from contextlib import AbstractContextManager, nullcontext

import torch

from lightning_zenflow.core.partition import Partition, Range, merge_ranges, ranges_of_block
from lightning_zenflow.deferred.window import UpdateJob
from lightning_zenflow.telemetry.events import record_event
from lightning_zenflow.worker.rank_state import RankState

EXPOSED_COPIES = "h2d copies"
"""Name of the spans in the lane "h2d copies" that no computation hides."""


class Publisher:
    """Copies the weights of finished jobs into the model: during backward, a slice at a time, or at the end of the step.

    On a CUDA device, copies run on a stream of their own, beside the gradient copies (d2h) and the kernels of backward.
    """

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        device = rank.device
        self._stream: torch.cuda.Stream | None = (
            torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )
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

    def mark(self) -> torch.cuda.Event | None:
        """Event at the present end of the current stream; None where the device is the CPU."""
        if self._stream is None:
            return None
        return record_event()

    def upload(self, job: UpdateJob, slices: Collection[int]) -> int:
        """Copies the weights of some slices during backward, ordered behind all work enqueued on the current stream so far.

        Args:
            job: answered by the worker.
            slices: of the job's block; no kernel that is enqueued later in this step reads or updates their weights.

        Returns:
            Bytes copied.
        """
        ranges = (r for index in sorted(slices) for r in self._ranges[job.block][index])
        with self._beside():
            n_bytes = self._copy(job, ranges, "h2d copies, in backward")
        job.uploaded.update(slices)
        return n_bytes

    def finish(self, job: UpdateJob) -> None:
        """Copies what `upload` has left of an answered job, and orders the current stream behind all of its copies.

        Afterwards its publish buffer and slots may be reused in the order of the current stream.
        """
        if job.uploaded:
            self._wait()
        rest = (r for index, ranges in self._ranges[job.block].items() if index not in job.uploaded for r in ranges)
        if job.filled is None:
            self._copy(job, rest, EXPOSED_COPIES)
        else:
            with self._beside(job.filled):
                self._copy(job, rest, EXPOSED_COPIES)
            self._wait()
        self._exact_for[job.block] = job.window.last_step

    def _wait(self) -> None:
        """Orders the current stream behind the copies so far; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._rank.device).wait_stream(self._stream)

    def _beside(self, after: torch.cuda.Event | None = None) -> AbstractContextManager[object]:
        """The copy stream, ordered behind `after`, or behind the present end of the current stream."""
        if self._stream is None:
            return nullcontext()
        if after is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._rank.device))
        else:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

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
