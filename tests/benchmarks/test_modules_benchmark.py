"""Modules of other libraries, as docs/modules.md has them."""

import pytest

from benchmarks.modules.__main__ import row, table
from benchmarks.modules.zoo import ZOO


@pytest.mark.parametrize("name", ["CLIP, a scalar parameter (transformers)", "graph network (torch)"])
def test_a_model_that_trains_as_under_lightnings_strategy(name: str) -> None:
    assert float(row(name)["difference"]) < 1e-5


@pytest.mark.slow
def test_all_models() -> None:
    assert table(list(ZOO)).count("\n") >= len(ZOO)  # peft may be missing
