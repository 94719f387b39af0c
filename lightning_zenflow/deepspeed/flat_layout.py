"""Position of the parameters in ZeRO's flat buffers: slices by it; runs of elements that two such layouts have in common; copies by these
of what all ranks have saved, and the terms in which DeepSpeed's stages save it. Pure.

States are in the terms of stage 2, whatever the stage of the folder; `in_other_terms` is the way there and back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_ALIGNMENT_PADDINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from torch import Tensor
from typing_extensions import Self

from lightning_zenflow.core.partition import Slice, group_begins
from lightning_zenflow.deepspeed.host_state import MOMENTS


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
        begins = accumulate((n + padding for n, padding in zip(numels.values(), paddings, strict=True)), initial=0)
        places = {name: (begin, n) for (name, n), begin in zip(numels.items(), begins, strict=False)}
        return cls(places=places, partition_numel=partition_numel)

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
        for name in layout.places:
            start = 0
            for part in layout.parts(name):
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


_TERMS = {FP32_FLAT_GROUPS: SINGLE_PARTITION_OF_FP32_GROUPS, OPTIMIZER_STATE_DICT: BASE_OPTIMIZER_STATE}
_TERMS |= {of_2: of_3 for of_3, of_2 in _TERMS.items()}
"""Keys of stage 3 with those of stage 2, and back: the flat master weights, and the state of the user's optimizer."""


def in_other_terms(state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state of stage 3 in the terms of stage 2, or the other way round."""
    return {_TERMS.get(key, key): value for key, value in state.items()}


def keys_of(base: Mapping[str, Any]) -> list[Any]:
    """Keys of the flat buffers in the state of the user's optimizer, in the buffers' order; a group has several under stage 3."""
    return [key for param_group in base["param_groups"] for key in param_group["params"]]


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


def repartition(
    own: Mapping[str, Any],
    read: Callable[[int], Mapping[str, Any]],
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    rank: int,
) -> dict[str, Any]:
    """Redistributes AdamW's state that was saved in another layout.

    Args:
        own: state of a rank that saved, for what all of them have in common.
        read: state of a rank that saved.
        sources: layouts of each flat buffer there.
        targets: layouts to redistribute to; the parameters of one are of one parameter group.
        rank: rank of the new partition.

    Returns:
        AdamW's state in DeepSpeed's terms, copied, float32; 0 in padding.
    """
    states = [
        [torch.zeros(target.partition_numel, dtype=torch.float32, device="cpu") for _ in range(1 + len(MOMENTS))]
        for target in targets
    ]

    def parts(source_rank: int) -> list[list[Tensor]]:
        state = read(source_rank)
        base, masters = state[BASE_OPTIMIZER_STATE], state[SINGLE_PARTITION_OF_FP32_GROUPS]
        return [
            [master, *(base["state"][key][name] for name in MOMENTS)]
            for master, key in zip(masters, keys_of(base), strict=True)
        ]

    copy_parts(parts, sources, targets, rank, states)
    base = own[BASE_OPTIMIZER_STATE]
    param_groups, of_key, buffers = [], {}, iter(sources)
    for param_group in base["param_groups"]:
        names = {name for _ in param_group["params"] for name in next(buffers).places}
        keys = [key for key, target in enumerate(targets) if not names.isdisjoint(target.places)]
        for key in keys:
            in_common = base["state"][param_group["params"][0]]
            of_key[key] = {**in_common, **dict(zip(MOMENTS, states[key][1:], strict=True))}
        param_groups.append({**param_group, "params": keys})
    return {
        SINGLE_PARTITION_OF_FP32_GROUPS: [master for master, *_ in states],
        GROUP_PADDINGS: [0] * len(targets),
        PARAM_ALIGNMENT_PADDINGS: [[0] * len(target.places) for target in targets],
        BASE_OPTIMIZER_STATE: {**base, "param_groups": param_groups, "state": of_key},
    }
