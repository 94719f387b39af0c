"""What both strategies' saves have in common: formats, plugins, the collective save, and saves in the background."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from typing_extensions import override

from lightning_zenflow.checkpoint.background import BackgroundSaves
from lightning_zenflow.checkpoint.collective import Put, deepspeed_files, save_together
from lightning_zenflow.checkpoint.files import place_of
from lightning_zenflow.checkpoint.single_file import FILE_KEY, WholeState
from lightning_zenflow.core.distributed import in_common
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.release import as_in_training, pickled_as_before
from lightning_zenflow.session import Session
from lightning_zenflow.worker.machine import allowed_cores
from lightning_zenflow.worker.process import WorkerError


class Saving(Session):
    """Mixin of both strategies."""

    def __init__(self, *arguments: Any) -> None:
        self._plugin: CheckpointIO | None = None
        # During a training with `async_checkpoints`.
        self._background: BackgroundSaves | None = None
        super().__init__(*arguments)

    @override
    def _set_up(self, *arguments: Any) -> Any:
        self._end_background()
        built = super()._set_up(*arguments)
        if self.zenflow_config.async_checkpoints:
            self._background = BackgroundSaves(ranks_on_host=self.num_processes, timeout=self._timeout)
        return built

    @override
    def flush(self) -> None:
        """Makes weights and optimizer states exact. After a training that ended with an exception, weights stay as they are. All ranks call
        it together.

        Raises:
            OSError: a save in the background has failed.
        """
        super().flush()
        if self._background is not None:
            self._background.check()

    @override
    def teardown(self) -> None:
        with ExitStack() as last:
            last.callback(self._end_background)
            super().teardown()

    def wait_for_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written in the background, if any (`async_checkpoints`). All ranks call it together.

        Raises:
            OSError: it could not be saved, on this rank or on another one.
        """
        if self._background is not None:
            self._background.wait()

    @contextmanager
    def _with_all_cores(self) -> Iterator[None]:
        """Context in which torch uses this rank's share of all allowed cores, in a save, while the worker has nothing to do."""
        threads = torch.get_num_threads()
        torch.set_num_threads(max(threads, len(allowed_cores()) // self.num_processes))
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _end_background(self) -> None:
        background, self._background = self._background, None
        if self.zenflow_optimizer is not None and self.zenflow_optimizer.is_elsewhere:
            return
        try:
            if background is not None:
                background.close()
        except Exception:
            # The thread has logged it, and training ends with another error.
            if self._ends_together:
                raise

    def _background_of(self, path: Any) -> BackgroundSaves | None:
        """What finishes the save of a checkpoint; None: the training thread."""
        # A plugin of the user's decides itself when it writes.
        return self._background if self._plugin is None else None

    def _saves_file(self, *, weights_only: bool = False) -> bool:
        """Whether a checkpoint is one file (`checkpoint_format`)."""
        format_ = self.zenflow_config.checkpoint_format
        return weights_only or format_ == "lightning" or (format_ == "auto" and self.world_size == 1)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, or Lightning's own, which no further Trainer takes for one of the user's."""
        if any(kind.__name__ == "_WrappingCheckpointIO" for kind in type(self._plugin).__mro__):
            # As Lightning's getter: what a plugin without a base wraps. The class is private, and there are two of it.
            self._plugin.checkpoint_io = TorchCheckpointIO()  # type: ignore[union-attr]
        return self._plugin or TorchCheckpointIO()

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO | None) -> None:
        self._plugin = plugin

    def _io_of(self, place: Path | str) -> CheckpointIO | None:
        """What writes, reads and removes a file: a plugin of the user's, or Lightning's own in a store; None: this package, as folders."""
        is_ours = isinstance(place, Path) and (self._plugin is None or place.is_dir())
        return None if is_ours else self.checkpoint_io

    def _save_file(
        self, path: Any, state: WholeState, content: Callable[[], Mapping[str, Any]], storage_options: Any
    ) -> None:
        """Saves one file; as `_save`.

        Args:
            path: path of the file.
            state: what is put together.
            content: what is written of it, on rank 0.
            storage_options: for a plugin of the user's; None for all others.
        """
        io = self._io_of(place_of(path))
        if io is None and storage_options is not None:
            raise TypeError(f"storage_options must be None without a plugin that reads them, got {storage_options!r}")

        def write(file: Path | str, put: Put) -> None:
            if self.is_global_zero:
                whole = {**content(), **({} if state.run_state is None else {FILE_KEY: state.run_state})}
                if io is None:
                    put(whole, torch.save, file)
                else:
                    put(whole, partial(io.save_checkpoint, storage_options=storage_options), path)

        self._save(path, write, state)

    def _refuse_folder(self, path: Any) -> None:
        """Raises MisconfigurationException if a checkpoint that is a folder cannot be written here."""
        if self._plugin is not None or isinstance(place_of(path), str):
            raise MisconfigurationException(
                f"checkpoint_format must be 'lightning', one file, for checkpoints in {path} by {type(self.checkpoint_io).__name__}, got"
                f" {self.zenflow_config.checkpoint_format!r}: folders, the default on several ranks, need a local path and no plugin"
            )

    def _save_folder(self, path: Any, engine: Any, save: Callable[[Any], None]) -> None:
        """Saves DeepSpeed's folder, by a method that has its engine save to a path; as `_save`."""

        def write(folder: Path | str, put: Put) -> None:
            with deepspeed_files(engine, put):
                save(folder)

        self._refuse_folder(path)
        self._save(path, write)

    def _save(self, path: Any, write: Callable[[Any, Put], None], state: WholeState | None = None) -> None:
        """Saves the exact state after the last step, atomically; as `save_together`, by default of the optimizer.

        Raises:
            OSError: the save failed; or the one before, in the background.
            WorkerError: the exact state is lost, or an exception has interrupted the ranks in different steps.
        """
        self.wait_for_checkpoint()
        place = place_of(path)
        place = self.broadcast(str(path) if self._io_of(place) is not None else place)
        if self.zenflow_optimizer is not None:
            self.zenflow_optimizer.flush()
            if not in_common([self.zenflow_optimizer.zenflow_step.number]):
                raise WorkerError(
                    "an exception has interrupted the ranks in different steps: there is no exact state of all of them; continue from"
                    " the last checkpoint"
                )
        # A file has the parameters as they are after training, DeepSpeed's code needs its own attributes of them.
        with (
            pickled_as_before(p for of_module in self._released for p in of_module),
            nullcontext() if state is not None else as_in_training(self._released),
            self._optimizer_in_training(),
        ):
            save_together(
                place,
                write,
                state or self.zenflow_optimizer,
                sync=self.zenflow_config.sync_checkpoints,
                background=self._background_of(path),
            )

    def _optimizer_in_training(self) -> AbstractContextManager[None]:
        return nullcontext() if self._users_optimizer is None else self._users_optimizer.in_training()
