"""Checkpoints under the Trainer: what Lightning asks for when it saves, loads and removes one, as one file or as a folder."""

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zenflow.checkpoint.checkpoints import Checkpoints, Source, all_cores
from lightning_zenflow.checkpoint.engine import (
    AVERAGED,
    CURRENT,
    FolderSource,
    StatesInFolder,
    as_lightning_saved,
    load_file_together,
    load_together,
    read_file_together,
    to_save,
)
from lightning_zenflow.checkpoint.files import io_of, place_of, plugin_of, remove
from lightning_zenflow.checkpoint.single_file import FileSource, SavedFile
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import raising_together
from lightning_zenflow.deepspeed.users_module import is_in_pieces, load_whole


class Saves:
    """Saves of one run of a Trainer. Where none is possible, as by the handler of a signal, which may come at any instruction, they wait
    for the end of the batch, or of a call that must not be disturbed.

    Attributes:
        in_batch: whether a batch is under way, from before its forward pass until the records of its step are complete.
        is_missing: whether the last save waits, or has failed where its caller goes on: what it replaces must stay.
        makes_up: whether those that had to wait are being done.
        over: whether callbacks have been called for the end of the training.
    """

    def __init__(self) -> None:
        self.in_batch = self.is_missing = self.over = False
        self._depth, self.makes_up = 0, False
        self._waiting: list[Callable[[], None]] = []

    @property
    def must_wait(self) -> bool:
        """True inside a batch or a call that must not be disturbed."""
        return self.in_batch or self._depth > 0

    def when_possible(self, save: Callable[..., None], *arguments: Any) -> None:
        """Calls what saves, or depends on a save, now or behind what waits already."""
        if self.must_wait:
            self._waiting.append(partial(save, *arguments))
        else:
            save(*arguments)

    def end_batch(self) -> None:
        """Ends the batch that is under way, and after an exception whatever else was."""
        self.in_batch, self._depth, self.makes_up = False, 0, False
        self._make_up()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context in which saves wait until its end; after an exception longer, until `end_batch`."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self._make_up()

    def _make_up(self) -> None:
        if not self.makes_up:
            try:
                self.makes_up = True
                while self._waiting and not self.must_wait:
                    self._waiting.pop(0)()
            finally:
                self.makes_up = False


