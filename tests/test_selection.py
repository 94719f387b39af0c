"""Selection of columns against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zenflow.selection import column_count, column_energy, select_columns
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
    energy=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 1e-30, 1e30]), min_size=1, max_size=40),
    ratio=st.floats(0, 1),
)
def test_select_columns_with_ties(energy: list[float], ratio: float) -> None:
    chosen = select_columns(torch.tensor(energy), ratio).tolist()
    best_first = sorted(range(len(energy)), key=lambda column: (-energy[column], column))
    assert chosen == sorted(best_first[: column_count(len(energy), ratio)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_column_energy(dtype: torch.dtype) -> None:
    gradient = torch.randn(31, 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    energy = column_energy(gradient)
    assert energy.dtype == torch.float32
    torch.testing.assert_close(energy, gradient.double().square().sum(0).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_energy_of_a_bad_gradient_is_not_finite(value: float) -> None:
    gradient = torch.ones(4, 3)
    gradient[1, 2] = value
    assert torch.isfinite(column_energy(gradient)).tolist() == [True, True, False]


def test_energies_of_row_ranges_add_up() -> None:
    gradient = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    parts = column_energy(gradient[:5]) + column_energy(gradient[5:])
    torch.testing.assert_close(parts, column_energy(gradient))


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.3, 1.0])
def test_the_oracle_selects_the_same(ratio: float) -> None:
    gradient = torch.randn(6, 3, 3, 5, generator=torch.Generator().manual_seed(0))
    owned = torch.zeros(6, 45, dtype=torch.bool)
    owned[:, select_columns(column_energy(gradient.view(6, -1)), ratio)] = True
    assert torch.equal(owned.view_as(gradient), owned_elements(gradient, ratio))
