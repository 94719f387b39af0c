"""Geometry of a rank's ZeRO partition: slices, tiles, and the blocks that the worker updates. Pure functions.

The terms are those of the glossary in docs/how_it_works.md. DeepSpeed keeps one flat partition per parameter group; here they are
concatenated, and elements are counted from the start of the first. ZeRO cuts parameters at arbitrary elements. A parameter of n dimensions
is viewed as [out, rest], its first dimension against all others; those of fewer than two dimensions have no columns to select.

Blocks end between rows where they can. Where the weights are published in place, blocks end at the multiples of a length instead, padding
included: the new weights of all blocks, one behind the other, are then those of the partition.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from typing_extensions import Self


def column_count(columns: int, topk_ratio: float) -> int:
    """Number of device-owned columns of a matrix."""
    return 0 if topk_ratio == 0 else max(1, round(topk_ratio * columns))


def row_length(shape: Sequence[int]) -> int:
    """Elements in a row of a parameter's [out, rest] view; 0 for fewer than two dimensions, or without elements."""
    return math.prod(shape[1:]) if len(shape) > 1 and shape[0] > 0 else 0


STATE_BYTES = 12
"""Of an element's fp32 state: master weight and two moments."""

ALIGNMENT = 64
"""In elements. Parameter groups start at multiples of it, so that every state array starts on a cache line."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The part of one parameter that lies in this rank's partition."""

    parameter: int
    """Index over all parameter groups, in DeepSpeed's order; the same on every rank."""
    param_group: int
    begin: int
    """First element in the partition."""
    start: int
    """Offset of that element in the flattened parameter."""
    numel: int
    columns: int
    """Elements in a row of the [out, rest] view; 1 for parameters of fewer than two dimensions."""
    is_matrix: bool
    """The parameter has columns to select."""

    @classmethod
    def of(cls, shape: Sequence[int], **place: int) -> Self:
        """The slice of a parameter of this shape; `place` has the other fields."""
        columns = row_length(shape)
        return cls(columns=columns or 1, is_matrix=columns > 0, **place)

    @cached_property
    def end(self) -> int:
        """One past the last element in the partition."""
        return self.begin + self.numel


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A rectangle of one slice, contiguous in the partition."""

    slice: int
    """Index into `Partition.slices`."""
    begin: int
    """First element in the partition."""
    rows: int
    first_column: int
    """First column of the rectangle in the [out, rest] view; 0 for full rows."""
    width: int

    @cached_property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.width

    @cached_property
    def end(self) -> int:
        """One past the last element in the partition."""
        return self.begin + self.numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Elements [begin, end) of one update job; alignment padding may lie between its tiles."""

    begin: int
    end: int
    tiles: tuple[int, ...]
    """Indexes into `Partition.tiles`; none where the block is padding."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One rank's partition, cut into blocks."""

    slices: tuple[Slice, ...]
    tiles: tuple[Tile, ...]
    blocks: tuple[Block, ...]
    group_begins: tuple[int, ...]
    """First element of each parameter group."""
    numel: int
    """Length of the state arrays: elements including padding."""
    block_length: int | None = None
    """Of all blocks but the last one, where they are cut at its multiples; otherwise None."""

    @cached_property
    def tiles_by_slice(self) -> Sequence[Sequence[int]]:
        """For each slice the indexes of its tiles."""
        found: list[list[int]] = [[] for _ in self.slices]
        for index, tile in enumerate(self.tiles):
            found[tile.slice].append(index)
        return found


