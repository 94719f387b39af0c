"""Which examples share a row, so that little of it is padding. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute items over rows: best fit, longest first.

    Args:
        lengths: of the items, in tokens; each 1 to `capacity`.
        capacity: of a row, in tokens.

    Returns:
        For each row the indices of its items. Every item is in exactly one row, no row holds more than `capacity`.
    """
    assert all(1 <= length <= capacity for length in lengths)
    rows: list[list[int]] = []
    # Room of the rows that are not full, ascending, each with its row.
    rooms: list[tuple[int, int]] = []
    for item in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[item]
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, row = rooms.pop(place)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        if room > length:
            insort(rooms, (room - length, row))
    return rows
