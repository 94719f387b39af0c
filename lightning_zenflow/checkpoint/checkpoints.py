"""Saves and loads of a strategy: their format, the user's plugin, and saves in the background."""

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from lightning_zenflow.checkpoint.background import BackgroundSaves
from lightning_zenflow.checkpoint.files import place_of, remove
from lightning_zenflow.checkpoint.saving import FileSource, FolderSource, save_together
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.distributed import in_common
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.environment import Rank
from lightning_zenflow.deepspeed.removal import as_in_training, pickled_as_before
from lightning_zenflow.deepspeed.trained_engine import TrainedEngine, is_elsewhere
from lightning_zenflow.worker.process import WorkerError


def plugin_of(io: CheckpointIO) -> CheckpointIO | None:
    """A strategy's `checkpoint_io` if it is the user's."""
    # By name: there is one in each of Lightning's packages.
    return None if type(io).__name__ == "TorchCheckpointIO" else io


def io_of(place: Path | str, io: CheckpointIO) -> CheckpointIO | None:
    """What writes, reads and removes a checkpoint: a user's plugin, or Lightning's own in a store; None: this package, as folders."""
    is_ours = isinstance(place, Path) and (plugin_of(io) is None or place.is_dir())
    return None if is_ours else io


def is_one_file(format_: str, *, world_size: int) -> bool:
    """Whether a checkpoint with states is one file (`ZenFlowConfig.checkpoint_format`)."""
    return format_ == "lightning" or (format_ == "auto" and world_size == 1)


def refuse_folder(path: Any, io: CheckpointIO, format_: str) -> None:
    """Raises MisconfigurationException if a checkpoint that is a folder cannot be written here."""
    if plugin_of(io) is not None or isinstance(place_of(path), str):
        raise MisconfigurationException(
            f"checkpoint_format must be 'lightning', one file, for checkpoints in {path} by {type(io).__name__}, got {format_!r}: folders,"
            " the default on several ranks, need a local path and no plugin"
        )


class Checkpoints:
    """Those of one strategy. All ranks call the methods together.

    Attributes:
        trained: the present or last training, whose state is saved.
        background: finishes saves of the present training; None: without `async_checkpoints`.
    """

    def __init__(self) -> None:
        self.trained: TrainedEngine | None = None
        self.background: BackgroundSaves | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: a training, and its thread, belong to this process."""
        return {"trained": None, "background": None}

    def begin(self, trained: TrainedEngine, rank: Rank) -> None:
        """Begins a training."""
        self.trained = trained
        if trained.zenflow.async_checkpoints:
            self.background = BackgroundSaves(ranks_on_host=rank.ranks_on_host, timeout=rank.timeout)

    def end(self, *, together: bool) -> None:
        """Ends what is in the background; `together` is false behind an error, when the ranks end alone."""
        background, self.background = self.background, None
        if background is not None and not is_elsewhere(self.trained):
            # Otherwise training ends with another error, and the thread has logged this one.
            with nullcontext() if together else suppress(Exception):
                background.close(together=together)

    def wait(self) -> None:
        """Waits for the save in the background.

        Raises:
            OSError: it has failed, on this rank or on another one.
        """
        if self.background is not None:
            self.background.wait()

    def check(self) -> None:
        """Raises what `wait` does if the save in the background has ended."""
        if self.background is not None:
            self.background.check()

    def save(
        self,
        path: Any,
        source: FileSource | FolderSource,
        config: ZenFlowConfig,
        io: CheckpointIO,
        *,
        at_once: bool = False,
    ) -> None:
        """Saves the exact state after the last step, atomically.

        Args:
            path: of the checkpoint.
            source: what is saved.
            config: says how.
            io: Lightning's. A plugin of the user's decides itself when it writes.
            at_once: whether the checkpoint must be there at the end of the call.

        Raises:
            OSError: the save failed; or the one before, in the background, behind which this one is made.
            WorkerError: the exact state is lost, or an exception has interrupted the ranks in different steps.
        """
        before: OSError | None = None
        try:
            self.wait()
        except OSError as error:
            before = error
        trained, place = self.trained, place_of(path)
        if trained is not None:
            trained.optimizer.flush()
            if not in_common([trained.optimizer.zenflow_step.number]):
                raise WorkerError(
                    "an exception has interrupted the ranks in different steps: no state is exact; continue from the last checkpoint"
                )
        released = [] if trained is None else trained.released
        # A file has the parameters as they are after training, DeepSpeed's code needs its own attributes of them.
        with (
            pickled_as_before(p for of_module in released for p in of_module),
            nullcontext() if source.is_file else as_in_training(released),
        ):
            save_together(
                place if io_of(place, io) is None else str(path),
                source,
                sync=config.sync_checkpoints,
                background=None if at_once or plugin_of(io) is not None else self.background,
            )
        if before is not None:
            raise before


def remove_at(path: Any, io: CheckpointIO) -> None:
    """Removes a checkpoint, on one rank.

    Raises:
        OSError: it cannot be removed.
    """
    place = place_of(path)
    if (own := io_of(place, io)) is not None:
        own.remove_checkpoint(path)
    else:
        remove(Path(place))
