"""Likely causes of a worker's death, and what to do about each; the signal or exit status alone does not say."""

import signal
from pathlib import Path

from lightning_zenflow.worker.cores import control_groups, read_table

_ROOT = Path("/")

_OF_THE_PROGRAM = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGSYS)
"""Signals that end a program at its start if it does not suit the machine or is incomplete."""


class OutOfMemoryKills:
    """Counts the processes that the kernel's out-of-memory killer has ended, in this process' control groups and on the machine."""

    def __init__(self) -> None:
        self._seen = _counts(_ROOT)

    def since_last(self) -> str | None:
        """A sentence if there were any since the last call or the construction: where, and what to do; None if there were none."""
        now, before = _counts(_ROOT), self._seen
        self._seen = now
        for where, count in now.items():
            if count > before.get(where, 0):
                return (
                    f"The kernel's out-of-memory killer ended {count - before.get(where, 0)} process(es) meanwhile, says {where}: host"
                    " memory is too small. Use moments_dtype='bfloat16' or 'int8', smaller update_interval, publish_lag or"
                    " max_update_interval, fewer processes of data loaders, or give the job more memory"
                )
        return None


def why_it_cannot_start(status: int, output: str) -> str | None:
    """Why a worker that ended before it was ready could not start, if the program does not suit the machine; None otherwise.

    Args:
        status: exit status, negative for a signal.
        output: its last output.
    """
    if status < 0 and -status in _OF_THE_PROGRAM:
        return f"{signal.Signals(-status).name} at its start, as by an instruction that the CPU lacks, or by an incomplete file"
    if status > 0 and ("GLIBC" in output or "while loading shared libraries" in output):
        return output.splitlines()[0]
    return None


def threads_refused(output: str) -> str:
    """A sentence with what to do where the system has refused a thread or process; empty if the output does not say so."""
    if "Thread creation failed" not in output and "Resource temporarily unavailable" not in output:
        return ""
    return (
        ". The system allows no more threads (`ulimit -u`, or the control group's pids.max): raise the limit, or lower worker_cores or the"
        " number of data loaders' processes"
    )


def _counts(root: Path) -> dict[str, int]:
    """Kills so far, by the file that says so: the nearest control group first, the machine last."""
    # With the kills of descendants.
    files = [*(folder / "memory.events" for folder in control_groups(root)), root / "proc/vmstat"]
    return {str(path): table["oom_kill"] for path in files if "oom_kill" in (table := read_table(path))}
