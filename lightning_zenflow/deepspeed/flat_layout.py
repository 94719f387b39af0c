"""Position of the parameters in ZeRO's flat buffers: slices by it; runs of elements that two such layouts have in common; and copies by
these of what all ranks have. Pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_zenflow.core.partition import Slice, group_begins


class Part(NamedTuple):
    """Elements of a parameter that one rank has."""

    rank: int
    begin: int
    """First element, counted over the rank's part of the buffer."""
    numel: int


@dataclass(frozen=True)
class Layout:
    """Layout of a flat buffer, which belongs to a parameter group in stages 1 and 2, to a sub-group in stage 3."""

    parts: Mapping[str, Sequence[Part]]
    """For each parameter by name its parts, in its order; the parameters are in the order of the buffer."""
    partition_numel: int
    """Elements of each rank's part of the buffer, padding included."""

    @classmethod
    def of_partitions(cls, numels: Mapping[str, int], paddings: Sequence[int], *, partition_numel: int) -> Self:
        """The layout of stages 1 and 2: parameters with padding behind each, cut into equal partitions of the ranks."""
        parts, first = dict[str, list[Part]](), 0
        for (name, numel), padding in zip(numels.items(), paddings, strict=True):
            end, parts[name] = first + numel, []
            while first < end:
                rank, begin = divmod(first, partition_numel)
                n = min(end - first, partition_numel - begin)
                parts[name].append(Part(rank, begin, n))
                first += n
            first += padding
        return cls(parts, partition_numel)

    @classmethod
    def of_pieces(cls, numels: Mapping[str, int], *, n_ranks: int) -> Self:
        """The layout of stage 3: each parameter is cut into equal pieces, one a rank, the last ones filled up with padding."""
        parts, begin = dict[str, list[Part]](), 0
        for name, numel in numels.items():
            piece = -(-numel // n_ranks)
            left = [numel - rank * piece for rank in range(n_ranks)]
            parts[name] = [Part(rank, begin, min(piece, n)) for rank, n in enumerate(left) if n > 0]
            begin += piece
        return cls(parts, begin)


def slices_of(layouts: Sequence[Layout], shapes: Mapping[str, Sequence[int]], rank: int) -> list[Slice]:
    """Slices of a rank's partition, ascending. `Slice.param_group` counts the layouts, each of which is of a flat partition.

    Args:
        layouts: of all flat partitions.
        shapes: of the whole parameters by name, in the order in which `Slice.parameter` counts them.
        rank: the rank.
    """
    numbers = {name: number for number, name in enumerate(shapes)}
    begins = group_begins([layout.partition_numel for layout in layouts])
    slices = []
    for group, layout in enumerate(layouts):
        for name, parts in layout.parts.items():
            start = 0
            for part in parts:
                if part.rank == rank:
                    place = {"param_group": group, "begin": begins[group] + part.begin, "start": start}
                    slices.append(Slice.of(shapes[name], parameter=numbers[name], numel=part.numel, **place))
                start += part.numel
    return slices


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
    for name, target_parts in target.parts.items():
        if name in source.parts:
            parts = iter(source.parts[name])
            rank, begin, left = 0, 0, 0
            for target_rank, target_begin, numel in target_parts:
                end = target_begin + numel
                while target_begin < end:
                    if left == 0:
                        rank, begin, left = next(parts)
                    n = min(left, end - target_begin)
                    yield Run(rank, begin, target_rank, target_begin, n)
                    begin, left, target_begin = begin + n, left - n, target_begin + n


@torch.no_grad()  # master weights are saved with `requires_grad`
def copy_parts(
    read: Callable[[int], Sequence[Sequence[Tensor]]],
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    rank: int,
    to: Sequence[Sequence[Tensor]],
) -> None:
    """Copies a rank's part of what other ranks have, one of them at a time.

    Args:
        read: what a rank has: for each of `sources` its flat tensors, of any type.
        sources: layouts there.
        targets: layouts to copy to.
        rank: rank in `targets`.
        to: for each of `targets` as many tensors, [partition_numel]; padding is not written.
    """
    copies = [
        (run, s, t)
        for t, target in enumerate(targets)
        for s, source in enumerate(sources)
        for run in runs(source, target)
        if run.target_rank == rank
    ]
    for source_rank, of_rank in groupby(sorted(copies), key=lambda copy: copy[0].source_rank):
        saved = read(source_rank)
        for run, s, t in of_rank:
            for ours, theirs in zip(to[t], saved[s], strict=True):
                ours.narrow(0, run.target_begin, run.numel).copy_(theirs.narrow(0, run.source_begin, run.numel))
        # Nothing may refer to the file when the next one is read.
        del saved, theirs
