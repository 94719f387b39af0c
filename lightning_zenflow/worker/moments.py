"""AdamW's moments in the arena, read and written as floats whatever their type there.

With ``moments_dtype: int8`` each run of 128 elements of a tile has a scale. ``csrc/replay/moments_in_8_bits.h`` has the code; here values
are rounded to nearest, as loaded ones are.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.partition import Partition, Tile
from lightning_zenflow.native.protocol import TILE_ELEMENTS

_CHUNK = TILE_ELEMENTS << 14
"""Elements that are converted at once: 8 MB for each operation."""

_SMALLEST_SCALE = 2.0**-100


class Moment:
    """A moment, or the master weights, in a floating-point type.

    Args:
        array: [numel of the partition].
    """

    def __init__(self, array: Tensor) -> None:
        self.array = array

    def read(self, begin: int, numel: int) -> Tensor:
        """Elements [begin, begin + numel) of the partition: a view in the arena's type where that has one, otherwise float32."""
        return self.array.narrow(0, begin, numel)

    def write(self, begin: int, values: Tensor) -> None:
        """Replaces elements from `begin` on by values of any floating-point type; each tile of the partition is in all or none of them."""
        self.array.narrow(0, begin, len(values)).copy_(values)

    def stand_in(self, begin: int, numel: int) -> Tensor:
        """What the optimizer's state holds, which DeepSpeed takes views of: `read`, or NaN of no memory where there is no view."""
        return self.read(begin, numel)


class CodedMoment(Moment):
    """A moment in 8 bits.

    Args:
        codes: [numel] int8 for the first moment, uint8 for the second.
        scales: [n_scales] float32.
        tiles: of the partition.
    """

    def __init__(self, codes: Tensor, scales: Tensor, tiles: Sequence[Tile]) -> None:
        super().__init__(codes)
        self._scales = scales
        self._is_signed = codes.dtype == torch.int8
        self._tiles, self._begins = tiles, [tile.begin for tile in tiles]
        self._first_scales = first_scales(tiles)

    @override
    def read(self, begin: int, numel: int) -> Tensor:
        values = torch.zeros(numel)  # padding has no tile
        for tile, scale, first, last in self._chunks(begin, begin + numel):
            i, j = (first - tile) // TILE_ELEMENTS, -(-(last - tile) // TILE_ELEMENTS)
            scales = self._scales[scale + i : scale + j].repeat_interleave(TILE_ELEMENTS)
            shares = self._decode(self.array[first:last])
            skipped = first - tile - i * TILE_ELEMENTS
            torch.mul(shares, scales[skipped : skipped + last - first], out=values[first - begin : last - begin])
        return values

    @override
    def write(self, begin: int, values: Tensor) -> None:
        for tile, scale, first, last in self._chunks(begin, begin + len(values)):
            i = (first - tile) // TILE_ELEMENTS
            chunk = values[first - begin : last - begin].float()
            rows = torch.nn.functional.pad(chunk, (0, -len(chunk) % TILE_ELEMENTS)).view(-1, TILE_ELEMENTS)
            largest = rows.abs().amax(1, keepdim=True)
            largest[largest.isinf()] = torch.finfo(torch.float32).max
            # Unlike `clamp`, keeps NaN.
            largest[largest < _SMALLEST_SCALE] = _SMALLEST_SCALE
            self._scales[scale + i : scale + i + len(rows)] = largest.squeeze(1)
            self.array[first:last] = self._encode(rows, largest.reciprocal()).view(-1)[: last - first]

    @override
    def stand_in(self, begin: int, numel: int) -> Tensor:
        return torch.full((1,), torch.nan).expand(numel)

    def _chunks(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Parts of tiles in [begin, end): first element and first scale of the tile, and the bounds of the part. Parts begin with a scale,
        but for the first one of all.
        """
        for number in range(max(0, bisect_right(self._begins, begin) - 1), len(self._tiles)):
            tile = self._tiles[number]
            if tile.begin >= end:
                break
            for chunk in range(tile.begin, tile.end, _CHUNK):
                first, last = max(begin, chunk), min(end, tile.end, chunk + _CHUNK)
                if first < last:
                    yield tile.begin, self._first_scales[number], first, last

    def _decode(self, codes: Tensor) -> Tensor:
        """Shares of the scale, float32, each operation rounded as the worker's."""
        c = codes.float()
        if self._is_signed:
            return c * c.abs() * (1 / 127**2)
        root = c * c * (1 / 255**2)
        return root * root

    def _encode(self, values: Tensor, inverse: Tensor) -> Tensor:
        """Codes of values, given the inverse of their scales; NaN gets some code, beside a scale of NaN."""
        if self._is_signed:
            q = (values.abs() * inverse).sqrt().mul(127).add(0.5).nan_to_num(127, posinf=127).clamp(max=127).trunc()
            return torch.copysign(q, values).to(torch.int8)
        c = (values * inverse).sqrt().sqrt().mul(255).nan_to_num(255, posinf=255).clamp(max=255).round()
        return torch.maximum(c, (values > 0).float()).to(torch.uint8)


def first_scales(tiles: Sequence[Tile]) -> list[int]:
    """For each tile the index of its first scale, and at the end their number."""
    return list(accumulate((-(-tile.numel // TILE_ELEMENTS) for tile in tiles), initial=0))


def n_scales(partition: Partition, dtype: torch.dtype) -> int:
    """Number of scales that moments of this type have, for each of the two."""
    return first_scales(partition.tiles)[-1] if dtype == torch.int8 else 0
