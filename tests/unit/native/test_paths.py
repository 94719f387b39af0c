"""worker_executable: where the worker is looked for, and what the user is told when it is not there."""

import re
from importlib.metadata import PackageNotFoundError, PathDistribution
from pathlib import Path

import pytest

import lightning_zenflow
from lightning_zenflow import native
from lightning_zenflow.native import worker_executable


def make_executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_distribution(name: str) -> PathDistribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(native, "distribution", no_distribution)
    monkeypatch.delenv("LIGHTNING_ZENFLOW_WORKER", raising=False)


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every folder of the package, and beside the metadata of an editable install."""
    monkeypatch.setattr(lightning_zenflow, "__path__", [str(tmp_path / "sources"), str(tmp_path / "installed")])
    metadata = PathDistribution(tmp_path / "site" / "lightning_zenflow-0.1.0.dist-info")
    monkeypatch.setattr(native, "distribution", lambda name: metadata)
    with pytest.raises(RuntimeError, match=re.escape(str(tmp_path / "sources" / "bin")) + ".*pip install -e ."):
        worker_executable()
    editable = make_executable(tmp_path / "site" / "lightning_zenflow" / "bin" / "zenflow-worker")
    assert worker_executable() == editable
    installed = make_executable(tmp_path / "installed" / "bin" / "zenflow-worker")
    assert worker_executable() == installed


def test_the_environment_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    monkeypatch.setenv("LIGHTNING_ZENFLOW_WORKER", str(mine))
    with pytest.raises(RuntimeError, match="by the environment variable LIGHTNING_ZENFLOW_WORKER, does not exist"):
        worker_executable()
    assert make_executable(mine) == worker_executable()
    mine.chmod(0o644)
    with pytest.raises(RuntimeError, match="must be executable"):
        worker_executable()
