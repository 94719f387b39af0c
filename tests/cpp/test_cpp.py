"""The C++ tests of ``tests/cpp`` and a fuzzer of the worker, in a quick build; as released and with sanitizers where `slow` is selected."""

import ctypes
import math
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cpp_build import BUILD_TIMEOUT_S, VARIANTS, configure, folder_of, program, run
from lightning_zenflow import native
from lightning_zenflow.core.step_inputs import step_word
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.machine import allowed_cores
from small_arena import SIZES, make_partition
from worker_blocks import Blocks
from worker_fuzzer import fuzz

_RUN_TIMEOUT_S = 600
# It single-steps the released worker; other builds would execute many times as many instructions.
_SKIPPED = {variant: ["-kill"] for variant in VARIANTS if variant != "release"}
"""Groups of tests that a variant leaves out."""

pytestmark = pytest.mark.timeout(2 * BUILD_TIMEOUT_S)


def write_arenas(folder: Path) -> None:
    """Of each type of moments an arena of two blocks with three steps, the second of which is not finite; and one without steps."""
    for moments in (torch.float32, torch.bfloat16, torch.int8):
        blocks = Blocks(dtype=torch.bfloat16, moments=moments)

        def write(name: str, fd: int = blocks.arena.fd) -> None:
            (folder / name).write_bytes(os.pread(fd, os.fstat(fd).st_size, 0))

        write("empty")
        for step, factor in ((1, 0.5), (2, math.nan), (3, 0.5)):
            blocks.set_step(step)
            blocks.arrive(step, factor)
        write(str(moments))
        blocks.arena.close(keep_state=False)


