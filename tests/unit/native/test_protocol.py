"""Sizes, offsets and constants agree: ``csrc/common/protocol.h`` and ``lightning_zenflow/native.py``."""

import ctypes
import subprocess

import pytest

from lightning_zenflow import native
from lightning_zenflow.native import worker_executable

STRUCTURES = [
    kind
    for kind in vars(native).values()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and hasattr(kind, "_fields_")
]
CONSTANTS = (
    "MAGIC",
    "VERSION",
    "HEADER_BYTES",
    "MAX_MESSAGE_BYTES",
    "TILE_ELEMENTS",
    "JOURNAL_ENTRY_BYTES",
    "NO_BLOCK",
)


def output_of(option: str) -> str:
    command = [str(worker_executable()), option]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def test_layout() -> None:
    ours = {f"k{name.title().replace('_', '')}": getattr(native, name) for name in CONSTANTS}
    for structure in STRUCTURES:
        ours[f"sizeof({structure.__name__})"] = ctypes.sizeof(structure)
        for field in structure._fields_:
            ours[f"{structure.__name__}.{field[0]}"] = getattr(structure, field[0]).offset
    lines = map(str.split, output_of("--layout").splitlines())
    assert {name: int(value) for name, value in lines} == ours


def test_the_version_on_the_command_line() -> None:
    assert f"protocol {native.VERSION}" in output_of("--version")


def test_the_instruction_set_is_the_machines_highest_or_a_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["baseline", "avx2", "avx512"]
    monkeypatch.delenv("ZENFLOW_MAX_CPU_ISA", raising=False)
    highest = names.index(output_of("--version").split()[-1])
    for i, name in enumerate(names):
        monkeypatch.setenv("ZENFLOW_MAX_CPU_ISA", name)
        assert output_of("--version").split()[-1] == names[min(i, highest)]
