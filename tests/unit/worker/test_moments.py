"""Moments in 8 bits, read and written as floats: invariants over all codes and over scales of all exponents."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_zenflow.core.partition import Slice, Tile, build_partition
from lightning_zenflow.native import TILE_ELEMENTS
from lightning_zenflow.worker.moments import CodedMoment, CodedMoments, Moment, first_scales
from oracle import slices_of_rank


class Coded:
    """Both moments of a partition; of one parameter, where no tiles are given."""

    def __init__(self, numel: int, tiles: Sequence[Tile] | None = None) -> None:
        whole = Slice.of((numel,), parameter=0, param_group=0, begin=0, start=0, numel=numel)
        tiles = tiles or build_partition([whole], [numel], n_blocks=1).tiles
        self.codes = torch.zeros(numel, dtype=torch.int8), torch.zeros(numel, dtype=torch.uint8)
        self.scales = torch.zeros(first_scales(tiles)[-1], 2)
        both = CodedMoments(*self.codes, self.scales, tiles)
        self.first, self.second = (CodedMoment(both, is_first=is_first) for is_first in (True, False))
        self.numel = numel

    def read(self) -> tuple[Tensor, Tensor]:
        return self.first.read(0, self.numel), self.second.read(0, self.numel)

    def write(self, first: Tensor, second: Tensor) -> None:
        self.second.write(0, second)
        self.first.write(0, first)


def tiles_of_all_codes() -> tuple[Tensor, Tensor]:
    """[n, 128] codes of both moments: all pairs of a code of the second one with several of the first one, signs, and ends of the codes in
    each tile, which make its scales."""
    c = torch.arange(1, 256).repeat_interleave(127)
    q = torch.arange(1, 128).repeat(255) * torch.where(torch.arange(len(c)) % 2 == 0, 1, -1)
    n_tiles = -(-len(c) // (TILE_ELEMENTS - 3))
    filled = torch.zeros(2, n_tiles * (TILE_ELEMENTS - 3), dtype=torch.int64)
    filled[:, : len(c)] = torch.stack([q, c])
    ends = torch.tensor([[127, 0, -127], [255, 0, 1]])[:, None].expand(2, n_tiles, 3)
    return tuple(torch.cat([filled.view(2, n_tiles, -1), ends], 2))  # type: ignore[return-value]


@pytest.mark.parametrize("fraction", [1.0, 1.0 + 2.0**-15, 1.37, 2.0 - 2.0**-15])
def test_what_is_read_gets_its_codes_again(fraction: float) -> None:
    """All codes, all exponents of both scales whose first moments are finite; over moments of another training."""
    q, c = tiles_of_all_codes()
    coded, generator = Coded(q.numel()), torch.Generator().manual_seed(1)
    exponents = [(r, v) for v in range(-100, 128, 3) for r in range(-40, 126, 5) if r + v / 2 < 126]
    for first in range(0, len(exponents), len(q)):
        some = torch.tensor(exponents[first : first + len(q)])
        some = some[torch.arange(len(q)) % len(some)]
        ratio_scales, scales = fraction * 2.0 ** some[:, 0].double(), (2.0 - 2.0**-23) * 2.0 ** some[:, 1].double()
        ratio_scales = (ratio_scales * 2.0 ** (15 - some[:, 0])).round() * 2.0 ** (some[:, 0] - 15)
        coded.codes[0].copy_(q.flatten())
        coded.codes[1].copy_(c.flatten())
        coded.scales.copy_(torch.stack([ratio_scales, scales], 1))
        expected, read = [x.clone() for x in (*coded.codes, coded.scales)], coded.read()
        assert all(x.isfinite().all() for x in read)
        before = torch.randn(2, q.numel(), generator=generator)
        coded.write(before[0], before[1].square())
        coded.write(*read)
        for ours, theirs in zip((*coded.codes, coded.scales), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_columns() -> None:
    """Of a matrix behind another tile, from some row on; as all elements are read."""
    slices, sizes = slices_of_rank([[torch.empty(5, 41)], [torch.empty(300, 37)]], 0, 1)
    partition = build_partition(slices, sizes, n_blocks=1)
    coded, begin, generator = Coded(partition.numel, partition.tiles), slices[1].begin, torch.Generator().manual_seed(1)
    moments = torch.randn(2, partition.numel, generator=generator)
    coded.write(moments[0], moments[1].square())
    for moment in (coded.first, coded.second, Moment(moments[0].bfloat16())):
        rows = moment.read(begin, 300 * 37).view(300, 37)[7:207]
        columns = torch.tensor([0, 3, 36])
        assert torch.equal(moment.read_columns(begin + 7 * 37, 200, 37, columns), rows[:, columns])


def test_what_is_written_is_near() -> None:
    """In either order; the other moment stays near as well."""
    generator = torch.Generator().manual_seed(1)
    m, v = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator).square()
    for first_moment_first in (True, False):
        coded = Coded(1000)
        moments = [(coded.first, m), (coded.second, v)]
        for moment, values in moments if first_moment_first else reversed(moments):
            moment.write(0, values)
        for second in (v, 100 * v):
            coded.second.write(0, second)
            ours_m, ours_v = coded.read()
            assert ((ours_v / second).sqrt() - 1).abs()[second > 1e-4 * second.amax()].max() < 0.12
            assert ((ours_m - m) / ours_v.sqrt()).abs().max() < 0.05 * (m / ours_v.sqrt()).abs().max()
    coded.second.write(0, torch.zeros(1000))
    assert not torch.stack(coded.read()).any()  # no first moment beside a second one of zero ...
    coded.first.write(0, m)
    assert (coded.read()[1] > 0).all()  # ... unless it is written later
    coded.write(torch.zeros(1000), torch.zeros(1000))
    assert not torch.stack(coded.read()).any()


@pytest.mark.parametrize("value", [math.inf, math.nan, torch.finfo(torch.float32).max, 2.0**-149])
def test_extreme_values(value: float) -> None:
    """The tiles beside are not concerned; infinity becomes finite, NaN stays NaN, and the smallest second moment is not zero."""
    m, v = torch.full((3 * TILE_ELEMENTS,), 0.25), torch.full((3 * TILE_ELEMENTS,), 1.0)
    m[200] = v[300] = value
    coded = Coded(len(m))
    coded.write(m, v)
    ours_m, ours_v = coded.read()
    assert torch.equal(ours_m[:TILE_ELEMENTS], m[:TILE_ELEMENTS]) and torch.equal(ours_v[:256], v[:256])
    assert ours_m.isnan().any() == ours_v.isnan().any() == math.isnan(value)
    assert not ours_m.isinf().any() and not ours_v.isinf().any()
    assert math.isnan(value) or ours_v[300] > 0
    assert value < 2 or math.isnan(value) or ours_m[200] > 1e37