@pytest.mark.parametrize("variant", ["quick", *(pytest.param(v, marks=pytest.mark.slow) for v in list(VARIANTS)[1:])])
def test_cpp(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All of their bytes are compared after each instruction.
    monkeypatch.setattr("lightning_zenflow.worker.arena.PAGE_BYTES", 64)
    write_arenas(tmp_path)
    result = run(
        [folder_of(variant) / "tests" / "zenflow-tests", *_SKIPPED.get(variant, [])],
        timeout_s=_RUN_TIMEOUT_S,
        ZENFLOW_ARENAS=str(tmp_path),
        ASAN_OPTIONS="detect_leaks=1",
        UBSAN_OPTIONS="print_stacktrace=1",
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert result.returncode == 0, result.stdout
    assert " 0 failed" in result.stdout


@pytest.mark.parametrize(("variant", "attacks"), [("quick", 40), pytest.param("address", 5000, marks=pytest.mark.slow)])
def test_broken_arenas_and_messages(variant: str, attacks: int) -> None:
    """The worker answers, or reports an error and exits with 1; it never crashes, hangs or violates a sanitizer."""
    assert fuzz(folder_of(variant) / "zenflow-worker", seed=1000 * attacks, attacks=attacks) == []


HUGE = {"HUGE_32": 2**32 - 1, "HUGE_64": 2**64 - 1}
OFFSETS = ("ranges", "blocks", "step_records", "master", "exp_avg", "exp_avg_sq", "slots", "publish", "block_words")
INVALID = [
    "header.magic ^= 1",
    "header.version += 1",
    "header.total_bytes += 1",
    "header.total_bytes = HEADER_BYTES - 1",
    "header.moments_dtype = 2",
    "header.moments_dtype = 4",
    "header.model_dtype = 3",
    "header.n_scales = HUGE_64",
    "header.numel = HUGE_64",
    "header.n_ranges = HUGE_32",
    "header.n_blocks = HUGE_32",
    "header.n_param_groups = HUGE_32",
    "header.n_step_records = 0",
    "header.n_step_records = HUGE_32",
    "header.n_slots = HUGE_32",
    "header.n_publish_buffers = HUGE_32",
    "header.slot_numel = HUGE_64",
    "header.step_record_bytes -= 64",
    "header.resolved_step = -1",
    "header.n_journal_entries = 0",
    "header.n_journal_entries = 1000",
    "header.journal_offset = header.block_shown_offset + 8",
    "header.exp_avg_offset = header.master_offset + 8",
    # Inside the header, misaligned, at the very end, behind it.
    *(
        f"header.{name}_offset = {value}"
        for name in OFFSETS
        for value in ("0", f"header.{name}_offset + 1", "header.total_bytes", "HUGE_64 - 7")
    ),
    "ranges[0].end = ranges[1].begin + 1",
    "ranges[0].begin = ranges[0].end + 1",
    "ranges[-1].end = header.numel + 1",
    "ranges[1].param_group = 2",
    "ranges[1].n_missed = -1",
    "blocks[1].begin = blocks[0].end - 1",
    "blocks[1].end = header.numel + 1",
    "blocks[1].begin, blocks[1].end = header.numel, header.numel - 1",
    "blocks[0].end = header.slot_numel + 1",
]
"""Changes of a valid arena that the worker refuses."""
WITH_SCALES = [
    "ranges[0].end -= 10; ranges[1].begin -= 5",
    "blocks[0].end -= 10",
    "ranges[1].first_scale = 0",
    "ranges[1].first_scale = header.n_scales",
]
"""With scales, tiles are parts of blocks and have scales of their own."""


def job(*slots: int, **fields: int) -> bytes:
    header = {"type": native.MessageType.JOB, "job_id": 1, "first_step": 1, **fields}
    return bytes(native.UpdateJob(**header)) + b"".join(slot.to_bytes(4, "little") for slot in slots)


def word(step: int) -> str:
    """The change in which a step's word has arrived."""
    return f"step_words[{step}].copy_(step_word(torch.tensor(1.0), {step}))"


MESSAGES: list[tuple[str, list[bytes], str]] = [
    ("", [bytes(native.MAX_MESSAGE_BYTES + 1)], "message.size"),
    ("", [bytes(4)], "message.size"),
    ("", [bytes(native.MessageHeader(type=77))], "is_job(received)"),
    ("", [job(block=3)], "job.block"),
    ("", [job(publish_buffer=4)], "job.publish_buffer"),
    ("", [job(0, 99, n_committed=2)], "slots[i]"),
    ("", [job(0, n_committed=1, tentative=4)], "message.size"),
    ("", [job(0, 0, n_committed=1, tentative=4)], "job.tentative"),
    ("", [job(0, 0, n_committed=1, tentative=3)], "job.n_committed == 0"),
    ("", [job(0, n_committed=2)], "message.size"),
    ("", [job(0, 0, tentative=1)], "message.size"),
    ("", [job(0, 0, n_committed=2**32 - 1)], "message.size"),
    ("", [job(*[0] * 4086, n_committed=2)], "message.size"),
    ("", [job(0, n_committed=1, first_step=0)], "job.first_step >= 1"),
    ("", [job(0, n_committed=1, first_step=2**63 - 1)], "job.first_step <= "),
    ("", [job(*[0] * 17, n_committed=17)], "n_steps <= capacity"),
    ("", [job(0, n_committed=1, first_step=17)], "resolved_step + capacity"),
    (
        "",
        [bytes(native.Touch(type=native.MessageType.TOUCH, offset=0, n_rows=2, row_bytes=2**40))],
        "request.row_bytes",
    ),
    ("", [job(0, 1, n_committed=2)], "step 1's clip coefficient did not arrive within 30 ms"),
    ("", [job(0, block=1, tentative=1)], "step 1's clip coefficient did not arrive within 30 ms, for block 1"),
    ("header.newest_first = 1", [job(0, 1, n_committed=2)], "step 1's clip coefficient did not arrive within 30 ms"),
    (
        "header.newest_first, header.begun_job, completed[1] = 1, 1, 1",
        [job(job_id=2)],
        "job 1, which was begun, was not submitted again within 30 ms",
    ),
    ("", [job(job_id=2), job(block=1, job_id=2)], "job.job_id > last_job_id_"),
    (
        "header.begun_job, header.completed_job, completed[0] = 5, 4, 4",
        [job(job_id=4), job(job_id=6)],
        "job.job_id == in_progress",
    ),
    (f"ranges[0].n_missed = 1; {word(1)}", [job(0, n_committed=1)], "a range has missed all steps"),
    (word(17), [job(0, n_committed=1)], "sequence <= step"),
    (f"{word(17)}; header.resolved_step = 17", [job(0, n_committed=1)], "sequence_of(record.word) == step"),
    ("header.begun_job, header.n_shares, journal.end = 1, 1, blocks[0].end + 1", [job()], "e.end <= block.end"),
]
"""A change of a valid arena, messages, and what the worker says of the last one."""

ARGUMENTS = {
    "3 4 0": "expected four arguments",
    "three 4 0 10": "expected a number, got 'three'",
    "3 4 1-3 10": "'1-3'",
    "--bench ,": "','",
    "0 9999 0 10": "socket: ",
}


@contextmanager
def changed_arena(change: str, moments: torch.dtype = torch.float32) -> Iterator[Arena]:
    arena = Arena(make_partition(), replace(SIZES, moments_dtype=moments), device=torch.device("cpu"))
    begin = arena._address()
    header = native.ArenaHeader.from_address(begin)
    parts = {
        "header": header,
        "ranges": (native.Range * header.n_ranges).from_address(begin + header.ranges_offset),
        "blocks": (native.Block * header.n_blocks).from_address(begin + header.blocks_offset),
        "completed": (ctypes.c_int64 * header.n_blocks).from_address(begin + header.block_jobs_offset),
        "journal": native.JournalEntry.from_address(begin + header.journal_offset),
    }
    parts["step_words"] = arena.step_words
    exec(change, {**vars(native), **HUGE, **parts, "torch": torch, "step_word": step_word})
    yield arena
    arena.close(keep_state=False)


def error_of(worker: Path, arena_fd: int, messages: Sequence[bytes] = (), stderr: int = subprocess.PIPE) -> str:
    """The error that a worker sends, and prints, and with which it ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [worker, str(arena_fd), "0", str(allowed_cores()[0]), "30"]
    inherited = [arena_fd] if arena_fd < 9999 else []
    with ours, subprocess.Popen(command, stdin=theirs, pass_fds=inherited, stderr=stderr, text=True) as process:
        theirs.close()
        for message in messages:
            ours.send(message)
        *_, error = iter(lambda: ours.recv(native.MAX_MESSAGE_BYTES), b"")
        text = error[ctypes.sizeof(native.MessageHeader) :].decode()
        printed, status = process.communicate(timeout=_RUN_TIMEOUT_S)[1], process.returncode
    assert native.MessageHeader.from_buffer_copy(error).type == native.MessageType.ERROR
    assert status == 1 and printed in (None, f"zenflow-worker: {text}\n")
    return text


VARIANTS_WITH_ERRORS = pytest.mark.parametrize(
    "variant", ["quick", *(pytest.param(v, marks=pytest.mark.slow) for v in ("release", "address"))]
)


@VARIANTS_WITH_ERRORS
def test_invalid_arenas_are_refused(variant: str) -> None:
    worker = folder_of(variant) / "zenflow-worker"
    for moments, changes in ((torch.float32, INVALID), (torch.int8, WITH_SCALES)):
        for change in changes:
            with changed_arena(change, moments) as arena:
                assert re.match("invalid input: |arena: version must be", error_of(worker, arena.fd)), change
    assert "arena: " in error_of(worker, 9999)
    fd = os.memfd_create("empty")
    assert "n_bytes >= kHeaderBytes" in error_of(worker, fd)
    os.close(fd)


@VARIANTS_WITH_ERRORS
def test_invalid_messages_and_arguments_are_refused(variant: str) -> None:
    """With a closed standard error as well."""
    worker = folder_of(variant) / "zenflow-worker"
    for change, messages, error in MESSAGES:
        with changed_arena(change) as arena:
            assert error in error_of(worker, arena.fd, messages)
    reader, writer = os.pipe()
    os.close(reader)
    with changed_arena("header.n_step_records = 0") as arena:
        assert "n_step_records >= 2" in error_of(worker, arena.fd, stderr=writer)
    os.close(writer)
    for arguments, message in ARGUMENTS.items():
        done = run([worker, *arguments.split()], timeout_s=_RUN_TIMEOUT_S)
        assert done.returncode > 0 and message in done.stdout, done.stdout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        command = [worker, "0", "0", "0", "10"]
        done = subprocess.run(command, stdin=stream, capture_output=True, text=True)
    assert done.returncode > 0 and "type == SOCK_SEQPACKET" in done.stderr


def test_the_worker_needs_no_other_libraries_than_the_c_library() -> None:
    """The C++ runtime is the image's own. How old the C library may be says auditwheel, at a release."""
    if (ldd := program("ldd")) is None:
        pytest.skip("ldd is not installed")
    listed = run([ldd, folder_of("quick") / "zenflow-worker"], timeout_s=_RUN_TIMEOUT_S).stdout
    libraries = set(re.findall(r"^\s*(lib[\w+]+)\S* => ", listed, re.MULTILINE))
    assert {"libc"} <= libraries <= {"libc", "libm", "libpthread", "libdl", "librt"}


def test_what_cmake_says(tmp_path: Path) -> None:
    without_compiler = configure(tmp_path / "1", CXX="/nonexistent/c++")
    assert without_compiler.returncode != 0
    for part in ("no C++ compiler was found", "apt-get install g++", "dnf install gcc-c++"):
        assert part in without_compiler.stdout
    misspelt = configure(tmp_path / "2", "-DZENFLOW_SANITIZE=adress")
    assert misspelt.returncode != 0 and "'adress'" in misspelt.stdout
