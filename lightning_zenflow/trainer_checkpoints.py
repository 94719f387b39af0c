"""Checkpoints under the Trainer: what Lightning asks for when it saves, loads and removes one, as one file or as a folder."""

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.checkpoint.background import BackgroundSaves
from lightning_zenflow.checkpoint.collective import all_cores, load_file_together, load_together, read_file_together
from lightning_zenflow.checkpoint.engine import AVERAGED, CURRENT, StatesInFolder, as_lightning_saved, to_save
from lightning_zenflow.checkpoint.files import place_of, remove
from lightning_zenflow.checkpoint.saves import Saves
from lightning_zenflow.checkpoint.single_file import SavedFile, WholeState
from lightning_zenflow.core.distributed import raising_together
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.parameters import is_in_pieces, load_whole
from lightning_zenflow.session import Session


class TrainerCheckpoints(Session):
    """Mixin of the Trainer's strategy."""

    # Lightning's own, declared for the type checker.
    model: Any

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._saves = Saves()
        # What `load_checkpoint` has read, until `load_optimizer_state_dict`.
        self._file: SavedFile | None = None
        # What the hooks of the present save were given under stage 3.
        self._handed: Mapping[str, Any] = {}
        # Whether callbacks look for the file when a save ends.
        self._needs_files = False

    @cached_property
    def _exact_weights(self) -> pl.Callback:
        """Makes weights exact, and deferred saves, before the user's callbacks read them.

        Lightning calls the strategy's hooks after those of all callbacks, so this callback is the first of the trainer's. Callbacks that
        replace the weights at the end of training (`WeightAveraging`) or export them then work on the result of all steps.
        """
        callback: pl.Callback = self.lightning.callbacks.LambdaCallback(
            on_validation_start=self._flush_before,
            on_train_batch_end=self._save_after,
            # After a batch that a user's hook has left out.
            on_train_epoch_end=self._save_after,
            on_train_end=self._complete_before,
        )
        return callback

    def _flush_before(self, *_: Any) -> None:
        self.flush()

    def _complete_before(self, *_: Any) -> None:
        self.flush()
        self.wait_for_checkpoint()

    def _save_after(self, *_: Any) -> None:
        self._saves.end_batch()

    def _check_checkpoint_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Refuses callbacks whose checkpoints cannot be written where they are to be, before training; and finds out whether one of them
        needs a file at once.
        """
        if not self._saves_file():
            whole = [c for c in callbacks if not getattr(c, "save_weights_only", False)]
            assert self.lightning_module is not None
            roots = [] if self._plugin is None else [self.lightning_module.trainer.default_root_dir]
            for folder in (*(getattr(c, "dirpath", "") for c in whole), *roots):
                self._refuse_folder(folder)
        models = [c for c in callbacks if isinstance(c, self.lightning.callbacks.ModelCheckpoint)]
        # Without a name, Lightning's; without formats, since {step:06d} and {step} may be the same.
        names = {c: re.sub(r"(\{[^:}]*):[^}]*", r"\1", c.filename or "{epoch}-{step}") for c in models}
        lasts = [(c.dirpath, c.CHECKPOINT_NAME_LAST) for c in models if c.save_last]
        places = [*((c.dirpath, name) for c, name in names.items()), *lasts]
        self._needs_files = len({*places}) < len(places) or any(
            c.save_last == "link" or ("{step}" not in name and c.save_top_k not in (0, 1)) for c, name in names.items()
        )
        if self._needs_files and self.zenflow_config.async_checkpoints:
            rank_zero_info(
                "ZenFlow: async_checkpoints has no effect: a link of `ModelCheckpoint(save_last='link')` must lead to a complete"
                " checkpoint, and two ModelCheckpoints in one folder, or one that keeps several, see by its files which names are free; use"
                " save_last=True, and a `filename` for each, with {step} where it keeps several"
            )

    @override
    def _background_of(self, path: Any) -> BackgroundSaves | None:
        # SLURM ends the job when Lightning has saved under this name, which is private.
        is_last = Path(str(path)).name.startswith("hpc_ckpt_")
        return None if is_last or self._needs_files else super()._background_of(path)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # Private: Lightning's handlers, of which SLURM's saves and then has the job ended.
        registered = signal.getsignal(getattr(self.cluster_environment, "requeue_signal", None) or signal.SIGUSR1)
        if handlers := getattr(registered, "signal_handlers", None):
            handlers[:] = [partial(self._handle, handler) for handler in handlers]

    def _handle(self, handler: Callable[..., None], *arguments: Any) -> None:
        if self._saves.must_wait:
            self._saves.wanted.append(partial(handler, *arguments))
        else:
            handler(*arguments)

    @override
    def flush(self, *, in_save: bool = False) -> None:
        step = None if self.zenflow_optimizer is None else self.zenflow_optimizer.training.steps
        if step is not None and step.has_gradients and self._saves.in_batch and not self._ends_with_error:
            raise MisconfigurationException(
                "ZenFlowStrategy: flush must be called between two steps, got a call between backward and a step, whose gradients it would"
                " drop: call it in `on_train_batch_end`, or behind `optimizer.step` in manual optimization"
            )
        with self._saves.undisturbed():
            super().flush(in_save=in_save)

    @override
    def teardown(self) -> None:
        with self._saves.undisturbed():
            super().teardown()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's, exact unless the save must wait. The first call of a save: what hooks see after it is what is written."""
        if not self._saves.must_wait:
            try:
                self.flush(in_save=True)
            except (RuntimeError, OSError, MisconfigurationException):
                # `save_checkpoint` will say so.
                if not self._ends_with_error:
                    raise
        elif self.zenflow_optimizer is not None:
            self.zenflow_optimizer.training.in_update.pause()
        state: dict[str, Any] = super().lightning_module_state_dict()
        self._handed = dict(state) if self.zero_stage_3 else {}
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: Lightning asks before `save_checkpoint`, which saves the state."""
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves the exact state after the last step, atomically, as one file or as DeepSpeed's folder (`checkpoint_format`).

        In the middle of a batch, or of what must not be disturbed, the save is made up for right afterwards.

        Raises:
            TypeError: there are `storage_options`, and no plugin that reads them.
            OSError: the checkpoint could not be written; an existing one is unchanged, and training can go on.
            MisconfigurationException: there has been no training.
        """
        self._saves.is_missing = self._saves.must_wait or self._saves.makes_up or self._ends_with_error
        if self._saves.must_wait:
            if self.zenflow_optimizer is not None:
                self.zenflow_optimizer.training.in_update.resume()
            assert self.lightning_module is not None
            save = partial(self.lightning_module.trainer.save_checkpoint, place_of(filepath))
            self._saves.wanted.append(partial(save, "optimizer_states" not in checkpoint, storage_options))
            rank_zero_info(
                f"ZenFlow: {filepath} will be saved at the end of the batch, or of the save or the like that is under way"
            )
            return
        with self._saves.undisturbed(), all_cores(ranks_on_host=self.num_processes):
            self._save_now(checkpoint, filepath, storage_options)

    def _save_now(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        evaluated = self.model
        try:
            if evaluated is self.lightning_module:
                raise MisconfigurationException(
                    f"save_checkpoint({str(filepath)!r}) must come after `fit` has set up the model: DeepSpeed saves weights and states"
                )
            if self._trained is not None and self._trained.module is self.lightning_module:
                # An evaluation after the training has another engine, without optimizer.
                self.model = self._trained
            if self._saves_file(weights_only="optimizer_states" not in checkpoint):
                self._save_as_file(checkpoint, filepath, storage_options)
            elif self.model is not evaluated and is_in_pieces(self.lightning_module):
                raise MisconfigurationException(
                    f"save_checkpoint({str(filepath)!r}) must come before or after the evaluation under stage 3: the pieces are its own"
                )
            else:
                client_state = to_save(checkpoint, self.deepspeed_engine)
                save = partial(super().save_checkpoint, client_state, storage_options=storage_options)
                self._save_folder(filepath, self.deepspeed_engine, save)
            self._saves.is_missing = False
        except Exception as error:
            if not self._ends_with_error:
                raise
            # `ModelCheckpoint(save_on_exception=True)`: Lightning would raise this error in the place of the one that ended training.
            rank_zero_warn(f"no checkpoint at {filepath} of the training that ends with an error: {error}")
        finally:
            self.model = evaluated

    def _save_as_file(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        has_states = bool(checkpoint.get("optimizer_states"))
        # The averaged weights are elsewhere then (`WeightAveraging`).
        weights = checkpoint.get(CURRENT, checkpoint.get("state_dict", {}))
        handed, self._handed = self._handed, {}
        state = WholeState(
            self.deepspeed_engine,
            # Also after an evaluation, for which Lightning makes another engine.
            self.zenflow_optimizer,
            self._optimized,
            weights,
            moments=has_states,
            without_frozen=self.exclude_frozen_parameters,
            handed=handed,
        )
        self._save_file(
            path,
            state,
            lambda: {**checkpoint, **({"optimizer_states": [state.optimizer_state]} if has_states else {})},
            storage_options,
        )

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint, saved by any number of ranks: one file, of this strategy or one for a single device; or a folder, of this
        strategy or of DeepSpeed's ZeRO, of stage 1, 2 or 3.

        Args:
            checkpoint_path: path of the checkpoint.
            weights_only: see `torch.load`; for a file only. None is false: Lightning 2.6 does not hand over what the user gave to `fit` if
                weights are loaded after the set-up, as here.

        Raises:
            CheckpointError: the checkpoint is incomplete, or of another model.
        """
        assert self.lightning_module is not None
        with self._saves.undisturbed():
            self.wait_for_checkpoint()
            module, place = self.lightning_module, place_of(checkpoint_path)
            self._file = read_file_together(checkpoint_path, self._io_of(place), weights_only=bool(weights_only))
            if self._file is not None:
                # Loaded by `load_model_state_dict`, when the module's `on_load_checkpoint` has seen it.
                self._file.unmap_others(("state_dict", CURRENT, "optimizer_states"))
                return self._file.content
            client_state = load_together(self.deepspeed_engine, Path(place), strict=module.strict_loading)
            if AVERAGED in client_state and module.trainer.state.fn != TrainerFn.FITTING:
                # As from Lightning's own checkpoints.
                load_whole(module, client_state[AVERAGED], strict=module.strict_loading)
            return as_lightning_saved(client_state, module)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the model from the content of a file; a folder's has been loaded by `load_checkpoint`."""
        with self._saves.undisturbed():
            if (saved := self._file) is None:
                return
            assert self.lightning_module is not None
            fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
            if not fits:
                self._file = None
            # What the averaged weights were made from, where there are some.
            weights = saved.entry(CURRENT if fits and checkpoint.get(CURRENT) is not None else "state_dict")
            # Before weights are loaded, which updates in flight would overwrite.
            self.flush()
            load_file_together(self.deepspeed_engine, saved, weights, None, self._optimized, strict=strict)

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning calls `load_optimizer_state_dict`."""
        return True

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizer from the content of a file, when the hooks of the callbacks have seen it as well; as under torch a hook may
        have changed the state, or removed it, for new moments.

        Raises:
            MisconfigurationException: a hook has changed that of a folder.
        """
        saved, self._file = self._file, None
        states = checkpoint["optimizer_states"]
        if saved is None:
            if [*states] != [{}]:
                StatesInFolder()["changed"]
        elif states:
            with self._saves.undisturbed():
                load_file_together(self.deepspeed_engine, saved, None, saved.optimizer_state, self._optimized)

    @property
    def _ends_with_error(self) -> bool:
        """Whether training ends with an error at present, and callbacks are called for it."""
        # Private: the public name is an error where there is none.
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED and not self._saves.over

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Called after the callbacks' own.
        try:
            self._saves.end_batch()
        finally:
            self._saves.over = True
        super().on_exception(exception)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint: what another one replaces, only when that is complete, and not if its save has failed."""
        if self._saves.must_wait:
            self._saves.wanted.append(partial(self.remove_checkpoint, place_of(filepath)))
        elif self._background is not None and self._background.is_under_way and not self._saves.is_missing:
            self._background.behind(partial(self._remove, place_of(filepath)))
        elif not self._saves.is_missing:
            with raising_together(OSError):
                self._remove(filepath)

    def _remove(self, filepath: Any) -> None:
        if not self.is_global_zero:
            return
        place = place_of(filepath)
        try:
            if (io := self._io_of(place)) is not None:
                io.remove_checkpoint(filepath)
            else:
                remove(Path(place))
        except IsADirectoryError as error:
            rank_zero_warn(f"nothing was removed: {error}")  # `ModelCheckpoint` goes on without it
