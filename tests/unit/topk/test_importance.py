"""Selection of columns against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zenflow.topk.column_norms import ColumnLayout, ColumnSquaredNorms
from lightning_zenflow.topk.importance import column_count, count_kept, select_columns
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


def test_select_columns_of_many_matrices() -> None:
    squared_norms = torch.randint(0, 5, (6, 40), generator=torch.Generator().manual_seed(0)).float()
    one_by_one = [select_columns(of_one, 0.2) for of_one in squared_norms]
    assert torch.equal(select_columns(squared_norms, 0.2), torch.stack(one_by_one))


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.3, 1.0])
def test_the_oracle_selects_the_same(ratio: float) -> None:
    gradient = torch.randn(6, 3, 3, 5, generator=torch.Generator().manual_seed(0))
    owned = torch.zeros(6, 45, dtype=torch.bool)
    owned[:, select_columns(gradient.view(6, -1).square().sum(0), ratio)] = True
    assert torch.equal(owned.view_as(gradient), owned_elements(gradient, ratio))


class TestColumnLayout:
    LAYOUT = ColumnLayout([3, 0, 2, 3])

    def test_matrices_of_a_width_are_together(self) -> None:
        norms = ColumnSquaredNorms(self.LAYOUT, torch.device("cpu"))
        for parameter, n in enumerate(self.LAYOUT.columns):
            norms.of_parameter(parameter).add_(10 * parameter + torch.arange(n))
        assert [of_width.tolist() for of_width in norms.by_width()] == [[[20, 21]], [[0, 1, 2], [30, 31, 32]]]
        assert [of_one.tolist() for of_one in self.LAYOUT.of_parameters(norms.flat)] == [
            [0, 1, 2],
            [],
            [20, 21],
            [30, 31, 32],
        ]

    def test_some_columns_of_each(self) -> None:
        chosen = [torch.tensor(columns, dtype=torch.int64) for columns in ([2], [], [0, 1], [1, 2])]
        flat = torch.tensor([0, 1, 2, 1, 2])
        split = self.LAYOUT.of_parameters(flat, [1, 0, 2, 2])
        assert [of_one.tolist() for of_one in split] == [of_one.tolist() for of_one in chosen]
        assert self.LAYOUT.positions(chosen).tolist() == [0, 1, 4, 6, 7]

    def test_a_model_without_matrices(self) -> None:
        norms = ColumnSquaredNorms(ColumnLayout([0, 0]), torch.device("cpu"))
        assert norms.by_width() == []
        assert norms.is_finite()


@pytest.mark.parametrize(
    ("before", "fresh", "kept"),
    [([1, 2, 3, 4], [3, 4, 5, 6], 2), ([1, 2, 7, 8], [1, 2, 3, 8], 3), ([], [], 0), ([1], [], 0)],
)
def test_kept_columns(before: list[int], fresh: list[int], kept: int) -> None:
    mask = torch.tensor([column in before for column in range(9)])
    assert count_kept(mask, torch.tensor(fresh, dtype=torch.int64)) == kept
