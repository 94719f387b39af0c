"""DeepSpeed's CPU optimizer, compiled before anything is timed.

DeepSpeed compiles it with torch's extension builder at its first use, in the process that trains. A process that is killed meanwhile
leaves a lock behind, on which every later one would wait for ever.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from torch.utils.cpp_extension import _get_build_directory

from benchmarks.common.processes import fresh_environment

_COMPILE = "import torch; from deepspeed.ops.adam import DeepSpeedCPUAdam as A; A([torch.nn.Parameter(torch.zeros(8))])"


def compile_cpu_adam() -> None:
    """Compiles the optimizer if needed, in a process without a time limit; removes the lock of a killed compilation first.

    Raises:
        RuntimeError: it does not compile; with the end of the output.
    """
    folder = Path(_get_build_directory("cpu_adam", False))
    for lock in folder.parent.glob("*/lock"):
        remove_stale_lock(lock)
    if (folder / "cpu_adam.so").exists():
        return
    print("compiling DeepSpeed's CPU optimizer (a minute or two; do not interrupt it)", flush=True)
    command = [sys.executable, "-c", _COMPILE]
    result = subprocess.run(command, env=fresh_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode:
        raise RuntimeError(
            f"DeepSpeed's CPU optimizer does not compile: {result.stdout.decode(errors='replace')[-2000:]}"
        )


def remove_stale_lock(lock: Path) -> None:
    """Removes the lock file of torch's extension builder if no process has it open, as the one that compiles has."""
    if not any(_opens(process, lock) for process in Path("/proc").glob("[0-9]*")):
        print(f"removing {lock}: the process that compiled there was killed", flush=True)
        lock.unlink(missing_ok=True)


def _opens(process: Path, file: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(os.path.realpath(link) == os.path.realpath(file) for link in (process / "fd").iterdir())
    return False
