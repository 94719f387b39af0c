"""Constants and structures agree: ``csrc/common/protocol.h`` and ``lightning_zenflow/native.py``. Where the worker is looked for, and what
the user is told when it is not there.
"""

import ctypes
import re
import subprocess
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

import lightning_zenflow
from lightning_zenflow import native
from lightning_zenflow.native import worker_executable

HEADER = re.sub(r"//.*", "", (Path(__file__).parents[3] / "csrc/common/protocol.h").read_text())
TYPES = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "Tentative": ctypes.c_uint32,
    **{f"{name}_t": getattr(ctypes, f"c_{name}") for name in ("uint8", "uint32", "uint64", "int64")},
}
"""By the header's name. Structures of these types are laid out alike by ctypes and by the compiler: naturally aligned."""


def value_of(expression: str) -> int:
    """A constant expression of the header."""
    python = re.sub(r"sizeof\((\w+)\)", lambda match: str(ctypes.sizeof(TYPES[match[1]])), expression)
    python = re.sub(r"\bk[A-Z]\w+", lambda match: str(constants()[match[0]]), python)
    return int(eval(python.replace("ull", "").replace("UINT32_MAX", "0xffffffff"), {"__builtins__": {}}))


def constants() -> dict[str, int]:
    return {name: value_of(value) for name, value in re.findall(r"^constexpr \w+ (k\w+) = (.+);", HEADER, re.MULTILINE)}


def test_constants() -> None:
    ours = {name: value for name, value in vars(native).items() if name.isupper() and type(value) is int}
    assert constants() == {f"k{name.title().replace('_', '')}": value for name, value in ours.items()}


def test_enumerations() -> None:
    for kind in (native.MessageType, native.Tentative):
        (body,) = re.findall(rf"enum class {kind.__name__} : uint32_t {{(.*?)}};", HEADER, re.DOTALL)
        named = {name: int(value) for name, value in re.findall(r"k(\w+) = (\d+)", body)}
        assert named == {member.name.title().replace("_", ""): member.value for member in kind}


def test_structures() -> None:
    ours: dict[str, Any] = {
        name: kind
        for name, kind in vars(native).items()
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind.__module__ == native.__name__
    }
    theirs = dict(re.findall(r"^struct (\w+) {(.*?)^};", HEADER, re.MULTILINE | re.DOTALL))
    assert ours.keys() == theirs.keys()
    for name, body in theirs.items():
        members = re.findall(r"^\s+(\w+) (\w+)(?:\[(.+)\])?;", body, re.MULTILINE)
        kinds = [(member, {**ours, **TYPES}[kind], value_of(n or "0")) for kind, member, n in members]
        assert [(member, kind * n if n else kind) for member, kind, n in kinds] == ours[name]._fields_


def version_line() -> str:
    command = [str(worker_executable()), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def test_the_command_line_has_the_version_and_the_machines_highest_instruction_set_or_a_lower_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["baseline", "avx2", "avx512"]
    monkeypatch.delenv("ZENFLOW_MAX_CPU_ISA", raising=False)
    assert f"protocol {native.VERSION}" in version_line()
    highest = names.index(version_line().split()[-1])
    for i, name in enumerate(names):
        monkeypatch.setenv("ZENFLOW_MAX_CPU_ISA", name)
        assert version_line().split()[-1] == names[min(i, highest)]


def make_executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every folder of the package, and beside the metadata of an editable install."""
    monkeypatch.delenv("LIGHTNING_ZENFLOW_WORKER", raising=False)
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
    with pytest.raises(
        RuntimeError, match=f"looked for {mine}.*The environment variable LIGHTNING_ZENFLOW_WORKER names .*got '{mine}'"
    ):
        worker_executable()
    assert make_executable(mine) == worker_executable()
    mine.chmod(0o644)
    with pytest.raises(RuntimeError, match="must be executable"):
        worker_executable()
