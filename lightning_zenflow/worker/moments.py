"""AdamW's moments in the arena, read and written as floats whatever their type there.

In 8 bits each run of `TILE_ELEMENTS` of a tile has a scale (``csrc/adamw/moments_in_8_bits.h``). Here values are rounded to nearest.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.partition import Tile
from lightning_zenflow.native import TILE_ELEMENTS

_CHUNK = TILE_ELEMENTS << 14
"""Elements that are converted at once: 8 MB for each operation."""

_SMALLEST_SCALE = 2.0**-100
_RATIOS = (2.0**-40, 2.0**126)
"""Bounds of the scales of first moments."""


class Moment:
    """A moment, or the master weights, in a floating-point type: [numel of the partition]."""

    def __init__(self, array: Tensor) -> None:
        self.array = array

    def read(self, begin: int, numel: int) -> Tensor:
        """Elements [begin, begin + numel) of the partition: a view in the arena's type; of 8 bits, float32."""
        return self.array.narrow(0, begin, numel)

    def read_columns(self, begin: int, n_rows: int, width: int, columns: Tensor) -> Tensor:
        """As `read`, [n_rows, columns], int64 columns of the matrix [n_rows, width] that begins at `begin` and lies in one tile."""
        return self.array.narrow(0, begin, n_rows * width).view(n_rows, width).index_select(1, columns)

    def write(self, begin: int, values: Tensor) -> None:
        """Replaces elements from `begin` on by values of any floating-point type, which have whole tiles."""
        self.array.narrow(0, begin, len(values)).copy_(values)

    def stand_in(self, begin: int, numel: int) -> Tensor:
        """What the optimizer's state holds, which DeepSpeed takes views of: `read`, or NaN without memory where there is no view."""
        return self.read(begin, numel)


class _Part(NamedTuple):
    """A part of a tile, or single elements, and their scales."""

    elements: Any
    scales: Any
    skipped: int | None = None
    """Elements of the first scale that are not in the part; None: each of the elements has its own scale."""

    def of_elements(self, scales: Tensor) -> Tensor:
        """For each element its own of the part's scales."""
        if self.skipped is None:
            return scales
        spread = scales.repeat_interleave(TILE_ELEMENTS)
        return spread[self.skipped : self.skipped + self.elements.stop - self.elements.start]


