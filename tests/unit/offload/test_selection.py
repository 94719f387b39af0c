"""When columns are selected, and which ones, against brute force."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.partition import column_count
from lightning_zenflow.offload.columns import Selector, select_columns

WAITS = ("cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__float__")


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


class OnDevice(Tensor):
    """Stands for a tensor on a device; so do the results of its operations. Notes how the host gets values from it."""

    read: list[str]

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copied = func is Tensor.copy_ and not isinstance(args[0], cls)
        if is_copied or (func.__name__ in WAITS and isinstance(args[0], cls)):
            cls.read.append(func.__name__)
        if is_copied:  # to the host
            return args[0].copy_(args[1].as_subclass(Tensor))
        return super().__torch_function__(func, types, args, kwargs or {})


def selector_of(columns: list[int], *, by_epoch: bool = False, interval: int = 1) -> Selector:
    return Selector(columns, topk_ratio=0.5, by_epoch=by_epoch, interval=interval, device=torch.device("cpu"))


def test_one_copy_has_all_that_a_selection_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of every matrix, and whether the gradient is finite. The share is of the columns that were selected before."""
    columns = [12, 0, 20, 12, 1]
    selector, norms, shares = selector_of(columns), selector_of(columns).new_column_norms(), list[Tensor]()
    # Its copy is not waited for.
    monkeypatch.setattr(selector.owned_norm_share, "copy", shares.append)
    norms.flat = norms.flat.as_subclass(OnDevice)
    generator = torch.Generator().manual_seed(1)
    before: list[list[int]] | None = None
    for step in range(1, 6):
        with torch._C.DisableTorchFunctionSubclass():
            norms.flat.copy_(torch.rand(sum(columns), generator=generator))
            of_parameters = [norms.of_parameter[i].clone() for i in range(len(columns))]
        OnDevice.read = []
        chosen = selector.select(norms, step, finite=torch.tensor(step != 3))
        assert OnDevice.read == ["copy_"]
        assert (chosen is None) == (step == 3)
        if chosen is None:
            continue
        assert chosen[1] is None and chosen[4] is None  # without columns; one of one
        best = [select_columns(of_one, 0.5).tolist() if len(of_one) else [] for of_one in of_parameters]
        for of_one, expected in zip(chosen, best, strict=True):
            assert of_one is None or of_one.tolist() == expected
        owned = sum(float(of_parameters[i][c].sum()) for i, c in enumerate(before or best))
        with torch._C.DisableTorchFunctionSubclass():
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
