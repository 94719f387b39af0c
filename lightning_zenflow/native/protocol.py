"""Mirror of ``csrc/common/protocol.h``, field by field: the contract with the worker process.

The header documents units, ownership and ordering. A test compares every size and offset with ``zenflow-worker --layout``.
"""

import ctypes
import enum
from typing import Final

import torch

MAGIC: Final = 0x574F4C464E455A31

VERSION: Final = 10

HEADER_BYTES: Final = 4096

MAX_MESSAGE_BYTES: Final = 16384

TILE_ELEMENTS: Final = 128

JOURNAL_ENTRY_BYTES: Final = 4096

DATA_TYPES: Final[dict[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types of gradient slots, publish buffers and moments: values of ``zenflow::DataType``."""


class ArenaHeader(ctypes.LittleEndianStructure):
    """``zenflow::ArenaHeader``: the first bytes of the arena."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint64),
        ("total_bytes", ctypes.c_uint64),
        ("gradient_dtype", ctypes.c_uint32),
        ("weight_dtype", ctypes.c_uint32),
        ("numel", ctypes.c_uint64),
        ("n_ranges", ctypes.c_uint32),
        ("n_blocks", ctypes.c_uint32),
        ("n_param_groups", ctypes.c_uint32),
        ("n_step_records", ctypes.c_uint32),
        ("n_slots", ctypes.c_uint32),
        ("n_publish_buffers", ctypes.c_uint32),
        ("slot_numel", ctypes.c_uint64),
        ("n_journal_entries", ctypes.c_uint32),
        ("moments_dtype", ctypes.c_uint32),
        ("ranges_offset", ctypes.c_uint64),
        ("blocks_offset", ctypes.c_uint64),
        ("step_records_offset", ctypes.c_uint64),
        ("step_record_bytes", ctypes.c_uint64),
        ("master_offset", ctypes.c_uint64),
        ("exp_avg_offset", ctypes.c_uint64),
        ("exp_avg_sq_offset", ctypes.c_uint64),
        ("slots_offset", ctypes.c_uint64),
        ("publish_offset", ctypes.c_uint64),
        ("journal_offset", ctypes.c_uint64),
        ("block_words_offset", ctypes.c_uint64),
        ("resolved_step", ctypes.c_int64),
        ("begun_job", ctypes.c_int64),
        ("completed_job", ctypes.c_int64),
        ("n_shares", ctypes.c_uint64),
        ("export_offset", ctypes.c_uint64),
        ("export_bytes", ctypes.c_uint64),
    )


class Range(ctypes.LittleEndianStructure):
    """``zenflow::Range``: elements of the partition that belong to one parameter group."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("param_group", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class Block(ctypes.LittleEndianStructure):
    """``zenflow::Block``: elements of the partition that one job updates."""

    _fields_ = (("begin", ctypes.c_uint64), ("end", ctypes.c_uint64))


class Hyperparameters(ctypes.LittleEndianStructure):
    """``zenflow::Hyperparameters``: optimizer settings of one parameter group in one step."""

    _fields_ = (
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("decoupled", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class StepWord(ctypes.LittleEndianStructure):
    """``zenflow::StepWord``: clip coefficient and the step's number."""

    _fields_ = (("clip", ctypes.c_float), ("check", ctypes.c_uint32), ("sequence", ctypes.c_int64))


class StepRecord(ctypes.LittleEndianStructure):
    """``zenflow::StepRecord``: followed in memory by two ``Hyperparameters`` sets, committed and tentative, of one a parameter group."""

    _fields_ = (("word", StepWord), ("count", ctypes.c_int64), ("reserved", ctypes.c_int64))


class JournalEntry(ctypes.LittleEndianStructure):
    """``zenflow::JournalEntry``: progress and undo log of one thread's share of a job."""

    _fields_ = (
        ("saved", ctypes.c_float * (3 * TILE_ELEMENTS)),
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("saved_at", ctypes.c_uint64),
        ("reserved", ctypes.c_uint8 * (JOURNAL_ENTRY_BYTES - 12 * TILE_ELEMENTS - 32)),
    )


class MessageType(enum.IntEnum):
    """``zenflow::MessageType``: the first word of every socket message."""

    JOB = 1
    EXIT = 2
    READY = 3
    DONE = 4
    ERROR = 5
    EXPORT = 6
    TOUCH = 7
    ACKNOWLEDGED = 8


class MessageHeader(ctypes.LittleEndianStructure):
    """``zenflow::MessageHeader``: the whole exit message, and the start of an error message."""

    _fields_ = (("type", ctypes.c_uint32), ("reserved", ctypes.c_uint32))


class UpdateJob(ctypes.LittleEndianStructure):
    """``zenflow::UpdateJob``: followed in the message by ``uint32_t slots[n_committed + has_tentative]``."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("job_id", ctypes.c_int64),
        ("first_step", ctypes.c_int64),
        ("n_committed", ctypes.c_uint32),
        ("publish_buffer", ctypes.c_uint32),
        ("prediction_steps", ctypes.c_float),
        ("has_tentative", ctypes.c_uint32),
    )


class Ready(ctypes.LittleEndianStructure):
    """``zenflow::Ready``: the worker's first message."""

    _fields_ = (("type", ctypes.c_uint32), ("n_threads", ctypes.c_uint32), ("version", ctypes.c_uint64))


class Done(ctypes.LittleEndianStructure):
    """``zenflow::Done``: one per job, in order of submission."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("job_id", ctypes.c_int64),
        ("start_ns", ctypes.c_int64),
        ("wait_ns", ctypes.c_int64),
        ("busy_ns", ctypes.c_int64),
    )


class Export(ctypes.LittleEndianStructure):
    """``zenflow::Export``: request to copy the state of some entries to the export section."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("n_tiles", ctypes.c_uint32),
        ("request_id", ctypes.c_int64),
        ("tiles_offset", ctypes.c_uint64),
    )


class ExportTile(ctypes.LittleEndianStructure):
    """``zenflow::ExportTile``: entries of one rectangle, and the place of their state."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("width", ctypes.c_uint32),
        ("n_columns", ctypes.c_uint32),
        ("columns_offset", ctypes.c_uint64),
        ("target_offset", ctypes.c_uint64),
        ("target_stride", ctypes.c_uint64),
    )


class Touch(ctypes.LittleEndianStructure):
    """``zenflow::Touch``: request to allocate memory of the arena."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("request_id", ctypes.c_int64),
        ("offset", ctypes.c_uint64),
        ("n_rows", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
    )


class Acknowledged(ctypes.LittleEndianStructure):
    """``zenflow::Acknowledged``: one per request, in order among the ``Done`` messages."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("request_id", ctypes.c_int64),
        ("busy_ns", ctypes.c_int64),
    )