class CodedMoments:
    """Both moments in 8 bits, [numel] int8 and uint8, and their scales, [n_scales, 2] float32. Operations are rounded as the worker's."""

    def __init__(self, exp_avg: Tensor, exp_avg_sq: Tensor, scales: Tensor, tiles: Sequence[Tile]) -> None:
        self.exp_avg, self.exp_avg_sq, self._scales = exp_avg, exp_avg_sq, scales
        self._tiles, self._begins = tiles, [tile.begin for tile in tiles]
        self._first_scales = first_scales(tiles)

    def parts(self, begin: int, end: int) -> Iterator[_Part]:
        """Parts of the tiles in [begin, end)."""
        for number in range(max(0, bisect_right(self._begins, begin) - 1), bisect_left(self._begins, end)):
            tile, scale = self._tiles[number], self._first_scales[number]
            for chunk in range(tile.begin, tile.end, _CHUNK):
                first, last = max(begin, chunk) - tile.begin, min(end, tile.end, chunk + _CHUNK) - tile.begin
                if first < last:
                    scales = slice(scale + first // TILE_ELEMENTS, scale - (-last // TILE_ELEMENTS))
                    yield _Part(slice(tile.begin + first, tile.begin + last), scales, first % TILE_ELEMENTS)

    def entries(self, elements: Tensor) -> _Part:
        """Some elements of one tile, [n] int64."""
        number = bisect_right(self._begins, int(elements[0])) - 1
        return _Part(elements, self._first_scales[number] + (elements - self._begins[number]) // TILE_ELEMENTS)

    def first(self, part: _Part) -> Tensor:
        """First moments, float32."""
        q = self.exp_avg[part.elements].float()
        return q * q.abs() * (1 / 127**2) * part.of_elements(self._scales[part.scales, 0]) * self._root(part)

    def second(self, part: _Part) -> Tensor:
        """Second moments, float32."""
        c = self.exp_avg_sq[part.elements].float()
        root = c * c * (1 / 255**2)
        return root * root * part.of_elements(self._scales[part.scales, 1])

    def set_first(self, part: _Part, values: Tensor) -> None:
        """Codes first moments, float32, beside roots of second ones, which are not left zero. NaN gets a scale of NaN."""
        beside = self.exp_avg_sq[part.elements]
        torch.maximum(beside, (values != 0).to(torch.uint8), out=beside)
        shares = self._rescale(part, 0, (values / self._root(part)).abs(), _RATIOS, rounded_bits=8)
        q = shares.sqrt().mul(127).add(0.5).nan_to_num(127, posinf=127).clamp(max=127).trunc()
        self.exp_avg[part.elements] = torch.copysign(q, values).to(torch.int8)

    def set_second(self, part: _Part, values: Tensor) -> None:
        """Codes second moments, float32. First ones keep their values, but for rounding, unless theirs is zero."""
        kept = self.first(part)
        shares = self._rescale(part, 1, values, (_SMALLEST_SCALE, torch.finfo(torch.float32).max))
        c = shares.sqrt().sqrt().mul(255).nan_to_num(255, posinf=255).clamp(max=255).round()
        self.exp_avg_sq[part.elements] = torch.maximum(c, (values > 0).float()).to(torch.uint8)
        self.set_first(part, torch.where(values == 0, 0, kept))

    def _root(self, part: _Part) -> Tensor:
        """Of second moments, at least that of code 1."""
        c = self.exp_avg_sq[part.elements].float().clamp(min=1)
        # A new arena has scales of zero. torch's vectorised root of float32 is not always rounded right.
        scales = self._scales[part.scales, 1].double().clamp(min=_SMALLEST_SCALE).sqrt().float()
        return c * c * (1 / 255**2) * part.of_elements(scales)

    def _rescale(
        self, part: _Part, moment: int, magnitudes: Tensor, bounds: tuple[float, float], rounded_bits: int = 0
    ) -> Tensor:
        """Gives a part new scales, whose last bits are rounded; returns the magnitudes' shares of them."""
        rows = torch.nn.functional.pad(magnitudes, (0, -len(magnitudes) % TILE_ELEMENTS)).view(-1, TILE_ELEMENTS)
        largest = rows.amax(1, keepdim=True)
        # Unlike `clamp`, keeps NaN.
        for bound, is_beyond in zip(bounds, (torch.lt, torch.gt), strict=True):
            largest[is_beyond(largest, bound)] = bound
        bits = largest.view(torch.int32) + (1 << rounded_bits >> 1)
        scales = (bits >> rounded_bits << rounded_bits).view(torch.float32)
        self._scales[part.scales, moment] = scales.squeeze(1)
        return (rows * scales.reciprocal()).view(-1)[: len(magnitudes)]


class CodedMoment(Moment):
    """One of `CodedMoments`. What both have been read as finds its codes again if the second moment is written first."""

    def __init__(self, moments: CodedMoments, *, is_first: bool) -> None:
        super().__init__(moments.exp_avg if is_first else moments.exp_avg_sq)
        self._moments, self._is_first = moments, is_first
        self._decode = moments.first if is_first else moments.second

    @override
    def read(self, begin: int, numel: int) -> Tensor:
        values = torch.zeros(numel, dtype=torch.float32, device="cpu")  # padding has no tile
        for part in self._moments.parts(begin, begin + numel):
            values[part.elements.start - begin : part.elements.stop - begin] = self._decode(part)
        return values

    @override
    def read_columns(self, begin: int, n_rows: int, width: int, columns: Tensor) -> Tensor:
        rows = torch.arange(begin, begin + n_rows * width, width, dtype=torch.int64, device="cpu")
        elements = rows.unsqueeze(1) + columns
        return self._decode(self._moments.entries(elements.view(-1))).view(elements.shape)

    @override
    def write(self, begin: int, values: Tensor) -> None:
        encode = self._moments.set_first if self._is_first else self._moments.set_second
        for part in self._moments.parts(begin, begin + len(values)):
            encode(part, values[part.elements.start - begin : part.elements.stop - begin].float())

    @override
    def stand_in(self, begin: int, numel: int) -> Tensor:
        return torch.full((1,), torch.nan, dtype=torch.float32, device="cpu").expand(numel)


def first_scales(tiles: Sequence[Tile]) -> list[int]:
    """For each tile the index of its first scale, and at the end their number."""
    return list(accumulate((-(-tile.numel // TILE_ELEMENTS) for tile in tiles), initial=0))
