"""Position of the parameters in ZeRO's flat buffers, and the runs of elements that two such layouts have in common. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from typing_extensions import Self


class Part(NamedTuple):
    """Elements of a parameter that one rank has."""

    rank: int
    begin: int
    """First element, counted over the rank's part of the buffer."""
    numel: int


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Layout of one parameter group in stages 1 and 2: its flat buffer is cut into equal partitions of the ranks."""

    places: Mapping[str, tuple[int, int]]
    """For each parameter by name its first element in the buffer, and its elements."""
    partition_numel: int
    """Elements of each partition, padding included."""

    @classmethod
    def of(cls, numels: Mapping[str, int], paddings: Sequence[int], *, partition_numel: int) -> Self:
        """The layout of parameters in their order in the buffer, each with padding behind it."""
        ends = accumulate(n + padding for n, padding in zip(numels.values(), paddings, strict=True))
        places = {
            name: (end - padding - n, n) for (name, n), padding, end in zip(numels.items(), paddings, ends, strict=True)
        }
        return cls(places=places, partition_numel=partition_numel)

    def part_of(self, name: str, rank: int) -> tuple[int, int]:
        """First element and end of a parameter's part in a rank's partition, counted there; end <= first: none."""
        first, numel = self.places[name]
        begin = rank * self.partition_numel
        return max(first - begin, 0), min(first + numel - begin, self.partition_numel)

    def parts(self, name: str) -> Iterator[Part]:
        """The parts of a parameter, in its order."""
        first, numel = self.places[name]
        end = first + numel
        while first < end:
            rank, begin = divmod(first, self.partition_numel)
            n = min(end - first, self.partition_numel - begin)
            yield Part(rank, begin, n)
            first += n


@dataclass(frozen=True, kw_only=True)
class PieceLayout:
    """Layout of one sub-group in stage 3: each parameter is cut into equal pieces, one a rank, the last ones filled up with padding."""

    places: Mapping[str, tuple[int, int]]
    """For each parameter by name the first element of its piece, the same on every rank, and its elements on all ranks together."""
    n_ranks: int
    partition_numel: int
    """Elements of each rank's buffer, padding included."""

    @classmethod
    def of(cls, numels: Mapping[str, int], *, n_ranks: int) -> Self:
        """The layout of parameters in their order in the buffers."""
        ends = list(accumulate((-(-n // n_ranks) for n in numels.values()), initial=0))
        places = {name: (begin, n) for (name, n), begin in zip(numels.items(), ends, strict=False)}
        return cls(places=places, n_ranks=n_ranks, partition_numel=ends[-1])

    def parts(self, name: str) -> Iterator[Part]:
        """The parts of a parameter, in its order."""
        begin, numel = self.places[name]
        piece = -(-numel // self.n_ranks)
        for rank in range(self.n_ranks):
            if (n := min(piece, numel - rank * piece)) > 0:
                yield Part(rank, begin, n)


Layout = FlatLayout | PieceLayout


class Run(NamedTuple):
    """Elements that are adjacent in two layouts."""

    source_rank: int
    source_begin: int
    """First element, counted over that rank's part of the buffer."""
    target_rank: int
    target_begin: int
    numel: int


def runs(source: Layout, target: Layout) -> Iterator[Run]:
    """The runs of two layouts, of the parameters that both have, in the order of the target."""
    for name in target.places:
        if name in source.places:
            parts = source.parts(name)
            rank, begin, left = 0, 0, 0
            for target_rank, target_begin, numel in target.parts(name):
                end = target_begin + numel
                while target_begin < end:
                    if left == 0:
                        rank, begin, left = next(parts)
                    n = min(left, end - target_begin)
                    yield Run(rank, begin, target_rank, target_begin, n)
                    begin, left, target_begin = begin + n, left - n, target_begin + n
