"""Calls in processes of their own: `python -m benchmarks.common.processes FOLDER PARENT` performs the call that FOLDER holds."""

import contextlib
import ctypes
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from benchmarks.common.provenance import ROOT

T = TypeVar("T")

_RENDEZVOUS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}
_CALL, _RESULT, _OUTPUT = "call.pickle", "result.pickle", "output.txt"
_TAIL = 2000
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process receives when its parent ends. Python has no name for it."""


def fresh_environment(**variables: str) -> dict[str, str]:
    """This process' environment and `variables`, for a process that trains by itself.

    Rendezvous variables are removed: those of a launcher would make the process a rank, and those that a fit in this process has left
    name a port that is taken.
    """
    return {**{key: value for key, value in os.environ.items() if key not in _RENDEZVOUS}, **variables}


def run_process(
    function: Callable[..., T],
    *arguments: Any,
    timeout: float,
    cores: Sequence[int] | None = None,
    forks: bool = False,
    environment: Mapping[str, str] | None = None,
) -> T:
    """Calls a function in a process of its own, and ends all that is left of its session afterwards.

    Args:
        function: importable by its name; it, its arguments and its result are pickled.
        arguments: positional arguments.
        timeout: seconds.
        cores: logical cores of the process and its children; None: those of this process.
        forks: the process is a fork of this one, which must not have used a device, with its cores and environment. It imports nothing
            again, which may take longer than a run.
        environment: variables to set.

    Raises:
        RuntimeError: there is no result; with exit status and the end of the output.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _CALL).write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-m", "benchmarks.common.processes", folder, str(os.getpid())]
        output = Path(folder) / _OUTPUT
        if forks:
            status = _run_fork(Path(folder), timeout)
        else:
            status = run_command(command, timeout=timeout, output=output, cores=cores, environment=environment)
        result = Path(folder) / _RESULT
        if result.exists():
            value: T = pickle.loads(result.read_bytes())
            return value
        tail = output.read_text(errors="replace").strip()[-_TAIL:] if output.exists() else ""
    raise RuntimeError(f"no result (exit status {status}, after at most {timeout:g} s): {tail}")


def run_command(
    command: Sequence[str],
    *,
    timeout: float,
    output: Path | None = None,
    cores: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs a command from the root of the repository, and ends all that is left of its session afterwards.

    Args:
        command: program and arguments.
        timeout: seconds.
        output: file for both outputs; None: those of this process.
        cores: as of `run_process`.
        environment: variables to set.

    Returns:
        The exit status, negative for a signal: -9 where the time was over.
    """
    with open(output, "wb") if output else contextlib.nullcontext() as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=fresh_environment(**environment or {}),
            stdout=file,
            stderr=subprocess.STDOUT if file else None,
            start_new_session=True,
        )
        try:
            os.sched_setaffinity(process.pid, cores or os.sched_getaffinity(0))
            process.wait(max(timeout, 0))
        except subprocess.TimeoutExpired:
            pass  # the status, and a missing result, say so
        finally:
            _end_session(process)
    return process.returncode


def _run_fork(folder: Path, timeout: float) -> int:
    pid = os.fork()
    if pid == 0:
        _call_in_fork(folder)
    ended = os.pidfd_open(pid)
    try:
        select.select([ended], [], [], max(timeout, 0))
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)  # before its session is one; where it has ended, nobody has waited for it
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _call_in_fork(folder: Path) -> NoReturn:
    status = 1
    with open(folder / _OUTPUT, "w") as output:
        try:
            os.setsid()
            _end_with_parent()
            sys.stdout = sys.stderr = output
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            _call(folder)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            output.flush()
            os._exit(status)


def _end_with_parent() -> None:
    # A parent that is killed cannot end this process: an interrupted comparison would leave runs behind.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process and its children: DeepSpeed's ZenFlow leaves its optimizer process behind when it fails."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _call(folder: Path) -> None:
    function, arguments = pickle.loads((folder / _CALL).read_bytes())
    temporary = folder / f"{_RESULT}.part"
    result = pickle.dumps(function(*arguments))
    # Lightning's launcher starts the other ranks of a training by this same command.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        temporary.write_bytes(result)
        temporary.rename(folder / _RESULT)


if __name__ == "__main__":
    _end_with_parent()
    # The parent may have ended during the imports. That of other ranks is rank 0.
    if os.getppid() == int(sys.argv[2]) or "LOCAL_RANK" in os.environ:
        _call(Path(sys.argv[1]))
