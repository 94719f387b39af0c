"""Fuzzer of the worker: invalid arenas and messages.

All inputs of a worker come from its trainer. For any input a worker must answer, exit with 0, or exit with 1 and an error message. A
crash, a sanitizer's report or a hang is a failure.
"""

import ctypes
import os
import random
import socket
import subprocess
from pathlib import Path

import torch

from lightning_zenflow import native
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.machine import allowed_cores
from worker_blocks import Blocks

_HANG_S = 60.0
"""The worker's own wait for a step's word is 10 ms; nothing else takes long."""
_INTERESTING = (0, 1, 2, 3, 63, 64, 127, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def make_blocks(rng: random.Random) -> Blocks:
    """A small valid arena, with gradients of some steps."""
    counts = [rng.randrange(1, 400) for _ in range(2)]
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    blocks = Blocks(counts, n_blocks=rng.randrange(1, 4), dtype=dtype, n_threads=rng.randrange(1, 3), n_slots=12)
    for step in range(1, 4):
        blocks.set_step(step)
        blocks.arrive(step, rng.choice([1.0, float("nan"), float("inf")]))
    step = rng.randrange(1, 4)
    for block in range(len(blocks.partition.blocks)):
        blocks.arrive(step, 0.5, block)
    return blocks


def mutate(rng: random.Random, data: bytearray, *, words: bool) -> None:
    """Overwrites a few bytes, or aligned words with values at the limits of integer types."""
    for _ in range(rng.randrange(1, 4)):
        if words and len(data) >= 8 and rng.random() < 0.8:
            width = rng.choice([4, 8])
            at = rng.randrange(len(data) // width) * width
            value = rng.choice([*_INTERESTING, rng.getrandbits(64)]) % 2 ** (8 * width)
            data[at : at + width] = value.to_bytes(width, "little")
        elif data:
            data[rng.randrange(len(data))] = rng.randrange(256)


def break_arena(rng: random.Random, arena: Arena) -> None:
    """Mutates the header, the tables, the step records, the block words, what blocks show or the journal."""
    header = native.ArenaHeader.from_buffer_copy(os.pread(arena.fd, native.HEADER_BYTES, 0))
    regions = [
        (0, ctypes.sizeof(native.ArenaHeader)),
        (header.ranges_offset, header.n_ranges * ctypes.sizeof(native.Range)),
        (header.blocks_offset, header.n_blocks * ctypes.sizeof(native.Block)),
        (header.step_records_offset, header.n_step_records * header.step_record_bytes),
        (header.block_words_offset, header.n_blocks * ctypes.sizeof(native.StepWord)),
        (header.block_shown_offset, header.n_blocks * ctypes.sizeof(native.BlockShown)),
        (header.journal_offset + native.JournalEntry.begin.offset, 32),
    ]
    begin, size = rng.choice(regions)
    data = bytearray(os.pread(arena.fd, size, begin))
    mutate(rng, data, words=True)
    os.pwrite(arena.fd, bytes(data), begin)
    if rng.random() < 0.3:
        # As after the death of a worker: a job in progress, which the journal may or may not describe.
        for name in ("begun_job", "n_shares"):
            at = getattr(native.ArenaHeader, name).offset
            os.pwrite(arena.fd, rng.choice([1, 2]).to_bytes(8, "little"), at)


def message(rng: random.Random, job_id: int) -> bytes:
    """A job or a touch, valid or corrupted; or an exit; or noise."""
    slots = [rng.randrange(13) for _ in range(rng.randrange(4))]
    tentative = rng.choice(list(native.Tentative)) if slots else native.Tentative.NONE
    if tentative is native.Tentative.CORRECTION and rng.random() < 0.9:
        slots = slots[:1]
    job = native.UpdateJob(
        type=native.MessageType.JOB,
        block=rng.randrange(3),
        job_id=job_id,
        first_step=rng.randrange(1, 3),
        n_committed=len(slots) - bool(tentative),
        publish_buffer=rng.randrange(4),
        prediction_steps=rng.choice([0.0, 1.5]),
        tentative=tentative,
    )
    at = native.HEADER_BYTES
    touch = native.Touch(type=native.MessageType.TOUCH, request_id=job_id, offset=at, n_rows=3, row_bytes=2000)
    data = bytearray(bytes(job) + bytes((ctypes.c_uint32 * len(slots))(*slots)))
    if rng.random() < 0.3:
        data = bytearray(bytes(touch))
    kind = rng.random()
    if kind < 0.4:
        mutate(rng, data, words=True)
    elif kind < 0.5:
        data = data[: rng.randrange(len(data))]
    elif kind < 0.55:
        data = bytearray(rng.randbytes(rng.randrange(1, 20000)))
    elif kind < 0.6:
        data = bytearray(bytes(native.MessageHeader(type=native.MessageType.EXIT)))
    return bytes(data)


def attack(worker: Path, rng: random.Random) -> str:
    """Starts a worker and sends it messages. Returns a description of the failure, or ""."""
    arena = make_blocks(rng).arena
    if rng.random() < 0.5:
        break_arena(rng, arena)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    cores = ",".join(map(str, allowed_cores()[: rng.randrange(1, 3)]))
    command = [str(worker), str(arena.fd), str(theirs.fileno()), cores, "10"]
    with ours, theirs:
        process = subprocess.Popen(
            command,
            pass_fds=(arena.fd, theirs.fileno()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        )
        theirs.close()
        try:
            for job_id in range(1, 1 + rng.randrange(1, 8)):
                # One that is too long for a message, or for a worker that has gone.
                try:
                    ours.send(message(rng, job_id))
                except OSError:
                    break
            ours.shutdown(socket.SHUT_WR)
            output, _ = process.communicate(timeout=_HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"it hangs: {process.communicate()[0]!r}"
        finally:
            arena.close(keep_state=False)
    words = output.decode(errors="replace")
    says_why = words.startswith("zenflow-worker: ") and words.count("\n") == 1
    if (process.returncode == 0 and not words) or (process.returncode == 1 and says_why):
        return ""
    return f"it ended with {process.returncode}: {words}"


def fuzz(worker: Path, *, seed: int, attacks: int) -> list[str]:
    """Returns the failures, each with its seed."""
    return [f"seed {s}: {what}" for s in range(seed, seed + attacks) if (what := attack(worker, random.Random(s)))]
