"""Collective saving and loading of checkpoints: either all ranks succeed, or all ranks raise an error."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.runtime.engine as engine_module
import torch.distributed as dist

from lightning_zenflow.checkpoint.atomic import StagedSave, recover, sync_all, write_error
from lightning_zenflow.checkpoint.reader import CheckpointError, SavedCheckpoint
from lightning_zenflow.core.distributed import raise_together
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer
from lightning_zenflow.zero.slices import shapes_by_name


def save_together(path: Path, write: Callable[[Path], None], *, is_global_zero: bool, sync: bool) -> None:
    """Saves a checkpoint atomically, after all ranks have written their files. A collective: all ranks must call it.

    Args:
        path: path of the checkpoint, the same on every rank; an existing checkpoint is replaced.
        write: writes this rank's files into an existing directory, by DeepSpeed's `save_checkpoint`.
        is_global_zero: whether this rank creates, renames and deletes directories.
        sync: whether the checkpoint must survive a failure of power.

    Raises:
        OSError: a rank could not write its files; `path` is unchanged, and nothing of the new checkpoint remains.
    """

    staged: StagedSave | None = None
    folder = path

    def begin() -> None:
        nonlocal staged
        if is_global_zero:
            staged = StagedSave(path, sync=sync)

    def write_files() -> None:
        with _without_barriers():
            write(folder)
        if sync:
            # Each rank its own, since network storage keeps what has been written with the host that wrote it.
            sync_all(folder.glob(f"*/*zero_pp_rank_{dist.get_rank()}_mp_rank_*"))

    def commit() -> None:
        if staged is not None:
            staged.commit()

    try:
        _attempt(path, begin, folder)
        folder = _from_rank_zero(None if staged is None else staged.folder)
        _attempt(path, write_files, folder)
        _attempt(path, commit, folder)
    except BaseException:
        if staged is not None:
            staged.abandon()
        raise


@contextmanager
def _without_barriers() -> Iterator[None]:
    """Lets DeepSpeed's `save_checkpoint` run without barriers, so that a rank whose part fails leaves no other waiting.

    Its barriers are between the ranks' parts: the directory exists before, and all ranks meet after it.

    Private: the engine calls ``barrier`` of ``deepspeed.comm`` by a module-level name, which is replaced inside this context only.
    """
    comm = engine_module.dist
    engine_module.dist = SimpleNamespace(**{**vars(comm), "barrier": lambda *_, **__: None})
    try:
        yield
    finally:
        engine_module.dist = comm


def _from_rank_zero(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _attempt(path: Path, action: Callable[[], None], folder: Path) -> None:
    error: OSError | None = None
    try:
        action()
    except Exception as reason:  # of any kind: the client state has the user's objects, which may refuse to be pickled
        error = _failure(path, reason, folder)
    raise_together(error, OSError)


def _failure(path: Path, reason: Exception, folder: Path) -> OSError:
    """An error with the cause and what to do about it; `folder` is where the files are written."""
    # torch's file writer raises RuntimeError, without a reason.
    cause = reason if isinstance(reason, OSError) else write_error(folder)
    says = f"{cause or reason}" + ("; save to another path" if cause or isinstance(reason, RuntimeError) else "")
    if cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        says = (
            f"the disk of {path.parent} is full ({cause.strerror}); delete files there, or save to another path. While a checkpoint is"
            " saved, those before it stay: keep fewer with `ModelCheckpoint(save_top_k=...)`"
        )
    error = OSError(f"checkpoint {path} could not be saved: {says}; training can continue")
    if cause is None:
        # Not otherwise: its traceback refers to torch's writer, whose open file would take room on the disk when it has been deleted.
        error.__cause__ = reason
    return error


def open_together(path: Path) -> SavedCheckpoint:
    """Opens a checkpoint and reads its model file. A collective: all ranks must call it.

    Raises:
        CheckpointError: a rank cannot read it.
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


def load_together(
    engine: Any, optimizer: ZenFlowZeroOptimizer, path: Path, *, strict: bool, optimizer_states: bool = True
) -> dict[str, Any]:
    """Loads model and optimizer from a checkpoint of any number of ranks. A collective: all ranks must call it.

    The engine loads the model. It refuses optimizer state of another number of ranks, so `SavedCheckpoint` reads that.

    Args:
        engine: DeepSpeed's engine.
        optimizer: optimizer of the engine.
        path: path of the checkpoint.
        strict: whether the model must have exactly the saved weights and buffers.
        optimizer_states: whether the optimizer's state is loaded; if not, only weights are.

    Returns:
        The client state, as Lightning saved it.

    Raises:
        CheckpointError: a rank cannot continue from the checkpoint; nothing has been loaded.
    """
    saved = open_together(path)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state, error = None, None
    try:
        saved.refuse_other_model(shapes_by_name(optimizer))
        # `partition_size` (elements of each group's flat partition) and `bfloat16_enabled` are DeepSpeed's, undocumented.
        state = saved.state_for(rank, optimizer.partition_size, world_size=world_size, bf16=engine.bfloat16_enabled())
    except CheckpointError as reason:
        error = reason
    raise_together(error, CheckpointError)
    with refusing_other_models(path):
        _, client_state = engine.load_checkpoint(
            str(path), load_module_strict=strict, load_optimizer_states=False, load_lr_scheduler_states=False
        )
    # DeepSpeed's `load_state_dict` takes the states of all ranks and reads its own. `zero_load_from_fp32_weights` is the engine's
    # undocumented getter of a key of the config.
    states = [state if r == rank else None for r in range(world_size)]
    optimizer.load_state_dict(
        states,
        load_optimizer_states=optimizer_states,
        load_from_fp32_weights=engine.zero_load_from_fp32_weights(),
    )
    return dict(client_state)


@contextmanager
def refusing_other_models(path: Path) -> Iterator[None]:
    """Converts torch's error about the keys or shapes of a state dict.

    Raises:
        CheckpointError: the model does not have the saved weights.
    """
    try:
        yield
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        raise CheckpointError(f"checkpoint {path}: the model must be the saved one: {error}") from error
