"""Position of the parameters in ZeRO's flat buffers, and the runs of elements that two such layouts have in common. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Layout of one parameter group: its flat buffer is cut into equal partitions of the ranks."""

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


class Run(NamedTuple):
    """Elements that are adjacent in two layouts."""

    source_rank: int
    source_begin: int
    """First element, counted over the partition of that rank."""
    target_rank: int
    target_begin: int
    numel: int


def runs(source: FlatLayout, target: FlatLayout) -> Iterator[Run]:
    """The runs of two layouts of the same parameters, in the order of the target."""
    for name, (first, numel) in target.places.items():
        shift, end = source.places[name][0] - first, first + numel
        while first < end:
            source_rank, source_begin = divmod(first + shift, source.partition_numel)
            target_rank, target_begin = divmod(first, target.partition_numel)
            n = min(end - first, source.partition_numel - source_begin, target.partition_numel - target_begin)
            yield Run(source_rank, source_begin, target_rank, target_begin, n)
            first += n
