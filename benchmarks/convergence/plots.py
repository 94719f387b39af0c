"""Colours and line styles of the methods in pictures."""

from collections.abc import Mapping

from benchmarks.convergence.methods import Family

COLOURS: Mapping[Family, str] = {
    "AdamW": "black",
    "ZenFlowStrategy": "tab:blue",
    "ZenFlowStrategy, switched off in part": "tab:red",
    "others": "tab:orange",
}
LINE_STYLES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (5, 4)))
