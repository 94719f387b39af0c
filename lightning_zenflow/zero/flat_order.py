"""Order of the parameters in ZeRO's flat buffers, by which each rank's share is spread over the depth of the model. Pure."""

from collections.abc import Sequence

_LARGE = 1 / 8
"""Of a rank's share. Parameters larger than this are placed first: beside one, a rank takes fewer of the others."""

_ACROSS = 1 / 2
"""Of a rank's share. Larger parameters are divided between two ranks."""


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