class TrainerCheckpoints:
    """Those of one Trainer, whose strategy has `checkpoints`; `saves` is of the Trainer's present run."""

    def __init__(self, strategy: DeepSpeedStrategy, checkpoints: Checkpoints) -> None:
        self._strategy, self._checkpoints = strategy, checkpoints
        self.saves = Saves()
        # What `load` has read, until `load_optimizer`.
        self._file: SavedFile | None = None
        # What the hooks of the present save were given under stage 3.
        self._handed: Mapping[str, Any] = {}
        # Whether callbacks look for the file when a save ends.
        self._needs_files = False
        self._callback: pl.Callback | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, without what saves and loads have left."""
        return {**vars(self), "saves": Saves(), "_file": None, "_handed": {}}

    def be_first(self, trainer: pl.Trainer, lightning: ModuleType) -> None:
        """Makes weights exact, and saves that wait, by the Trainer's first callback: the strategy's hooks come after all of them."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # one of Trainer's connectors sets it
        if self._callback not in callbacks:
            self._callback = lightning.callbacks.LambdaCallback(
                on_train_start=self._handle_later,
                on_validation_start=partial(self.flush, lays_down=False),
                on_train_batch_end=self._save_after,
                # After a batch that a user's hook has left out.
                on_train_epoch_end=self._save_after,
                on_train_end=self._complete_before,
            )
            callbacks.insert(0, self._callback)

    def _save_after(self, *_: Any) -> None:
        self.saves.end_batch()

    def _complete_before(self, *_: Any) -> None:
        self.flush()
        self._checkpoints.wait()

    @property
    def module(self) -> pl.LightningModule:
        """The user's module."""
        module = self._strategy.lightning_module
        assert module is not None
        return module

    @property
    def ends_with_error(self) -> bool:
        """Whether training ends with an error at present, and callbacks are called for it."""
        # Private: the public name is an error where there is none.
        trainer = getattr(self._strategy.lightning_module, "_trainer", None)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED and not self.saves.over

    def check_callbacks(self, callbacks: Sequence[Any], lightning: ModuleType, *, as_file: bool) -> None:
        """Refuses callbacks whose folders cannot be written where they are to be, and finds out whether one needs its files at once."""
        io = self._strategy.checkpoint_io
        if not as_file:
            whole = [c for c in callbacks if not getattr(c, "save_weights_only", False)]
            roots = [] if plugin_of(io) is None else [self.module.trainer.default_root_dir]
            for folder in (*(getattr(c, "dirpath", "") for c in whole), *roots):
                self._checkpoints.refuse_folder(folder, io)
        models = [c for c in callbacks if isinstance(c, lightning.callbacks.ModelCheckpoint)]
        # Without a name, Lightning's; without formats, since {step:06d} and {step} may be the same.
        names = {c: re.sub(r"(\{[^:}]*):[^}]*", r"\1", c.filename or "{epoch}-{step}") for c in models}
        lasts = [(c.dirpath, c.CHECKPOINT_NAME_LAST) for c in models if c.save_last]
        places = [*((c.dirpath, name) for c, name in names.items()), *lasts]
        self._needs_files = len({*places}) < len(places) or any(
            c.save_last == "link" or ("{step}" not in name and c.save_top_k not in (0, 1)) for c, name in names.items()
        )
        if self._needs_files and self._checkpoints.config.async_checkpoints:
            rank_zero_info(
                "ZenFlow: async_checkpoints has no effect: a link of `ModelCheckpoint(save_last='link')` must lead to a complete"
                " checkpoint, and two ModelCheckpoints in one folder, or one that keeps several, see by its files which names are free; use"
                " save_last=True, and a `filename` for each, with {step} where it keeps several"
            )

    def _handle_later(self, *_: Any) -> None:
        """Has Lightning's handlers of signals wait: SLURM's saves, and then has the job ended."""
        # Private: where Lightning keeps them.
        number = getattr(self._strategy.cluster_environment, "requeue_signal", None) or signal.SIGUSR1
        if handlers := getattr(signal.getsignal(number), "signal_handlers", None):
            handlers[:] = [partial(self.saves.when_possible, handler) for handler in handlers]

    def state_dict(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The module's state dict by `read`, for the hooks of a save, as `save` writes it: the first call of a save."""
        if (trained := self._checkpoints.trained) is not None:
            if self.saves.must_wait:
                trained.training.in_update.is_paused = True
            else:
                try:
                    self._make_exact()
                except (RuntimeError, OSError, MisconfigurationException):
                    # `save` will say so.
                    if not self.ends_with_error:
                        raise
        state = read()
        self._handed = dict(state) if self._strategy.zero_stage_3 else {}
        return state

    def flush(self, *_: Any, lays_down: bool = True) -> None:
        """`ZenFlowStrategy.flush`, also as a hook; without `lays_down` for who only reads weights."""
        self._make_exact(lays_down=lays_down)
        self._checkpoints.check()

    def _make_exact(self, *, lays_down: bool = True) -> None:
        if (trained := self._checkpoints.trained) is None:
            return
        if trained.training.steps.has_gradients and self.saves.in_batch and not self.ends_with_error:
            raise MisconfigurationException(
                "ZenFlowStrategy: flush must be called between two steps, got a call between backward and a step, whose gradients it would"
                " drop: call it in `on_train_batch_end`, or behind `optimizer.step` in manual optimization"
            )
        with self.saves.undisturbed():
            trained.flush(lays_down=lays_down)

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any, *, as_file: bool) -> None:
        """Saves the exact state after the last step (`Checkpoints.save`), as one file or DeepSpeed's folder; where it must wait, later."""
        self.saves.is_missing = True
        if self.saves.must_wait:
            if (trained := self._checkpoints.trained) is not None:
                trained.training.in_update.is_paused = False
            again, weights_only = self.module.trainer.save_checkpoint, "optimizer_states" not in checkpoint
            self.saves.when_possible(again, place_of(path), weights_only, storage_options)
            rank_zero_info(
                f"ZenFlow: {path} will be saved at the end of the batch, or of the save or the like that is under way"
            )
            return
        # SLURM ends the job when Lightning has saved under this name, which is private.
        at_once = self._needs_files or Path(str(path)).name.startswith("hpc_ckpt_")
        with self.saves.undisturbed(), all_cores(ranks_on_host=self._strategy.num_processes):
            try:
                source, io = self._source(checkpoint, path, as_file=as_file), self._strategy.checkpoint_io
                self._checkpoints.save(path, source, io, storage_options, at_once=at_once)
                self.saves.is_missing = False
            except Exception as error:
                if not self.ends_with_error:
                    # The caller of a save that has not waited sees the error.
                    self.saves.is_missing = self.saves.makes_up
                    raise
                # `ModelCheckpoint(save_on_exception=True)`: Lightning would raise this error in the place of the one that ended training.
                rank_zero_warn(f"no checkpoint at {path} of the training that ends with an error: {error}")

    def _source(self, checkpoint: dict[str, Any], path: Any, *, as_file: bool) -> Source:
        """What is saved: of the present engine or, where that evaluates, of the training before."""
        engine, trained = self._strategy.model, self._checkpoints.trained
        if engine is self._strategy.lightning_module:
            raise MisconfigurationException(
                f"save_checkpoint({str(path)!r}) must come after `fit` has set up the model: DeepSpeed saves weights and states"
            )
        if evaluates := trained is not None and engine is not trained.engine and trained.engine.module is self.module:
            engine = trained.engine
        optimizer = None if trained is None else trained.optimizer
        without_frozen = self._strategy.exclude_frozen_parameters
        if not as_file:
            if evaluates and is_in_pieces(self.module):
                raise MisconfigurationException(
                    f"save_checkpoint({str(path)!r}) must come before or after the evaluation under stage 3: the pieces are its own"
                )
            client_state = to_save(checkpoint, engine)
            # As Lightning's strategy: the engine saves both.
            for key in ("state_dict", "optimizer_states"):
                client_state.pop(key, None)
            return FolderSource(
                engine=engine, state=optimizer, client_state=client_state, without_frozen=without_frozen
            )
        has_states = bool(checkpoint.get("optimizer_states"))
        handed, self._handed = self._handed, {}
        return FileSource(
            engine,
            optimizer,
            # The averaged weights are elsewhere then (`WeightAveraging`).
            checkpoint.get(CURRENT, checkpoint.get("state_dict", {})),
            lambda file: {**checkpoint, **({"optimizer_states": [file.optimizer_state]} if has_states else {})},
            moments=has_states,
            without_frozen=without_frozen,
            handed=handed,
        )

    def load(self, path: Any, *, weights_only: bool) -> dict[str, Any]:
        """Loads a folder, or reads a file, whose weights and states are loaded when hooks have seen them; returns what the hooks get."""
        with self.saves.undisturbed():
            self._checkpoints.wait()
            module = self.module
            self._file = read_file_together(path, self._strategy.checkpoint_io, weights_only=weights_only)
            if self._file is not None:
                self._file.unmap_others(("state_dict", CURRENT, "optimizer_states"))
                return self._file.content
            client_state = load_together(self._strategy.deepspeed_engine, path, strict=module.strict_loading)
            if AVERAGED in client_state and module.trainer.state.fn != TrainerFn.FITTING:
                # As from Lightning's own checkpoints.
                load_whole(module, client_state[AVERAGED], strict=module.strict_loading)
            return as_lightning_saved(client_state, module)

    def load_model(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Loads the model from a file, behind the module's `on_load_checkpoint`; `load` has loaded that of a folder."""
        with self.saves.undisturbed():
            if (saved := self._file) is None:
                return
            fits = self.module.trainer.state.fn == TrainerFn.FITTING
            if not fits:
                self._file = None
            # What the averaged weights were made from, where there are some.
            weights = saved.entry(CURRENT if fits and checkpoint.get(CURRENT) is not None else "state_dict")
            # Before weights are loaded, which updates in flight would overwrite.
            self.flush()
            load_file_together(self._strategy.deepspeed_engine, saved, weights, None, strict=strict)

    def load_optimizer(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizer from a file, behind all hooks, which may have changed the state, or removed it for new moments."""
        saved, self._file = self._file, None
        states = checkpoint["optimizer_states"]
        if saved is None:
            if [*states] != [{}]:
                StatesInFolder()["changed"]
        elif states:
            with self.saves.undisturbed():
                load_file_together(self._strategy.deepspeed_engine, saved, None, saved.optimizer_state)

    def remove(self, path: Any) -> None:
        """Removes a checkpoint, which another one replaces: behind the other's save, and not if that has failed."""
        if self.saves.must_wait:
            self.saves.when_possible(self.remove, place_of(path))
        elif not self.saves.is_missing and not self._checkpoints.behind(partial(self._remove, place_of(path))):
            with raising_together(OSError):
                self._remove(path)

    def _remove(self, path: Any) -> None:
        if self._strategy.is_global_zero:
            place = place_of(path)
            io = io_of(place, self._strategy.checkpoint_io)
            try:
                if io is None:
                    remove(Path(place))
                else:
                    io.remove_checkpoint(path)
            except IsADirectoryError as error:
                rank_zero_warn(f"nothing was removed: {error}")  # `ModelCheckpoint` goes on without it
