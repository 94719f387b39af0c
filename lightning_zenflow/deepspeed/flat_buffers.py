"""ZeRO's flat buffers: the order of their parameters, by which each rank's share is spread over the depth of the model; the position of the
parameters in them; and copies between ranks, by the runs of elements that two layouts have in common.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from lightning_zenflow.core.partition import Slice, group_begins
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.offload.run_state import MOMENTS
from lightning_zenflow.training import Training
from lightning_zenflow.worker.moments import CodedMoment

_LARGE = 1 / 8
"""Of a rank's share. Parameters larger than this are placed first: beside one, a rank takes fewer of the others."""

_ACROSS = 1 / 2
"""Of a rank's share. Larger parameters are divided between two ranks."""

_CHUNK = 1 << 24
"""Elements that are copied at once: 64 MB of device memory where ranks exchange them."""


def balanced_order(numels: Sequence[int], n_ranks: int) -> list[int]:
    """Order of a flat buffer that is cut into equal parts, so that every rank gets gradients from the beginning of backward to its end, and
    not in one n-th of backward, the time that its worker had then. Parameters are dealt out in backward's order, each to the rank that is
    filled least, as a part of its room. Most stay whole: the equal cut moves the ends of the ranks' parts by less than a parameter.

    `numels` has the elements of each parameter, in the module's order, the reverse of which gradients are expected in. Returns indexes
    into it; in the order of the module where there is one rank.
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
    """Slices of a rank's partition, ascending. `Slice.param_group` counts the layouts, and `Slice.parameter` the whole `shapes`."""
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
    """Copies the part of a `rank` in `targets` of what other ranks have, one of them at a time. `read` gives what a rank has: for each of
    `sources` its flat tensors, of any type; `to` has for each of `targets` as many, [partition_numel], whose padding is not written.
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


class ReorderedStates:
    """Copies of this rank's flat partitions for saves to folders, where DeepSpeed's files cannot have the arena's memory: states in another
    order, and moments without views. On the disk, since they would take as much memory as the states. `copies` has, during a save, for each
    flat partition those of the states, the moments last; None: DeepSpeed reads the arena.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._reserved: list[list[Tensor]] | None = None
        self.copies: list[list[Tensor]] | None = None

    def reserve(self, disk: DiskCopies, layouts: Sequence[Layout], saved_layouts: Sequence[Layout]) -> None:
        """Takes the disk space of a save, or raises OSError; the next step is `gather`."""
        self._reserved = None
        is_reordered = saved_layouts != layouts
        if is_reordered or isinstance(self._training.host_state.states[MOMENTS[0]], CodedMoment):
            n_states = is_reordered + len(MOMENTS)
            self._reserved = [[disk.zeros(layout.partition_numel) for _ in range(n_states)] for layout in saved_layouts]

    def gather(self, layouts: Sequence[Layout], saved_layouts: Sequence[Layout]) -> None:
        """Makes `copies` of the exact state; all ranks call it together."""
        copies, self._reserved, self.copies = self._reserved, None, None
        if copies is None:
            return
        self._training.flush()
        rank_state, states = self._training.parts.rank, list(self._training.host_state.states.values())
        group, device, rank = rank_state.group, rank_state.device, dist.get_rank(rank_state.group)
        begins = rank_state.partition.group_begins
        for begin, source, target, of_partition in zip(begins, layouts, saved_layouts, copies, strict=True):
            last = states[-len(of_partition) :]
            # The order is that of all ranks, so that none waits for one that waits for it.
            for run, (state, to) in product(runs(source, target), zip(last, of_partition, strict=True)):
                if rank == run.source_rank:
                    values = state.read(begin + run.source_begin, run.numel)
                    if rank != run.target_rank:
                        dist.send(values.to(device, torch.float32), group=group, group_dst=run.target_rank)
                if rank == run.target_rank:
                    if rank != run.source_rank:
                        values = torch.empty(run.numel, dtype=torch.float32, device=device)
                        dist.recv(values, group=group, group_src=run.source_rank)
                    to.narrow(0, run.target_begin, run.numel).copy_(values)
        self.copies = copies
