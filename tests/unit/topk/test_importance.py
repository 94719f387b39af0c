"""Selection of columns against brute force, and the gradient rule by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zenflow.topk.importance import column_count, max_interval_by_gradients, select_columns
from reference import owned_elements


@pytest.mark.parametrize(
    ("columns", "ratio", "count"),
    [
        (100, 0.0, 0),
        (100, 0.05, 5),
        (100, 0.5, 50),
        (100, 1.0, 100),
        (3, 0.05, 1),
        (1, 0.05, 1),
        (7, 0.5, 4),
        (29, 0.05, 1),
    ],
)
def test_column_count(columns: int, ratio: float, count: int) -> None:
    assert column_count(columns, ratio) == count


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    squared_norms=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 1e-30, 1e30]), min_size=1, max_size=40),
    ratio=st.floats(0, 1),
)
def test_select_columns_with_ties(squared_norms: list[float], ratio: float) -> None:
    chosen = select_columns(torch.tensor(squared_norms), ratio).tolist()
    best_first = sorted(range(len(squared_norms)), key=lambda column: (-squared_norms[column], column))
    assert chosen == sorted(best_first[: column_count(len(squared_norms), ratio)])


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.3, 1.0])
def test_the_oracle_selects_the_same(ratio: float) -> None:
    gradient = torch.randn(6, 3, 3, 5, generator=torch.Generator().manual_seed(0))
    owned = torch.zeros(6, 45, dtype=torch.bool)
    owned[:, select_columns(gradient.view(6, -1).square().sum(0), ratio)] = True
    assert torch.equal(owned.view_as(gradient), owned_elements(gradient, ratio))


class TestMaxIntervalByGradients:
    def test_by_hand(self) -> None:
        column_norms = [
            torch.tensor([9.0, 9.0, 1.0, 1.0]),
            torch.tensor([16.0, 1.0, 1.0]),
            torch.ones(5),
            torch.ones(2),
        ]
        owned = [torch.tensor([0, 1]), torch.tensor([0]), torch.empty(0, dtype=torch.int64), torch.arange(2)]
        assert float(max_interval_by_gradients(column_norms, owned, 0.99)) == pytest.approx(4.0)
        assert float(max_interval_by_gradients(column_norms, owned, 0.5)) == pytest.approx(3.0)
        assert float(max_interval_by_gradients(column_norms, owned, 0.0)) == pytest.approx(3.0)

    def test_nothing_to_compare(self) -> None:
        assert max_interval_by_gradients([torch.ones(3)], [torch.empty(0, dtype=torch.int64)], 0.99) is None
        assert max_interval_by_gradients([], [], 0.99) is None

    def test_not_finite_where_the_gradient_is_not_or_nothing_waits(self) -> None:
        owned = [torch.tensor([0])]
        assert not math.isfinite(float(max_interval_by_gradients([torch.tensor([1.0, torch.inf])], owned, 1.0)))
        assert not math.isfinite(float(max_interval_by_gradients([torch.tensor([1.0, torch.nan])], owned, 1.0)))
        assert float(max_interval_by_gradients([torch.tensor([1.0, 0.0])], owned, 1.0)) == math.inf
