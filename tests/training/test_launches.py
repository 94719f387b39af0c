"""Launches of a step on a CUDA device, counted without one: a step of few tokens takes as long as the host needs to launch it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from harness import APPROXIMATE, Case, run_case
from launches import counted_launches

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

Shapes = Sequence[tuple[int, ...]]

WITH_BIASES: Shapes = [
    (8, 4), (6, 4),
    *[(4,), (4,), (12, 4), (12,), (4, 4), (4,), (4,), (4,), (16, 4), (16,), (4, 16), (4,)] * 28,
    (4,), (4,), (8, 4),
]  # fmt: skip
"""341 tensors, 115 of them matrices."""

LAYER: Shapes = [(4, 4), (2, 4), (2, 4), (4, 4), (12, 4), (12, 4), (4, 12), (4,), (4,)]
LLAMA: Shapes = [(8, 4), *LAYER * 38, (4,), (8, 4)]
"""345 tensors, 268 of them matrices."""
SMALL: Shapes = [(8, 4), *LAYER * 9, (4,), (8, 4)]
"""Of which the launches are a function of the number of tensors too."""


def launches(shapes: Shapes, **keys: Any) -> list[Counter[str]]:
    """Of each step, with one parameter group, in which vectors lie between matrices."""
    case = Case(
        model="OneGroup", model_options={"shapes": shapes}, precision="bf16-true", steps=10, max_norm=1.0, loop="direct"
    )
    with pytest.MonkeyPatch.context() as patch, counted_launches(patch) as counter:
        run_case(case.with_keys(**{**APPROXIMATE, **keys}))
    return counter.of_steps


@pytest.mark.parametrize(
    ("shapes", "keys", "ceiling"),
    [
        (WITH_BIASES, {"weight_prediction": 0, "provisional_scale": 0}, 700),
        (LLAMA, APPROXIMATE, 1450),
    ],
)
def test_launches_of_a_step(shapes: Shapes, keys: dict[str, Any], ceiling: int) -> None:
    """With S = 4, d = 1."""
    # The first windows have changed their columns by then.
    of_steps = launches(shapes, **keys)[7:]
    assert max(counts.total() for counts in of_steps) <= ceiling, of_steps


def test_launches_of_blocks_that_are_submitted_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's word takes three: a concatenation of what has arrived, a kernel and a copy."""
    n_blocks = 64
    monkeypatch.setattr("lightning_zenflow.offload.build.blocks_wanted", lambda *_, **__: n_blocks)
    counts = launches(SMALL, update_interval=1, publish_lag=0)[8]
    assert counts["block_word"] == n_blocks
    # Without words a block takes two: copies to two slots where it has a part of a matrix, or one copy and the norm of its vectors.
    assert counts.total() <= 5 * n_blocks + 3 * len(SMALL), counts


def test_launches_of_a_selecting_step() -> None:
    """At most fifteen more a matrix: two are squared norms of columns, and three for each tile copy its state; the others gather it, on the
    host."""
    usual, selecting = (launches(SMALL, update_interval=4, select_interval=interval)[8] for interval in (0, 4))
    assert (selecting - usual).total() <= 15 * sum(len(shape) > 1 for shape in SMALL)
