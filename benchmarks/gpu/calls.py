"""A piece of work that is done in several calls, each of limited length: what is done already, and how much time is left."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine
from benchmarks.common.processes import run_process
from benchmarks.common.provenance import STEP_CODE, about, commit_of_code


class Calls:
    """The results of all calls, in one file that is complete after each result.

    Results of another commit or device are dropped: they would be mixed with this one's.

    Args:
        path: the file. It holds `calls`, provenance and machine of each call, and `done`, name -> result and the index of its call.
        command: of this call.
        device: "cuda" or "cpu".
        minutes: length of this call.
        again: drop all results.
        joins: this process belongs to the last call in the file.
    """

    def __init__(
        self, path: Path, *, command: str, device: str, minutes: float, again: bool = False, joins: bool = False
    ) -> None:
        self.path = path
        self.deadline = time.time() + 60 * minutes
        """In seconds as of `time.time`, so that other processes understand it."""
        self._commit, self._command, self._device = commit_of_code(STEP_CODE), command, device
        self._written: dict[str, Any] = {"calls": [], "done": {}}
        if path.exists() and not again:
            written = json.loads(path.read_text())
            if {(call["commit"], call["device"]) for call in written["calls"]} <= {(self._commit, device)}:
                self._written = written
            else:
                print(f"{path.name}: results of another commit or device are dropped", flush=True)
        self._call = len(self.calls) - 1 if joins else None

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Provenance and machine of each call that has results."""
        return list(self._written["calls"])

    @property
    def done(self) -> Mapping[str, Mapping[str, Any]]:
        """Results by name."""
        return dict(self._written["done"])

    def left(self) -> float:
        """Seconds that are left of this call."""
        return self.deadline - time.time()

    def put(self, name: str, result: Mapping[str, Any]) -> None:
        """Adds a result and writes the file."""
        self.begin()
        self._written["done"][name] = {"call": self._call, **result}
        self._write()

    def begin(self) -> None:
        """Adds this call, unless that is done; `put` does so if needed."""
        if self._call is None:
            # In a process of its own: this one takes no memory of the device.
            described = run_process(_describe, self._command, self._device, timeout=180)
            self._written["calls"].append({**described, "commit": self._commit, "device": self._device})
            self._call = len(self._written["calls"]) - 1
            self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.part")
        temporary.write_text(json.dumps(self._written, indent=1))
        temporary.rename(self.path)


def _describe(command: str, device: str) -> dict[str, Any]:
    return {**about(command, device), "machine": machine(device)}
