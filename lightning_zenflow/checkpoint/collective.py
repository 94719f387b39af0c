"""How all ranks together save a checkpoint and continue from one: every rank succeeds, or every rank has an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed.comm as dist

from lightning_zenflow.checkpoint.atomic import abandon_save, begin_save, commit_save, staging_path
from lightning_zenflow.checkpoint.reader import CheckpointError, SavedCheckpoint
from lightning_zenflow.core.distributed import raise_together
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer
from lightning_zenflow.zero.slices import shapes_by_name


def save_together(path: Path, write: Callable[[Path], None], *, is_global_zero: bool) -> None:
    """Has all ranks write a checkpoint, and gives it its name when all of them have. Called on all ranks.

    Args:
        path: of the checkpoint, the same on every rank; one that is there already is replaced.
        write: writes this rank's files into an existing folder, by DeepSpeed's `save_checkpoint`.
        is_global_zero: whether this rank makes, renames and deletes folders.

    Raises:
        OSError: it could not be written; names the path. What was under `path` is as it was, and nothing of the new one is left.
    """

    def write_or_meet() -> None:
        try:
            write(staging_path(path))
        except (OSError, RuntimeError):
            # `save_checkpoint` ends with a barrier, in which the other ranks wait by now.
            dist.barrier()
            raise

    try:
        _attempt(path, lambda: begin_save(path) if is_global_zero else None)
        _attempt(path, write_or_meet)
        _attempt(path, lambda: commit_save(path) if is_global_zero else None)
    except BaseException:
        if is_global_zero:
            abandon_save(path)
        raise


def _attempt(path: Path, action: Callable[[], None]) -> None:
    error: OSError | None = None
    try:
        action()
    except (OSError, RuntimeError) as reason:
        # A full disk is a RuntimeError of torch's file writer.
        error = OSError(f"checkpoint {path} could not be saved: {reason}; training can go on, and save elsewhere")
        error.__cause__ = reason
    raise_together(error, OSError)


def open_together(path: Path) -> SavedCheckpoint:
    """A checkpoint whose files are there and readable, as far as that is the same for every rank. Called on all ranks.

    Raises:
        CheckpointError: names what is wrong.
    """
    saved, error = None, None
    try:
        saved = SavedCheckpoint(path)
        saved.model_states  # noqa: B018  # reads it
    except CheckpointError as reason:
        error = reason
    raise_together(error, CheckpointError)
    assert saved is not None
    return saved


def load_together(engine: Any, optimizer: ZenFlowZeroOptimizer, path: Path, *, strict: bool) -> dict[str, Any]:
    """Continues from a checkpoint, whatever number of ranks saved it. Called on all ranks.

    DeepSpeed's engine loads the model; it would refuse the optimizer state of another number of ranks, so that is read here.

    Args:
        engine: DeepSpeed's.
        optimizer: the engine's.
        path: of the checkpoint.
        strict: whether the model must have exactly the saved weights and buffers.

    Returns:
        What Lightning had saved.

    Raises:
        CheckpointError: names what is wrong; nothing has been loaded then.
    """
    saved = open_together(path)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state, error = None, None
    try:
        saved.refuse_other_model(shapes_by_name(optimizer))
        state = saved.state_for(rank, optimizer.partition_size, world_size=world_size, bf16=engine.bfloat16_enabled())
    except CheckpointError as reason:
        error = reason
    raise_together(error, CheckpointError)
    with refusing_other_models(path):
        _, client_state = engine.load_checkpoint(
            str(path), load_module_strict=strict, load_optimizer_states=False, load_lr_scheduler_states=False
        )
    states = [state if r == rank else None for r in range(world_size)]
    optimizer.load_state_dict(states, load_from_fp32_weights=engine.zero_load_from_fp32_weights())
    return dict(client_state)


@contextmanager
def refusing_other_models(path: Path) -> Iterator[None]:
    """Says which checkpoint it is of which torch cannot load the weights.

    Raises:
        CheckpointError: the model has others than those that were saved.
    """
    try:
        yield
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        raise CheckpointError(f"checkpoint {path}: it is of another model: {error}") from error
