"""`when_imported`: in any order, once, and without a trace in the module."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_zenflow.registration import when_imported

pytestmark = pytest.mark.unit


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "__init__.py").write_text("")
    (tmp_path / "watched" / "inner.py").write_text("complete = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    # Put back, so that each test imports anew.
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return "watched.inner"


def test_later_now_and_twice(package: str) -> None:
    seen: list[ModuleType] = []

    def see(module: ModuleType) -> None:
        assert module.complete
        seen.append(module)

    n_finders = len(sys.meta_path)
    when_imported(package, see)
    when_imported(package, see)
    importlib.import_module("watched")
    assert not seen
    module = importlib.import_module(package)
    assert seen == [module, module]
    when_imported(package, see)
    assert len(seen) == 3
    assert len(sys.meta_path) == n_finders
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_failing_import_is_as_without(package: str) -> None:
    when_imported("watched.nowhere", lambda module: pytest.fail("not imported"))
    with pytest.raises(ModuleNotFoundError, match="watched.nowhere"):
        importlib.import_module("watched.nowhere")
