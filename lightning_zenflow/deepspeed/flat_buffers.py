"""ZeRO's flat buffers: the order of their parameters, by which each rank's share is spread over the depth of the model; the position of the
parameters in them; and copies of what all ranks have, by the runs of elements that two layouts have in common.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_zenflow.core.partition import Slice, group_begins
from lightning_zenflow.core.saved_tensors import with_own_storage

_LARGE = 1 / 8
"""Of a rank's share. Parameters larger than this are placed first: beside one, a rank takes fewer of the others."""

_ACROSS = 1 / 2
"""Of a rank's share. Larger parameters are divided between two ranks."""

_CHUNK = 1 << 24
"""Elements that are copied at once: 64 MB of device memory where ranks exchange them."""


def balanced_order(numels: Sequence[int], n_ranks: int) -> list[int]:
    """Order of a flat buffer that is cut into equal parts, so that every rank gets gradients from the beginning of backward to its end.

    In the module's order, a rank's gradients arrive in one n-th of backward, and its worker has no more time than that. Here parameters are
    dealt out in backward's order, each to the rank that is then filled least, as a part of its room. Most stay whole: the equal cut moves
    the ends of the ranks' parts by less than a parameter.

    Args:
        numels: elements of each parameter, in the module's order, the reverse of which gradients are expected in.
        n_ranks: number of equal parts.

    Returns:
        Indexes into `numels`; in the order of the module where there is one rank.
    """
    share = sum(numels) / n_ranks
    room, filled = [share] * n_ranks, [0] * n_ranks
    own: list[list[int]] = [[] for _ in range(n_ranks)]
    across: list[list[int]] = [[] for _ in range(n_ranks)]  # between a rank and the next one
    backward = range(len(numels) - 1, -1, -1)
    for index in sorted(backward, key=lambda i: numels[i], reverse=True):
        numel = numels[index]
        if numel > _ACROSS * share and n_ranks > 1:
            rank = max(range(n_ranks - 1), key=lambda r: min(room[r], room[r + 1]))
            across[rank].append(index)
            room[rank] -= numel / 2
            room[rank + 1] -= numel / 2
        elif numel > _LARGE * share:
            rank = max(range(n_ranks), key=room.__getitem__)
            own[rank].append(index)
            room[rank] -= numel
    for index in backward:
        if numels[index] <= _LARGE * share:
            rank = min(range(n_ranks), key=lambda r: (filled[r] + numels[index]) / max(room[r], 1e-3 * share))
            own[rank].append(index)
            filled[rank] += numels[index]
    return [index for rank in range(n_ranks) for index in (*sorted(own[rank]), *across[rank])]


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
    """The runs of two layouts, of the parameters that both have, in the order of the target; of at most `_CHUNK` elements."""
    for name, target_parts in target.parts.items():
        if name in source.parts:
            parts = iter(source.parts[name])
            rank, begin, left = 0, 0, 0
            for target_rank, target_begin, numel in target_parts:
                end = target_begin + numel
                while target_begin < end:
                    if left == 0:
                        rank, begin, left = next(parts)
                    n = min(left, end - target_begin, _CHUNK)
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


class DiskCopies:
    """Memory of one save's copies: files without a name, mapped, of which the page cache may give memory back to others.

    Args:
        folder: on the file system that is to hold the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: list[tuple[mmap.mmap, range]] = []

    def zeros(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[numel], zeros, on the disk.

        Raises:
            OSError: the disk is full.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        with tempfile.TemporaryFile(dir=self._folder) as file:
            # A write to a page that a full disk has no place for would end the process.
            os.posix_fallocate(file.fileno(), 0, dtype.itemsize * numel)
            # By the descriptor: others who may write in the folder could put another file in the place of one with a name.
            memory = mmap.mmap(file.fileno(), 0)
        copied = torch.frombuffer(memory, dtype=dtype)
        self._mapped.append((memory, range(copied.data_ptr(), copied.data_ptr() + copied.nbytes)))
        return copied

    def has(self, address: int) -> bool:
        """Whether an address is in one of the copies."""
        return any(address in addresses for _, addresses in self._mapped)

    def free(self) -> None:
        """Gives the space back to the disk; all elements are zeros from now on. May be called again.

        Who has an error of a save refers to the copies, and torch's code for files leaves a cycle that does, until a collection.
        """
        for memory, _ in self._mapped:
            # Where a file system has no holes, the collection frees it.
            with suppress(OSError):
                memory.madvise(mmap.MADV_REMOVE)
        self._mapped.clear()


def parts_on_disk(disk: DiskCopies, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors on the disk, all in one file: each file takes a descriptor."""
    sizes = [shape.numel() for shape in shapes.values()]
    parts = zip(shapes.items(), torch.split(disk.zeros(sum(sizes), dtype), sizes), strict=True)
    return {name: with_own_storage(part.view(shape)) for (name, shape), part in parts}
