"""Bars of text that show how full a memory is. Pure Python."""

from collections.abc import Mapping

_WIDTH = 40
"""Characters of the longest bar."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def memory_bars(title: str, used: Mapping[str, float], size: float | None, *, unicode: bool) -> list[str]:
    """A title and one bar for each use of a memory, with a mark at the memory's size.

    Args:
        title: the memory.
        used: use by name, in GB.
        size: of the memory, in GB; None: unknown, without a mark.
        unicode: whether the output can show eighths of a character; otherwise the bars are ASCII.
    """
    longest = max([*used.values(), size or 0.0]) or 1.0
    mark = None if size is None else min(_WIDTH - 1, round(_WIDTH * size / longest))
    names = max(map(len, used))
    lines = [title]
    for name, gigabytes in used.items():
        cells = list(_cells(_WIDTH * gigabytes / longest, unicode=unicode))
        if mark is not None:
            cells[mark] = "┃" if unicode else "|"
        too_small = size is not None and gigabytes > size
        lines.append(f"  {name:<{names}}  {''.join(cells)} {gigabytes:6.1f}{'  too large' if too_small else ''}")
    return lines


def _cells(length: float, *, unicode: bool) -> str:
    """A bar of `length` characters, filled up to the width of the longest with spaces."""
    if unicode:
        full, eighths = divmod(round(8 * length), 8)
        bar = "█" * full + (_EIGHTHS[eighths] if eighths else "")
    else:
        bar = "#" * round(length)
    return f"{bar:<{_WIDTH}}"
