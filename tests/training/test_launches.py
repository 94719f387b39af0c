"""Launches of a step on a CUDA device, counted without one: a step of few tokens takes as long as the host needs to launch it."""

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


def case_of(shapes: Shapes, **strategy_options: Any) -> Case:
    return Case(
        # One parameter group: vectors lie between matrices.
        model="OneGroup",
        model_options={"shapes": shapes},
        precision="bf16-true",
        steps=12,
        max_norm=1.0,
        recorded=False,
        strategy_options=strategy_options,
    )


@pytest.mark.parametrize(
    ("shapes", "provisional", "ceiling"),
    [(WITH_BIASES, False, 700), (WITH_BIASES, True, 950), (LLAMA, False, 850), (LLAMA, True, 1450)],
)
def test_launches_of_a_step(shapes: Shapes, provisional: bool, ceiling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With S = 4, d = 1: at most 1,500 with provisional updates and 900 without."""
    case = case_of(shapes, **(APPROXIMATE if provisional else {}))
    with counted_launches(monkeypatch) as counter:
        run_case(case)
    # The first windows have changed their columns by then.
    of_steps = counter.of_steps[7:]
    assert max(counts.total() for counts in of_steps) <= ceiling, of_steps
    matrices = sum(len(shape) > 1 for shape in shapes)
    for counts in of_steps:
        assert matrices - 1 <= counts["route"] <= matrices + 1
        assert counts["write_columns"] <= 4
        assert counts["adamw"] <= 4
        assert provisional or counts["factored_step"] == counts["provisional_update"] == 0


@pytest.mark.parametrize("interval", ["auto", 4])
def test_launches_of_a_selecting_step(interval: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squared norms of columns take two launches a matrix, the choice the same number whatever the number of matrices.

    The rest of what is counted are operations on the host, which prepare the blocks' changes.
    """
    of_fixed, matrices = [], sum(len(shape) > 1 for shape in LLAMA)
    for select_interval in (0, 4):
        with counted_launches(monkeypatch) as counter:
            run_case(case_of(LLAMA, update_interval=interval, select_interval=select_interval))
        of_fixed.append(counter.of_steps[8])
    usual, selecting = of_fixed
    assert selecting["topk"] == 2  # widths
    assert selecting["_local_scalar_dense"] - usual["_local_scalar_dense"] <= 3
    assert selecting["sum"] - usual["sum"] <= matrices + 20
    assert (selecting - usual).total() <= 6 * matrices
