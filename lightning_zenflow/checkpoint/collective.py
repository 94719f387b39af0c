"""Collective saving and loading of checkpoints: either all ranks succeed, or all ranks raise an error."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import deepspeed.runtime.engine as engine_module
import torch.distributed as dist

from lightning_zenflow.checkpoint.atomic import StagedSave, recover, sync_all, write_error
from lightning_zenflow.checkpoint.reader import CheckpointError, SavedCheckpoint
from lightning_zenflow.core.distributed import raise_together
from lightning_zenflow.worker.process import WorkerError
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer
from lightning_zenflow.zero.slices import shapes_by_name

T = TypeVar("T")


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
        with _without_collectives():
            write(folder)
        if sync:
            # Each rank its own, since network storage keeps what has been written with the host that wrote it.
            sync_all(folder.glob(f"*/*zero_pp_rank_{dist.get_rank()}_mp_rank_*"))

    try:
        _attempt(path, begin, folder)
        folders = [None if staged is None else staged.folder]
        dist.broadcast_object_list(folders, src=0)
        (folder,) = folders  # type: ignore[assignment]  # rank 0 has one
        _attempt(path, write_files, folder)
        _attempt(path, lambda: None if staged is None else staged.commit(), folder)
    except BaseException:
        if staged is not None:
            staged.abandon()
        raise


@contextmanager
def _without_collectives() -> Iterator[None]:
    """Lets DeepSpeed's `save_checkpoint` run without collectives, so that a rank whose part fails anywhere leaves no other waiting.

    They are barriers, where here the directory exists before and all ranks meet after it, and a comparison of the tag, a constant.

    Private: the engine calls ``deepspeed.comm`` by a module-level name, which is replaced inside this context only.
    """
    comm = engine_module.dist
    skipped = dict.fromkeys(("barrier", "all_reduce"), lambda *_, **__: None)
    engine_module.dist = SimpleNamespace(**{**vars(comm), **skipped})
    try:
        yield
    finally:
        engine_module.dist = comm


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


def _open_together(path: Path) -> SavedCheckpoint:
    """Opens a checkpoint whose model file is undamaged. A collective: all ranks must call it.

    Raises:
        CheckpointError: a rank cannot read it.
    """

    def verify() -> None:
        # Once for all ranks, since that reads all of it; before unpickling.
        if dist.get_rank() == 0:
            try:
                recover(path)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {path}: a save was killed, and what it was replacing cannot be put back in place: {error}"
                ) from error
            SavedCheckpoint(path).verify_model()

    _together(path, verify)
    return _together(path, lambda: SavedCheckpoint(path))


def _together(path: Path, action: Callable[[], T]) -> T:
    """Result of an action on this rank; an error of any rank is raised on all. A collective: all ranks must call it.

    Raises:
        CheckpointError: the checkpoint at `path` does not have what it must have, or the model does not have the saved weights.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except (CheckpointError, WorkerError) as reason:
        error = reason
    except (RuntimeError, KeyError, TypeError, AttributeError, IndexError) as reason:
        says = f"its content cannot be loaded ({type(reason).__name__}: {reason})"
        if "loading state_dict" in str(reason):
            says = f"the model must be the saved one: {reason}"
        error = CheckpointError(f"checkpoint {path}: {says}")
        error.__cause__ = reason
    except Exception as reason:
        error = reason
    raise_together(error, CheckpointError)
    return cast(T, result)


def load_weights_together(path: Path, load: Callable[[], T]) -> T:
    """Loads weights from a checkpoint of any number of ranks. A collective: all ranks must call it.

    Args:
        path: path of the checkpoint.
        load: loads it by DeepSpeed's engine.

    Returns:
        The result of `load`.

    Raises:
        CheckpointError: a rank cannot read it, or the model does not have the saved weights.
    """
    saved = _open_together(path)
    _together(path, lambda: saved.model_states)
    return _together(path, load)


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
    saved = _open_together(path)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _together(path, lambda: saved.refuse_other_model(shapes_by_name(optimizer)))
    # `bfloat16_enabled` and, below, `partition_size` (elements of each group's flat partition) are DeepSpeed's, undocumented.
    bf16 = engine.bfloat16_enabled()
    # Each file once, whatever the number of ranks.
    _together(path, lambda: saved.verify_optimizer(range(rank, saved.world_size, world_size), bf16=bf16))
    state = _together(path, lambda: saved.state_for(rank, optimizer.partition_size, world_size=world_size, bf16=bf16))

    def load_weights() -> Any:
        return engine.load_checkpoint(
            str(path), load_module_strict=strict, load_optimizer_states=False, load_lr_scheduler_states=False
        )[1]

    def load_states() -> None:
        # DeepSpeed's `load_state_dict` takes the states of all ranks and reads its own. `zero_load_from_fp32_weights` is the engine's
        # undocumented getter of a key of the config.
        optimizer.load_state_dict(
            [state if r == rank else None for r in range(world_size)],
            load_optimizer_states=optimizer_states,
            load_from_fp32_weights=engine.zero_load_from_fp32_weights(),
        )

    client_state = _together(path, load_weights)
    _together(path, load_states)
    return dict(client_state)
