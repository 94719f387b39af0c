"""When columns are selected, and which ones, against brute force."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import column_count
from lightning_zenflow.offload.columns import Selector, select_columns
from recorded_device.tensors import DEVICE
from recorded_device.watch import recorded_device


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    squared_norms=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 1e-30, 1e30]), min_size=1, max_size=40),
    ratio=st.floats(0, 1),
)
def test_select_columns_with_ties(squared_norms: list[float], ratio: float) -> None:
    assert [column_count(n, 0.05) for n in (1, 3, 29, 31, 100)] == [1, 1, 1, 2, 5] and column_count(7, 0.5) == 4
    chosen = select_columns(torch.tensor(squared_norms), ratio).tolist()
    best_first = sorted(range(len(squared_norms)), key=lambda column: (-squared_norms[column], column))
    assert chosen == sorted(best_first[: column_count(len(squared_norms), ratio)])


def selector_of(columns: list[int], *, by_epoch: bool = False, interval: int = 1, device: Any = "cpu") -> Selector:
    strategy: Any = "epoch" if by_epoch else "step"
    config = ZenFlowConfig(topk_ratio=0.5, select_strategy=strategy, select_interval=interval)
    return Selector(config, columns, torch.device(device))


def test_one_copy_has_all_that_a_selection_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of every matrix, and whether the gradient is finite. The share is of the columns that were selected before."""
    columns, shares = [12, 0, 20, 12, 1], list[Tensor]()
    generator = torch.Generator().manual_seed(1)
    before: list[list[int]] | None = None
    with recorded_device() as device:
        selector = selector_of(columns, device=DEVICE)
        # Its copy is not waited for.
        monkeypatch.setattr(selector.owned_norm_share, "copy", shares.append)
        norms, operations = selector.new_column_norms(), device.order.operations
        for step in range(1, 6):
            norms.flat.copy_(torch.rand(sum(columns), generator=generator))
            of_parameters = [norms.of_parameter[i].cpu() for i in range(len(columns))]
            finite, n_before = torch.tensor(step != 3, device=DEVICE), len(operations)
            chosen = selector.select(norms, step, finite=finite)
            kinds = [operation.kind for operation in operations[n_before:]]
            assert (kinds.count("d2h"), kinds.count("host wait")) == (1, 1)
            assert (chosen is None) == (step == 3)
            if chosen is None:
                continue
            assert chosen[1] is None and chosen[4] is None  # without columns; one of one
            best = [select_columns(of_one, 0.5).tolist() if len(of_one) else [] for of_one in of_parameters]
            for of_one, expected in zip(chosen, best, strict=True):
                assert of_one is None or of_one.tolist() == expected
            owned = sum(float(of_parameters[i][c].sum()) for i, c in enumerate(before or best))
            assert float(shares.pop()) == pytest.approx(owned / sum(float(of_one.sum()) for of_one in of_parameters))
            before = best


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"interval": 0}, [1, 2, 3]),
        ({"interval": 400}, [1, 2, 3, 403, 803, 1203]),
        ({"interval": 2, "by_epoch": True}, [1, 2, 3, 1001]),
        ({"interval": 0, "by_epoch": True}, [1, 2, 3]),
    ],
)
def test_when_it_selects(options: dict[str, Any], steps: list[int]) -> None:
    """In epochs of 500 steps; the first two gradients are not finite."""
    selector, selected = selector_of([40], **options), []
    for step in range(1, 1301):
        selector.epoch = (step - 1) // 500
        if selector.is_due(step):
            selected.append(step)
            norms = selector.new_column_norms()
            norms.flat.fill_(1.0)
            selector.select(norms, step, finite=torch.tensor(step >= 3))
            # Continues where another one was saved.
            state, selector = selector.state_dict(), selector_of([40], **options)
            selector.load_state_dict(state)
            assert (selector.owned is not None) == (step >= 3)
    assert selected == steps


@pytest.mark.parametrize("owned", [None, torch.tensor([3])])
def test_a_run_of_an_earlier_version_selects_once(owned: Tensor | None) -> None:
    """It would have selected again, as `select_interval: auto` once said."""
    selector = selector_of([40], interval=0)
    selector.load_state_dict({"owned": owned, "next": 0 if owned is None else 515, "epoch": 0})
    assert [selector.is_due(step) for step in (4, 515)] == [owned is None] * 2
