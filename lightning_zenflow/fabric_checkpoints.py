"""`fabric.save` and `fabric.load`: what a loop names, as one file or as a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.load import _move_state_into
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.checkpoint.collective import (
    all_cores,
    load_file_together,
    load_together,
    one_engine,
    optimizer_of,
    read_file_together,
)
from lightning_zenflow.checkpoint.engine import to_save
from lightning_zenflow.checkpoint.files import place_of, refusal
from lightning_zenflow.checkpoint.single_file import FILE_KEY, SavedFile, WholeState
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.parameters import load_whole
from lightning_zenflow.session import Session


class FabricCheckpoints(Session):
    """Mixin of Fabric's strategy."""

    @override
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Saves the exact state after the last step, atomically: as one file, which Fabric's other strategies read as well, or as a folder,
        which the Trainer's strategy and DeepSpeed read (`checkpoint_format`).

        Raises:
            TypeError: there are `storage_options`, or for a folder a `filter`, which nothing reads.
            OSError: the checkpoint could not be written; an existing one is unchanged, and training can go on.
            MisconfigurationException: there are several models that were set up, or none; or an entry has the name of ours.
        """
        self.flush(in_save=True)
        with all_cores(ranks_on_host=self.num_processes):
            if self._saves_file():
                self._save_as_file(path, state, storage_options, filter or {})
                return
            save = super().save_checkpoint
            engine = one_engine(state.values())
            content = state if self._trained is None else to_save(state, self._trained)
            self._save_folder(path, engine, lambda folder: save(folder, content, storage_options, filter))

    def _save_as_file(
        self, path: Any, state: dict[str, Any], storage_options: Any, filter: dict[str, Callable[[str, Any], bool]]
    ) -> None:
        if FILE_KEY in state:
            raise MisconfigurationException(f"fabric.save: no entry may have the name {FILE_KEY!r}, which is ours")
        engine = one_engine(state.values())
        ours = {name: item for name, item in state.items() if item is engine or isinstance(item, ZenFlowOptimizer)}
        # Private: what Lightning's own strategies convert and filter objects with.
        convert = self._convert_stateful_objects_in_state
        others = convert({name: item for name, item in state.items() if name not in ours}, {})
        whole = WholeState(
            engine,
            optimizer_of(engine),
            self._optimized,
            engine.module.state_dict(),
            moments=any(item is engine.optimizer for item in ours.values()),
            without_frozen=self.exclude_frozen_parameters,
        )

        def content() -> dict[str, Any]:
            of_ours = {name: whole.weights if item is engine else whole.optimizer_state for name, item in ours.items()}
            entries = {name: of_ours[name] if name in of_ours else others[name] for name in state}
            return dict(convert(entries, filter))

        self._save_file(path, whole, content, storage_options)

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads whole weights; under stage 3 each rank takes its pieces."""
        load_whole(module, state_dict, strict=strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """State of `optimizer.state_dict()`, exact; errors are those of `flush`."""
        self.flush()
        state: dict[str, Tensor] = super().get_optimizer_state(optimizer)
        return state

    @override
    def load_checkpoint(
        self,
        path: Any,
        state: Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint of any number of ranks: a file that Fabric saved, under ZenFlow or a strategy for one device, or a folder of
        any stage that Fabric or the Trainer saved under ZenFlow or DeepSpeed's ZeRO.

        Args:
            path: path of the checkpoint; for `fabric.load_raw` a file with a state dict.
            state: what is loaded: the model, with its optimizer or without, and further objects by the names under which they were saved.
                For `fabric.load_raw` the model.
            strict: whether the model must have exactly the saved weights and buffers.
            weights_only: see `torch.load`; for files only.

        Returns:
            Everything else in the checkpoint.

        Raises:
            CheckpointError: the checkpoint is incomplete, or of another model.
        """
        optimizer = self.zenflow_optimizer
        if isinstance(state, (Optimizer, ZenFlowOptimizer)):
            raise MisconfigurationException(
                "fabric.load_raw: obj must be the model, got its optimizer, whose state is in parts; use `fabric.save` and `fabric.load`"
            )
        if isinstance(state, Module):
            # DeepSpeed's engine names its parameters "module.NAME".
            self.flush()
            super().load_checkpoint(path, getattr(state, "module", state), strict, weights_only)
            if optimizer is not None and state is self._trained:
                optimizer.reset_master_from_model()
            return {}
        state = state or {}
        self.wait_for_checkpoint()
        saved = read_file_together(path, self._io_of(place_of(path)), weights_only=weights_only)
        if saved is not None:
            return self._load_from_file(saved, state, strict=strict)
        if weights_only:
            raise refusal(
                path, "weights_only must be false for a folder, in which DeepSpeed has Python objects, got true"
            )
        engine = one_engine(state.values())
        has_optimizer = any(item is optimizer for item in state.values())
        client_state = load_together(engine, Path(place_of(path)), strict=strict, optimizer_states=has_optimizer)
        names = {name for name, item in state.items() if item is not engine and not isinstance(item, ZenFlowOptimizer)}
        if engine is not self._trained:
            # As in the base class: what DeepSpeed has under these names is not the user's.
            names -= {"optimizer", "lr_scheduler"}
        if strict and (missing := names - client_state.keys()):
            raise refusal(path, f"the folder must have an entry {min(missing)!r}, got {', '.join(client_state)}")
        # Private: what Lightning's own strategies load further objects with.
        _move_state_into(client_state, state, keys=names)
        return client_state

    def _load_from_file(self, saved: SavedFile, state: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        engine = one_engine(state.values())
        (model,) = (name for name, item in state.items() if item is engine)
        optimizers = [name for name, item in state.items() if isinstance(item, ZenFlowOptimizer)]
        ours = {model, *optimizers}
        saved.unmap_others(tuple(ours))
        states = saved.entry(optimizers[0]) if optimizers else None
        self.flush()
        load_file_together(engine, saved, saved.entry(model), states, self._optimized, strict=strict)
        wanted = [name for name in state if name not in ours and (strict or name in saved.content)]
        rest = {name: value for name, value in saved.content.items() if name not in ours}
        for name in wanted:
            saved.entry(name)
        _move_state_into(rest, state, keys=set(wanted))
        return rest
