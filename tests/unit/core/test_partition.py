"""How a rank's partition is cut: nothing lost, nothing twice, rectangles contiguous, blocks of equal size."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zenflow.core.partition import (
    ALIGNMENT,
    Partition,
    build_partition,
    group_begins,
)
from lightning_zenflow.core.schedule import blocks_wanted
from lightning_zenflow.offload.rank_state import runs_of
from oracle import places_of_elements, slices_of_rank

SHAPE = st.one_of(
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 12), st.integers(1, 30)),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
)
MODEL = st.lists(st.lists(SHAPE, min_size=1, max_size=4), min_size=1, max_size=3)


def check_tiles(partition: Partition) -> None:
    # Tiles cover the slices' elements, each of them once, in order.
    covered = [e for tile in partition.tiles for e in range(tile.begin, tile.end)]
    assert covered == [e for s in partition.slices for e in range(s.begin, s.end)]
    assert all(e < partition.numel for e in covered)
    for tile in partition.tiles:
        s = partition.slices[tile.slice]
        assert tile.numel > 0
        # The rectangle is contiguous: element (row, column) of the parameter's [out, rest] view lies where the formula says.
        assert (s.start + tile.begin - s.begin) % s.columns == tile.first_column
        assert tile.first_column + tile.width <= s.columns
        assert tile.rows == 1 or (tile.first_column == 0 and tile.width == s.columns)

    # Blocks hold all tiles, in order.
    assert [t for block in partition.blocks for t in block.tiles] == list(range(len(partition.tiles)))
    of_blocks = [(block, partition.tiles[t]) for block in partition.blocks for t in block.tiles]
    assert all(block.begin <= tile.begin and tile.end <= block.end for block, tile in of_blocks)
    assert all(a.end <= b.begin for a, b in zip(partition.blocks, partition.blocks[1:], strict=False))

    # Runs have the same elements, and are as long as they can be.
    group_of_element = {e: s.param_group for s in partition.slices for e in range(s.begin, s.end)}
    firsts = [(partition.tiles[first], n) for first, n in runs_of(partition, range(len(partition.tiles))).items()]
    runs = [(tile.begin, tile.begin + n, partition.slices[tile.slice].param_group) for tile, n in firsts]
    assert [(e, group) for begin, end, group in runs for e in range(begin, end)] == list(group_of_element.items())
    for (_, end, group), (begin, _, next_group) in pairwise(runs):
        assert end <= begin
        assert group != next_group or end < begin


def check(partition: Partition, n_blocks: int) -> None:
    check_tiles(partition)
    # No block is empty.
    assert partition.block_length is None
    assert len(partition.blocks) <= n_blocks
    for block in partition.blocks:
        assert (block.begin, block.end) == (partition.tiles[block.tiles[0]].begin, partition.tiles[block.tiles[-1]].end)

    # Cuts are at most one row away from equal shares.
    total = sum(s.numel for s in partition.slices)
    if total >= n_blocks:
        widest = max(tile.width for tile in partition.tiles)
        for block in partition.blocks:
            numel = sum(partition.tiles[t].numel for t in block.tiles)
            assert abs(numel - total / n_blocks) <= widest + 1, (numel, total / n_blocks)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(model=MODEL, ranks=st.integers(1, 4), n_blocks=st.integers(1, 9))
def test_any_partition(model: list[list[tuple[int, ...]]], ranks: int, n_blocks: int) -> None:
    """The oracle sees the same blocks."""
    groups = [[torch.zeros(shape) for shape in shapes] for shapes in model]
    blocks = [b.flatten().tolist() for b in places_of_elements(groups, n_blocks, ranks)[0]]
    for rank in range(ranks):
        slices, sizes = slices_of_rank(groups, rank, ranks)
        partition = build_partition(slices, sizes, n_blocks)
        assert partition.group_begins == group_begins(sizes)
        assert all(begin % ALIGNMENT == 0 for begin in partition.group_begins)
        check(partition, n_blocks)
        for number, block in enumerate(partition.blocks):
            for tile in (partition.tiles[t] for t in block.tiles):
                s = slices[tile.slice]
                first = s.start + tile.begin - s.begin
                assert blocks[s.parameter][first : first + tile.numel] == [number] * tile.numel


@settings(max_examples=100, deadline=None, derandomize=True)
@given(model=MODEL, ranks=st.integers(1, 4), n_blocks=st.integers(1, 9), multiple=st.sampled_from([1, 2, 5, 64, 1024]))
def test_blocks_of_one_length(model: list[list[tuple[int, ...]]], ranks: int, n_blocks: int, multiple: int) -> None:
    """Padding included, so that no element of the partition lies beside the blocks or between them."""
    groups = [[torch.zeros(shape) for shape in shapes] for shapes in model]
    for rank in range(ranks):
        partition = build_partition(*slices_of_rank(groups, rank, ranks), n_blocks, multiple=multiple)
        check_tiles(partition)
        length, numel = partition.block_length, partition.numel
        assert length is not None
        assert length % multiple == 0
        # As short as may be.
        assert (length - multiple) * n_blocks < numel <= length * n_blocks
        assert [block.begin for block in partition.blocks] == list(range(0, numel, length))
        assert [block.end for block in partition.blocks] == [
            min(e, numel) for e in range(length, numel + length, length)
        ]


@pytest.mark.parametrize("sizes", [[2], [2, 64]])
def test_nothing_but_padding(sizes: list[int]) -> None:
    partition = build_partition([], sizes, 4)
    assert partition.blocks == ()
    check_tiles(build_partition([], sizes, 4, multiple=64))
    assert partition.numel % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("intervals", "in_backward", "numel", "blocks"),
    [
        ([1], True, 0, 8),
        ([1], True, 11 << 19, 11),
        ([1, 2], True, 16 << 22, 16),
        ([1], True, (16 << 22) + 1, 17),
        ([1], True, 7_000_000_000, 64),
        ([4], False, 7_000_000_000, 4),
        ([80], True, 7_000_000_000, 80),
    ],
)
def test_number_of_blocks(intervals: list[int], in_backward: bool, numel: int, blocks: int) -> None:
    assert blocks_wanted(intervals, in_backward=in_backward, numel=numel) == blocks