def round_up(value: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def group_begins(partition_sizes: Sequence[int]) -> tuple[int, ...]:
    """First element of each parameter group, for the lengths of DeepSpeed's flat partitions, of which there is at least one."""
    return tuple(accumulate(partition_sizes[:-1], lambda begin, size: round_up(begin + size), initial=0))


def build_partition(
    slices: Sequence[Slice], partition_sizes: Sequence[int], n_blocks: int, *, multiple: int | None = None
) -> Partition:
    """Cuts a rank's slices, ascending and disjoint, into `n_blocks` blocks of nearly equal size, or fewer if there are fewer elements.
    `partition_sizes` include padding; `multiple` is that of `Partition.block_length`, None: blocks end between rows where they can.
    """
    begins = group_begins(partition_sizes)
    numel = begins[-1] + round_up(partition_sizes[-1])
    length = None if multiple is None else max(1, -(-numel // (n_blocks * multiple))) * multiple
    tiles, blocks = cut_between_rows(slices, n_blocks) if length is None else cut_at_multiples(slices, numel, length)
    return Partition(
        slices=tuple(slices),
        tiles=tuple(tiles),
        blocks=tuple(blocks),
        group_begins=begins,
        numel=numel,
        block_length=length,
    )


def cut_between_rows(slices: Sequence[Slice], n_blocks: int) -> tuple[list[Tile], list[Block]]:
    """Tiles of slices and blocks of tiles, with about as many elements of slices in each block."""
    total = sum(s.numel for s in slices)
    rest = deque(tile for index, s in enumerate(slices) for tile in tiles_of_slice(index, s))
    tiles: list[Tile] = []
    blocks: list[Block] = []
    taken = 0
    for number in range(1, n_blocks + 1):
        first, limit = len(tiles), total * number // n_blocks
        while taken < limit:
            tile, *remainder = split_tile(rest.popleft(), limit - taken)
            rest.extendleft(remainder)
            tiles.append(tile)
            taken += tile.numel
        if first < len(tiles):
            blocks.append(Block(begin=tiles[first].begin, end=tiles[-1].end, tiles=tuple(range(first, len(tiles)))))
    return tiles, blocks


def cut_at_multiples(slices: Sequence[Slice], numel: int, length: int) -> tuple[list[Tile], list[Block]]:
    """Tiles of slices, and blocks that are cut at the multiples of `length` below `numel`, inside a row if need be."""
    tiles: list[Tile] = []
    blocks: list[Block] = []
    for block_begin in range(0, numel, length):
        first, block_end = len(tiles), min(block_begin + length, numel)
        for index, s in enumerate(slices):
            begin, end = max(s.begin, block_begin), min(s.end, block_end)
            if begin < end:
                part = replace(s, begin=begin, start=s.start + begin - s.begin, numel=end - begin)
                tiles += tiles_of_slice(index, part)
        blocks.append(Block(begin=block_begin, end=block_end, tiles=tuple(range(first, len(tiles)))))
    return tiles, blocks


def tiles_of_slice(index: int, s: Slice) -> list[Tile]:
    """Covers a slice by at most three tiles: the rest of a row, full rows, the start of a row."""
    rest = min(-s.start % s.columns, s.numel)
    rows, start = divmod(s.numel - rest, s.columns)
    rectangles = [(1, s.start % s.columns, rest), (rows, 0, s.columns), (1, 0, start)]
    begins = accumulate((rows * width for rows, _, width in rectangles), initial=s.begin)
    return [
        Tile(slice=index, begin=begin, rows=rows, first_column=first_column, width=width)
        for begin, (rows, first_column, width) in zip(begins, rectangles, strict=False)
        if rows * width > 0
    ]


def split_tile(tile: Tile, numel: int) -> list[Tile]:
    """Splits a tile behind nearly `numel` > 0 elements: between rows, or inside a single row. One part, if that is all."""
    if tile.rows == 1:
        width = min(numel, tile.width)
        head = replace(tile, width=width)
        rest = replace(tile, begin=head.end, first_column=tile.first_column + width, width=tile.width - width)
    else:
        rows = min(max(1, round(numel / tile.width)), tile.rows)
        head = replace(tile, rows=rows)
        rest = replace(tile, begin=head.end, rows=tile.rows - rows)
    return [part for part in (head, rest) if part.numel > 0]
