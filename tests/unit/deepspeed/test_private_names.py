"""Methods of Lightning and DeepSpeed that the package overrides or calls by private names. A release without one would never call ours."""

from typing import Any

import pytest

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer
from lightning_zenflow.deepspeed.stage_3 import ZenFlowZero3Optimizer
from lightning_zenflow.fabric import ZenFlowStrategy as FabricStrategy


@pytest.mark.parametrize("ours", [ZenFlowStrategy, FabricStrategy, ZenFlowZeroOptimizer, ZenFlowZero3Optimizer])
def test_what_is_overridden_is_there(ours: type[Any]) -> None:
    """In the library's base, which would never call it otherwise.

    Any base in the package may mark methods with `override`. Names that one of these bases defines without the mark are the package's own.
    """
    marked: dict[bool, set[str]] = {True: set(), False: set()}
    for owner in ours.__mro__:
        if owner.__module__.partition(".")[0] == "lightning_zenflow":
            for name, member in vars(owner).items():
                # A property or a class method is made of a function, which has the mark.
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                marked[getattr(function, "__override__", False)].add(name)
    overrides = marked[True] - marked[False] - {*dir(object)}
    assert overrides and overrides <= {*dir(ours.__bases__[-1])}


def test_what_is_called_by_a_mangled_name_is_there() -> None:
    name = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
    assert hasattr(ZenFlowZero3Optimizer.__bases__[-1], name)
