"""Sizes, offsets and constants agree: ``csrc/common/protocol.h`` and ``lightning_zenflow/native/protocol.py``."""

import ctypes
import subprocess

import pytest

from lightning_zenflow.native import protocol
from lightning_zenflow.native.paths import worker_executable

STRUCTURES = (
    protocol.ArenaHeader,
    protocol.Range,
    protocol.Block,
    protocol.Hyperparameters,
    protocol.StepWord,
    protocol.StepRecord,
    protocol.JournalEntry,
    protocol.MessageHeader,
    protocol.UpdateJob,
    protocol.Ready,
    protocol.Done,
    protocol.Export,
    protocol.ExportTile,
    protocol.Touch,
    protocol.Acknowledged,
)


@pytest.fixture(scope="module")
def layout() -> dict[str, int]:
    command = [str(worker_executable()), "--layout"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return {name: int(value) for name, value in (line.split() for line in output.splitlines())}


def test_structures(layout: dict[str, int]) -> None:
    ours = {f"sizeof({structure.__name__})": ctypes.sizeof(structure) for structure in STRUCTURES}
    for structure in STRUCTURES:
        for field in structure._fields_:
            ours[f"{structure.__name__}.{field[0]}"] = getattr(structure, field[0]).offset
    theirs = {name: value for name, value in layout.items() if not name.startswith("k")}
    assert ours == theirs


def test_constants(layout: dict[str, int]) -> None:
    constants = {name: value for name, value in layout.items() if name.startswith("k")}
    ours = {
        "kMagic": protocol.MAGIC,
        "kVersion": protocol.VERSION,
        "kHeaderBytes": protocol.HEADER_BYTES,
        "kMaxMessageBytes": protocol.MAX_MESSAGE_BYTES,
        "kTileElements": protocol.TILE_ELEMENTS,
        "kJournalEntryBytes": protocol.JOURNAL_ENTRY_BYTES,
    }
    assert constants == ours


def test_the_version_on_the_command_line() -> None:
    command = [str(worker_executable()), "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert f"protocol {protocol.VERSION}" in output
