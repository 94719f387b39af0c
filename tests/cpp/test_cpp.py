"""The C++ tests and broken inputs of the worker, in a quick build; as released and with sanitizers where `slow` is selected."""

import ctypes
import math
import os
import random
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cpp_build import BUILD_TIMEOUT_S, configure, folder_of, program, run, variants
from lightning_zenflow import native
from lightning_zenflow.core.step_inputs import step_word
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.machine import allowed_cores
from small_arena import SIZES, make_partition
from worker_blocks import Blocks

_RUN_TIMEOUT_S = 600

pytestmark = pytest.mark.timeout(2 * BUILD_TIMEOUT_S)


@pytest.mark.parametrize("variant", variants())
def test_parts(variant: str, tmp_path: Path) -> None:
    with changed_arena("") as arena:
        (tmp_path / "arena").write_bytes(os.pread(arena.fd, os.fstat(arena.fd).st_size, 0))
    options = {
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    tests = folder_of(variant) / "tests" / "zenflow-tests"
    result = run([tests, tmp_path / "arena"], **options)
    assert result.returncode == 0, result.stdout


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
    return f"word_of({step}).copy_(step_word(torch.tensor(1.0), {step}))"


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


def tables_of(arena: Arena) -> dict[str, Any]:
    """The arena's structures."""
    begin = arena._address()
    header = native.ArenaHeader.from_address(begin)
    return {
        "header": header,
        "ranges": (native.Range * header.n_ranges).from_address(begin + header.ranges_offset),
        "blocks": (native.Block * header.n_blocks).from_address(begin + header.blocks_offset),
        "completed": (ctypes.c_int64 * header.n_blocks).from_address(begin + header.block_jobs_offset),
        "block_words": (native.StepWord * header.n_blocks).from_address(begin + header.block_words_offset),
        "shown": (native.BlockShown * header.n_blocks).from_address(begin + header.block_shown_offset),
        "journal": native.JournalEntry.from_address(begin + header.journal_offset),
        "records": (ctypes.c_uint8 * header.n_step_records * header.step_record_bytes).from_address(
            begin + header.step_records_offset
        ),
    }


@contextmanager
def changed_arena(change: str, moments: torch.dtype = torch.float32) -> Iterator[Arena]:
    arena = Arena(make_partition(), replace(SIZES, moments_dtype=moments), device=torch.device("cpu"))
    names = {**vars(native), **HUGE, **tables_of(arena), "word_of": arena.word_of}
    exec(change, {**names, "torch": torch, "step_word": step_word})
    yield arena
    arena.close(keep_state=False)


def start(
    worker: Path, arena_fd: int, *, word_timeout_ms: int = 30, **options: Any
) -> tuple["subprocess.Popen[str]", socket.socket]:
    """A worker with `options` of its process, and the trainer's end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_RUN_TIMEOUT_S)
    command = [worker, str(arena_fd), "0", str(allowed_cores()[0]), str(word_timeout_ms)]
    inherited = [arena_fd] if arena_fd < 9999 else []
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stdin": theirs, **options}
    with theirs:
        return subprocess.Popen(command, pass_fds=inherited, text=True, **streams), ours


def end_of(
    worker: Path, arena_fd: int, messages: Sequence[bytes], *, gone: bool = False, **options: Any
) -> tuple[int, str | None, list[bytes]]:
    """Exit status of a worker that gets messages, what it prints, and its answers; `gone`: the trainer then sends nothing more."""
    process, ours = start(worker, arena_fd, **options)
    answers = list[bytes]()
    with process, ours:
        # One may be too long for a message, or for a worker that has gone.
        with suppress(OSError):
            for message in messages:
                ours.send(message)
        if gone:
            ours.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while answer := ours.recv(native.MAX_MESSAGE_BYTES):
                answers.append(answer)
        return process.wait(_RUN_TIMEOUT_S), process.communicate()[1], answers


def error_of(worker: Path, arena_fd: int, messages: Sequence[bytes] = (), **options: Any) -> str:
    """The error that a worker sends, and prints, and with which it ends."""
    status, printed, (*_, error) = end_of(worker, arena_fd, messages, **options)
    text = error[ctypes.sizeof(native.MessageHeader) :].decode()
    assert native.MessageHeader.from_buffer_copy(error).type == native.MessageType.ERROR
    assert status == 1 and printed in (None, f"zenflow-worker: {text}\n")
    return text


LIMITS = (0, 1, 2, 3, 63, 64, 127, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(rng: random.Random, data: Any) -> None:
    """Overwrites bytes, or aligned words with values at the limits of integer types."""
    for _ in range(rng.randrange(1, 4)):
        width = rng.choice([4, 8]) if rng.random() < 0.8 and len(data) >= 8 else 1
        at = rng.randrange(len(data) // width) * width
        value = rng.choice([*LIMITS, rng.getrandbits(64)]) % 2 ** (8 * width)
        data[at : at + width] = value.to_bytes(width, "little")


def drawn_message(rng: random.Random, job_id: int) -> bytes:
    """A job or a touch, valid or changed or cut; or an exit; or noise."""
    slots = [rng.randrange(13) for _ in range(rng.randrange(4))]
    tentative = rng.choice(list(native.Tentative)) if slots else native.Tentative.NONE
    steps = {"first_step": rng.randrange(1, 3), "n_committed": len(slots) - bool(tentative), "tentative": tentative}
    places = {"block": rng.randrange(3), "publish_buffer": rng.randrange(4)}
    touch = native.Touch(type=native.MessageType.TOUCH, offset=native.HEADER_BYTES, n_rows=3, row_bytes=2000)
    data = bytearray(job(*slots, job_id=job_id, **steps, **places) if rng.random() < 0.7 else bytes(touch))
    kind = rng.random()
    if kind < 0.4:
        mutate(rng, data)
    elif kind < 0.5:
        return bytes(data[: rng.randrange(len(data))])
    elif kind < 0.55:
        return rng.randbytes(rng.randrange(1, 20000))
    elif kind < 0.6:
        return bytes(native.MessageHeader(type=native.MessageType.EXIT))
    return bytes(data)


@pytest.mark.parametrize(("variant", "seeds"), [("quick", 40), pytest.param("address", 5000, marks=pytest.mark.slow)])
def test_broken_arenas_and_messages(variant: str, seeds: int) -> None:
    """The worker answers, or reports an error and exits with 1; it never crashes, hangs or violates a sanitizer."""
    options = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    for seed in range(seeds):
        rng = random.Random(seed)
        counts, dtype = [rng.randrange(1, 400) for _ in range(2)], rng.choice([*native.DATA_TYPES][:3])
        blocks = Blocks(counts, n_blocks=rng.randrange(1, 4), dtype=dtype, n_slots=12)
        for step in range(1, 4):
            blocks.set_step(step)
            blocks.arrive(step, rng.choice([1.0, math.nan, math.inf]))
            blocks.arrive(step, 0.5, step % len(blocks.partition.blocks))
        tables = tables_of(blocks.arena)
        if rng.random() < 0.5:
            mutate(rng, memoryview(tables[rng.choice([*tables])]).cast("B"))
        if rng.random() < 0.3:
            # As after the death of a worker: a job in progress, which the journal may or may not describe.
            tables["header"].begun_job, tables["header"].n_shares = rng.choice([1, 2]), rng.choice([1, 2])
        messages = [drawn_message(rng, job_id) for job_id in range(1, rng.randrange(2, 9))]
        status, printed, _ = end_of(
            folder_of(variant) / "zenflow-worker", blocks.arena.fd, messages, gone=True, env=options
        )
        blocks.arena.close(keep_state=False)
        expected = "" if status == 0 else "zenflow-worker: .*\n"
        assert status in (0, 1) and re.fullmatch(expected, printed or ""), f"seed {seed}: {status}, {printed}"


def test_a_trainer_that_dies_before_the_worker_is_ready() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with changed_arena("") as arena, theirs:
        assert end_of(folder_of("quick") / "zenflow-worker", arena.fd, [], stdin=theirs) == (0, "", [])


@pytest.mark.parametrize("variant", variants("thread"))
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


@pytest.mark.parametrize("variant", variants("thread"))
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
        done = run([worker, *arguments.split()])
        assert done.returncode > 0 and message in done.stdout, done.stdout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        status, printed, _ = end_of(worker, 0, [], stdin=stream)
    assert status > 0 and "type == SOCK_SEQPACKET" in str(printed)


def test_the_worker_needs_no_other_libraries_than_the_c_library() -> None:
    """The C++ runtime is the image's own. How old the C library may be says auditwheel, at a release."""
    if (ldd := program("ldd")) is None:
        pytest.skip("ldd is not installed")
    listed = run([ldd, folder_of("quick") / "zenflow-worker"]).stdout
    libraries = set(re.findall(r"^\s*(lib[\w+]+)\S* => ", listed, re.MULTILINE))
    assert {"libc"} <= libraries <= {"libc", "libm", "libpthread", "libdl", "librt"}


def test_what_cmake_says(tmp_path: Path) -> None:
    without_compiler = configure(tmp_path / "1", CXX="/nonexistent/c++")
    assert without_compiler.returncode != 0
    for part in ("no C++ compiler was found", "apt-get install g++", "dnf install gcc-c++"):
        assert part in without_compiler.stdout
    misspelt = configure(tmp_path / "2", "-DZENFLOW_SANITIZE=adress")
    assert misspelt.returncode != 0 and "'adress'" in misspelt.stdout
