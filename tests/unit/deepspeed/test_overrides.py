"""Overrides that the base class of another library would never call."""

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy
from typing_extensions import override

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deepspeed.engines import missing_overrides


class Base:
    def here(self) -> None: ...


class Subclass(Base):
    __module__ = "lightning_zenflow.example"

    @override
    def here(self) -> None: ...

    @override  # type: ignore[misc]
    def method(self) -> None: ...

    @property
    @override  # type: ignore[misc]
    def a_property(self) -> int: ...

    def own(self) -> None: ...


def test_missing_overrides() -> None:
    assert missing_overrides(Subclass, Base) == ["a_property", "method"]


def test_a_lightning_without_what_is_overridden_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeepSpeedStrategy, "_format_config")
    with pytest.raises(RuntimeError, match=r"missing there: \['_format_config'\]\); it is tested with 2.6.6"):
        ZenFlowStrategy()
