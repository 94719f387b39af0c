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

LLAMA: Shapes = [
    (8, 4), *[(4, 4), (2, 4), (2, 4), (4, 4), (12, 4), (12, 4), (4, 12), (4,), (4,)] * 38, (4,), (8, 4)
]  # fmt: skip
"""345 tensors, 268 of them matrices."""


def launches(shapes: Shapes, **keys: Any) -> list[Counter[str]]:
    """Of each step, with one parameter group, in which vectors lie between matrices."""
    case = Case(
        model="OneGroup", model_options={"shapes": shapes}, precision="bf16-true", steps=12, max_norm=1.0, loop="direct"
    )
    with pytest.MonkeyPatch.context() as patch, counted_launches(patch) as counter:
        run_case(case.with_keys(**{"weight_prediction": "auto", "provisional_scale": "auto", **keys}))
    return counter.of_steps


@pytest.mark.parametrize(
    ("shapes", "provisional", "ceiling"), [(WITH_BIASES, False, 700), (WITH_BIASES, True, 950), (LLAMA, True, 1450)]
)
def test_launches_of_a_step(shapes: Shapes, provisional: bool, ceiling: int) -> None:
    """With S = 4, d = 1: at most 1,500 with provisional updates and 900 without."""
    # The first windows have changed their columns by then.
    of_steps = launches(shapes, **(APPROXIMATE if provisional else {"weight_prediction": 0, "provisional_scale": 0}))[
        7:
    ]
    assert max(counts.total() for counts in of_steps) <= ceiling, of_steps
    matrices = sum(len(shape) > 1 for shape in shapes)
    for counts in of_steps:
        assert matrices - 1 <= counts["route"] <= matrices + 1
        assert counts["write_columns"] <= 4
        assert counts["adamw"] <= 4
        assert provisional or counts["factored_step"] == counts["provisional_update"] == 0


def test_launches_of_a_selecting_step() -> None:
    """Squared norms of columns take two launches a matrix, the choice the same number whatever the number of matrices.

    The rest of what is counted are operations on the host, which prepare the blocks' changes.
    """
    usual, selecting = (launches(LLAMA, update_interval=4, select_interval=interval)[8] for interval in (0, 4))
    matrices = sum(len(shape) > 1 for shape in LLAMA)
    assert selecting["topk"] == 2  # widths
    assert selecting["_local_scalar_dense"] - usual["_local_scalar_dense"] <= 3
    assert selecting["sum"] - usual["sum"] <= matrices + 20
    assert (selecting - usual).total() <= 6 * matrices
