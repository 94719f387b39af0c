"""Python's mirror of ``csrc/common/protocol.h``, field by field: the contract with the worker process; and the paths of what was compiled.

The header documents units, ownership and ordering. A test compares constants, types and names with it.
"""

import enum
import errno
import os
import platform
import signal
import sys
from contextlib import suppress
from ctypes import LittleEndianStructure, c_double, c_float, c_int64, c_uint8, c_uint32, c_uint64
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import torch

MAGIC: Final = 0x574F4C464E455A31

VERSION: Final = 19

HEADER_BYTES: Final = 4096

MAX_MESSAGE_BYTES: Final = 16384

TILE_ELEMENTS: Final = 128

JOURNAL_ENTRY_BYTES: Final = 4096

NO_BLOCK: Final = 2**32 - 1

DATA_TYPES: Final[dict[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Element types of gradient slots, publish buffers and moments (int8: of those alone): values of ``zenflow::DataType``."""


def fields(*runs: tuple[Any, str]) -> list[tuple[str, Any]]:
    """`_fields_` of a structure, from the type and the names of each run of members."""
    return [(name, kind) for kind, names in runs for name in names.split()]


class ArenaHeader(LittleEndianStructure):
    """``zenflow::ArenaHeader``: the first bytes of the arena."""

    _fields_ = fields(
        (c_uint64, "magic version total_bytes"),
        (c_uint32, "model_dtype newest_first"),
        (c_uint64, "numel"),
        (c_uint32, "n_ranges n_blocks n_param_groups n_step_records n_slots n_publish_buffers"),
        (c_uint64, "slot_numel"),
        (c_uint32, "n_journal_entries moments_dtype"),
        (c_uint64, "ranges_offset blocks_offset step_records_offset step_record_bytes"),
        (c_uint64, "master_offset exp_avg_offset exp_avg_sq_offset scales_offset n_scales slots_offset publish_offset"),
        (c_uint64, "journal_offset block_words_offset block_jobs_offset block_shown_offset"),
        (c_int64, "resolved_step begun_job completed_job"),
        (c_uint64, "n_shares"),
        (c_int64, "awaited_step"),
        (c_uint32, "awaited_block reserved_of_word"),
        (c_uint64, "n_looks"),
    )


class Range(LittleEndianStructure):
    """``zenflow::Range``: elements of the partition that belong to one parameter group, with one step count."""

    _fields_ = fields((c_uint64, "begin end"), (c_uint32, "param_group first_scale"), (c_int64, "n_missed"))


class MomentScales(LittleEndianStructure):
    """``zenflow::MomentScales``: scales of one tile's moments in 8 bits."""

    _fields_ = fields((c_float, "exp_avg exp_avg_sq"))


class Block(LittleEndianStructure):
    """``zenflow::Block``: elements of the partition that one job updates."""

    _fields_ = fields((c_uint64, "begin end"))


class Hyperparameters(LittleEndianStructure):
    """``zenflow::Hyperparameters``: optimizer settings of one parameter group in one step."""

    _fields_ = fields((c_double, "lr beta1 beta2 eps weight_decay"), (c_uint32, "decoupled reserved"))


class StepWord(LittleEndianStructure):
    """``zenflow::StepWord``: clip coefficient and the step's number."""

    _fields_ = fields((c_float, "clip"), (c_uint32, "check"), (c_int64, "sequence"))


class StepRecord(LittleEndianStructure):
    """``zenflow::StepRecord``: followed in memory by two ``Hyperparameters`` sets, committed and tentative, of one a parameter group."""

    _fields_ = fields((StepWord, "word"), (c_int64, "count reserved"))


class BlockShown(LittleEndianStructure):
    """``zenflow::BlockShown``: how a block's published weights show the step that is not committed."""

    _fields_ = fields((c_int64, "step"), (c_float, "factor"), (c_uint32, "is_true"))


class JournalEntry(LittleEndianStructure):
    """``zenflow::JournalEntry``: progress and undo log of one thread's share of a job."""

    _fields_ = fields(
        (c_float * (3 * TILE_ELEMENTS), "saved"),
        (c_uint64, "begin end position saved_at"),
        (c_uint8 * (JOURNAL_ENTRY_BYTES - 12 * TILE_ELEMENTS - 32), "reserved"),
    )


class MessageType(enum.IntEnum):
    """``zenflow::MessageType``: the first word of every socket message."""

    JOB = 1
    EXIT = 2
    READY = 3
    DONE = 4
    ERROR = 5
    TOUCH = 7
    ACKNOWLEDGED = 8


class MessageHeader(LittleEndianStructure):
    """``zenflow::MessageHeader``: the whole exit message, and the start of an error message."""

    _fields_ = fields((c_uint32, "type reserved"))


class Tentative(enum.IntEnum):
    """``zenflow::Tentative``: a job's tentative part, and where its factor and hyperparameters are from."""

    NONE = 0
    PREDICTED = 1
    TRUE_IF_KNOWN = 2
    CORRECTION = 3


class UpdateJob(LittleEndianStructure):
    """``zenflow::UpdateJob``: followed in the message by ``uint32_t slots[]``, one for each step."""

    _fields_ = fields(
        (c_uint32, "type block"),
        (c_int64, "job_id first_step"),
        (c_uint32, "n_committed publish_buffer"),
        (c_float, "prediction_steps"),
        (c_uint32, "tentative"),
    )


class Ready(LittleEndianStructure):
    """``zenflow::Ready``: the worker's first message."""

    _fields_ = fields((c_uint32, "type n_threads"), (c_uint64, "version"))


class Done(LittleEndianStructure):
    """``zenflow::Done``: one per job, in the order in which they are done."""

    _fields_ = fields((c_uint32, "type block"), (c_int64, "job_id busy_ns"))


class Touch(LittleEndianStructure):
    """``zenflow::Touch``: request to allocate memory of the arena."""

    _fields_ = fields((c_uint32, "type reserved"), (c_int64, "request_id"), (c_uint64, "offset n_rows row_bytes"))


class Acknowledged(LittleEndianStructure):
    """``zenflow::Acknowledged``: one per request, behind the ``Done`` messages of all jobs before."""

    _fields_ = fields((c_uint32, "type reserved"), (c_int64, "request_id busy_ns"))


Answer = Ready | Done | Acknowledged

ANSWERS: dict[int, type[Answer]] = {
    MessageType.READY: Ready,
    MessageType.DONE: Done,
    MessageType.ACKNOWLEDGED: Acknowledged,
}
"""Of the worker, by their type; an error is a `MessageHeader` with a text."""


_ENVIRONMENT_VARIABLE = "LIGHTNING_ZENFLOW_WORKER"


def worker_executable() -> Path:
    """Path of the worker's executable: ``bin/zenflow-worker`` in the installed package, or what the environment variable
    ``LIGHTNING_ZENFLOW_WORKER`` says; RuntimeError: the file is missing or not executable.
    """
    if override := os.environ.get(_ENVIRONMENT_VARIABLE):
        candidates = [Path(override)]
    else:
        package = sys.modules[__name__.partition(".")[0]]  # not imported: its __init__ imports rooms above this one
        folders = [Path(folder) for folder in package.__path__]
        # An editable install leaves the sources in place and puts compiled files next to the package's metadata.
        with suppress(PackageNotFoundError):
            folders.append(Path(str(distribution("lightning-zenflow").locate_file("lightning_zenflow"))))
        candidates = [folder / "bin" / "zenflow-worker" for folder in dict.fromkeys(folders)]
    path = next(filter(Path.is_file, candidates), None)
    if path is None:
        raise RuntimeError(
            f"The worker's executable is missing; looked for {', '.join(map(str, candidates))}. It is built when the package is installed:"
            " install a C++ compiler (Debian, Ubuntu: `apt-get install g++`), then run `pip install lightning-zenflow`, or"
            f" `pip install -e .` in a clone of the repository. The environment variable {_ENVIRONMENT_VARIABLE} names one elsewhere, got"
            f" {override!r}."
        )
    if not os.access(path, os.X_OK):
        raise RuntimeError(f"The worker's executable {path} must be executable; run `chmod +x {path}`.")
    return path


def cannot_run(path: Path, reason: object) -> str:
    """The message for a compiled file that this machine cannot run, or that is missing, with what to do."""
    for number, limit in ((errno.EMFILE, "open files (`ulimit -n`)"), (errno.EAGAIN, "processes (`ulimit -u`)")):
        if os.strerror(number) in str(reason):
            return f"{path} cannot be opened: {reason}; raise the limit of {limit}, or have fewer"
    machine = " ".join(filter(None, (platform.machine(), *platform.libc_ver())))
    return (
        f"{path} cannot run on this machine ({machine}): {reason}; install a wheel of lightning-zenflow for this machine, or build it here:"
        " `pip install --force-reinstall --no-deps .` in a clone of the repository, with g++"
    )


def cannot_start(status: int, output: str) -> str | None:
    """Why a worker ended before it was ready, if the program does not suit the machine; None otherwise."""
    if -status in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGSYS):
        refused = "memory that the system refuses (with vm.overcommit_memory=2: raise vm.overcommit_ratio)"
        cause = refused if -status == signal.SIGBUS else "an instruction that the CPU lacks"
        return f"{signal.Signals(-status).name} at its start, as by {cause}, or by an incomplete file"
    if status > 0 and ("GLIBC" in output or "while loading shared libraries" in output):
        return output.splitlines()[0]
    return None


def worker_environment() -> dict[str, str]:
    """Environment variables of the worker's executable."""
    # Such limits are meant for the trainer's libraries; the worker has one thread per core.
    limits = ("OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS")
    inherited = {name: value for name, value in os.environ.items() if name not in limits}
    # Idle OpenMP threads must sleep: data loaders may use their cores.
    return {**inherited, "OMP_WAIT_POLICY": "passive", "OMP_DYNAMIC": "false"}
