"""Runs that have a process, and whatever it starts, to themselves."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import ROOT

_RENDEZVOUS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_TAIL = 2000


def fresh_environment(**variables: str) -> dict[str, str]:
    """This process' environment and some variables, for a process that trains by itself.

    It must not take itself for a rank of whatever started this process; and fits in this process leave their rendezvous behind: its port
    is taken, and with its rank Lightning would wait for others to start.
    """
    return {**{key: value for key, value in os.environ.items() if key not in _RENDEZVOUS}, **variables}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has ended."""

    result: str | None
    """What it wrote to its result file; None if it wrote none."""
    error: str
    """Where there is no result: exit status and the end of what it printed."""


def run_process(
    module: str, arguments: Sequence[str], *, cores: Sequence[int], environment: dict[str, str], timeout: float
) -> Ended:
    """Runs `python -m module arguments[0] RESULT_FILE arguments[1:]` on given cores and ends all that is left of it afterwards.

    Args:
        module: runs the first argument and writes its result to the file.
        arguments: see above.
        cores: logical cores for everything it starts.
        environment: variables to set.
        timeout: seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        with open(Path(folder) / "output.txt", "w+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, arguments[0], str(path), *arguments[1:]],
                cwd=ROOT,
                env=fresh_environment(**environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                os.sched_setaffinity(process.pid, cores)
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                pass  # the missing result says so
            finally:
                _end_session(process)
            if path.exists():
                return Ended(result=path.read_text(), error="")
            output.seek(0)
            tail = output.read().decode(errors="replace").strip()[-_TAIL:]
    return Ended(
        result=None, error=f"no result (exit status {process.returncode}, after at most {timeout:g} s): {tail}"
    )


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    """Ends a run and whatever it started: DeepSpeed's ZenFlow leaves its optimizer process behind when it fails."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
