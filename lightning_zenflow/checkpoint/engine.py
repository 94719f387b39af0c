"""DeepSpeed's engine in saves and loads: what is loaded into one, by all ranks or with an error on all of them; the folder that one writes;
and its *client state*, what a folder has beside the engine's and the optimizer's state, as Lightning and callbacks have it.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import deepspeed.runtime.engine as engine_module
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.checkpoint.files import CheckpointError, FileContent, io_of, place_of, read, recover, verify
from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from lightning_zenflow.checkpoint.single_file import COUNTS, SavedFile, restore_counts
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import all_agree, raising_together
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.users_module import (
    further_names,
    is_in_pieces,
    load_pieces,
    load_whole,
    whole_shape,
)
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY, difference_of
from lightning_zenflow.worker.process import WorkerError

AVERAGED = "averaged_state_dict"
"""Key of the averaged weights, which Lightning's `WeightAveraging` saves in the place of the model's."""

CURRENT = "current_model_state"
"""Key of the model's own weights, beside averaged ones."""

_OF_THE_ENGINE = (
    *("module", FROZEN_PARAM_FRAGMENTS, "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"),
    *COUNTS,
)
"""Keys of the model's file that DeepSpeed's engine writes; all others are the client state."""


class ZenFlowEngine(DeepSpeedEngine):  # type: ignore[misc]  # DeepSpeed has no type information
    """DeepSpeed's engine, whose checkpoints have the exact state and continue the run bit for bit. All ranks call its methods together."""

    optimizer: ZenFlowOptimizer
    lr_scheduler: Any

    @override
    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: Mapping[str, Any] | None = None, **options: Any
    ) -> bool:
        """Saves to the folder `tag` in `save_dir`, in which other files may be."""
        self.optimizer.training.flush()
        with closing(DiskCopies(Path(save_dir))) as disk:
            with raising_together(OSError):
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                self.optimizer.reserve(disk)
            with self.optimizer.gathered():
                return bool(super().save_checkpoint(save_dir, tag, to_save(client_state or {}, self), **options))

    @override
    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Loads a folder of any number of ranks (`load_together`); returns `load_dir` and the client state."""
        with_states = {"strict": load_module_strict, "optimizer_states": load_optimizer_states}
        client_state = load_together(self, load_dir, tag=tag, **with_states)
        scheduler = client_state.get("lr_scheduler")
        if load_optimizer_states and load_lr_scheduler_states and None not in (scheduler, self.lr_scheduler):
            self.lr_scheduler.load_state_dict(scheduler)
        return load_dir, client_state

    # Private: by which Accelerate, the Trainer and `save_16bit_model` read whole weights.
    @override
    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        self.optimizer.training.flush()
        return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)


@dataclass(frozen=True, kw_only=True)
class FolderSource:
    """What is saved as DeepSpeed's folder."""

    engine: DeepSpeedEngine
    state: ZenFlowOptimizer | None
    """The optimizer's; None: only weights are saved."""
    client_state: dict[str, Any]
    without_frozen: bool
    """Whether weights are left out that are not trained at present."""

    def files(self, place: Any) -> list[FileContent]:
        """What the engine's `save_checkpoint` has to write on this rank to `place`; small files it writes itself. No collective, so that a
        rank whose part fails leaves no other waiting. Private: the engine's name for ``deepspeed.comm``, and `checkpoint_engine`.
        """
        skipped = dict.fromkeys(("barrier", "all_reduce"), lambda *_, **__: None)
        comm, writer = SimpleNamespace(**{**vars(engine_module.dist), **skipped}), self.engine.checkpoint_engine
        is_torchs = type(writer) is TorchCheckpointEngine and writer.zipfile_serialization
        write, files = torch.save if is_torchs else writer.save, list[FileContent]()
        with (
            patch.object(engine_module, "dist", comm),
            patch.object(writer, "save", lambda state_dict, path: files.append(FileContent(state_dict, path, write))),
        ):
            options = {"client_state": self.client_state, "exclude_frozen_parameters": self.without_frozen}
            self.engine.save_checkpoint(place, tag="checkpoint", **options)
        return files


def to_save(checkpoint: Mapping[str, Any], engine: DeepSpeedEngine) -> dict[str, Any]:
    """The client state to save, of a checkpoint as Lightning or, with Fabric, the user made it.

    `DeepSpeedStrategy` drops "state_dict", because the engine saves the weights; where `CURRENT` is, it has averaged ones. "shared_params",
    the further names of parameters, takes the place of what DeepSpeed finds by addresses, which all parameters without elements have in
    common, so that `zero_to_fp32` would give them one shape; and DeepSpeed overlooks modules that have several names.
    """
    client_state = dict(checkpoint)
    if CURRENT in client_state:
        # The model's are the engine's, and need not be saved twice.
        client_state[CURRENT] = None
        client_state[AVERAGED] = client_state["state_dict"]
    client_state["shared_params"] = further_names(engine.module)
    return client_state


class StatesInFolder(dict[str, Any]):
    """Stands for the optimizer's state, which has been loaded from a folder. Hooks that read or change it are refused."""

    def __missing__(self, key: str) -> NoReturn:
        raise MisconfigurationException(
            "ZenFlowStrategy: on_load_checkpoint must leave checkpoint['optimizer_states'] as it is where the checkpoint is a folder, got"
            ' hooks that read or change it: save one file, checkpoint_format="lightning", or change `optimizer.param_groups` in'
            " `on_train_start`"
        )


def as_lightning_saved(client_state: Mapping[str, Any], module: pl.LightningModule) -> dict[str, Any]:
    """The loaded client state with the entries that callbacks expect; without whole weights where the model is in pieces."""
    checkpoint = {**client_state, "optimizer_states": [StatesInFolder()]}
    if is_in_pieces(module):
        return checkpoint
    weights = module.state_dict()
    checkpoint["state_dict"] = checkpoint.pop(AVERAGED, weights)
    if CURRENT in checkpoint:
        checkpoint[CURRENT] = weights
    return checkpoint


def engine_in(state: Mapping[str, Any]) -> tuple[DeepSpeedEngine, dict[str, Any]]:
    """The engine in what is saved or loaded, which must have one under one name, and the entries that are engine or optimizer."""
    ours = {name: item for name, item in state.items() if isinstance(item, DeepSpeedEngine | ZenFlowOptimizer)}
    engines = [item for item in ours.values() if isinstance(item, DeepSpeedEngine)]
    if len(engines) != 1:
        raise MisconfigurationException(
            f"a checkpoint must have one model that was set up, under one name, got {len(engines)}: save or load each model by itself"
        )
    return engines[0], ours


def optimizer_of(engine: Any) -> ZenFlowOptimizer | None:
    """The optimizer of this package that an engine has, if any."""
    return engine.optimizer if isinstance(engine.optimizer, ZenFlowOptimizer) else None


@contextmanager
def _loading(path: Path | str) -> Iterator[None]:
    """Raises an error of this part of a load on all ranks: a CheckpointError, unless it is the worker's."""
    with raising_together(CheckpointError):
        try:
            yield
        except (CheckpointError, WorkerError):
            raise
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError, IndexError) as reason:
            says = f"its content cannot be loaded ({type(reason).__name__}: {reason})"
            if "loading state_dict" in str(reason):
                says = f"the model must be the saved one: {reason}"
            raise CheckpointError(f"checkpoint {path}: {says}") from reason


def read_file_together(path: Any, io: CheckpointIO, *, weights_only: bool | None) -> SavedFile | None:
    """Reads a checkpoint that is one file, of this package or a strategy for one device; None: it is a folder. A collective: all ranks must
    call it. Where `io`, the strategy's, does not read it (`io_of`), what a killed save was replacing is put back first, and the file, or a
    folder's of the model, is verified.
    """
    place, is_file = place_of(path), [True]
    if (reader := io_of(place, io)) is None:
        with _loading(place):
            if dist.get_rank() == 0:
                recover(Path(place))
                is_file = [Path(place).is_file()]
                if is_file[0]:
                    verify(Path(place))
                else:
                    SavedCheckpoint(Path(place)).verify_model()
        dist.broadcast_object_list(is_file, src=0)
    if not is_file[0]:
        return None
    load = partial(read, Path(place)) if reader is None else partial(reader.load_checkpoint, path)
    with _loading(place):
        return SavedFile(place, load(weights_only=weights_only))


def load_together(
    engine: Any, folder: Any, *, strict: bool, optimizer_states: bool = True, tag: str | None = None
) -> dict[str, Any]:
    """Loads model and optimizer from a folder of this package or of DeepSpeed's ZeRO, of any number of ranks, after `read_file_together`;
    from `tag` in `folder`, or from the one that was saved last. Returns the client state. A collective: all ranks must call it.
    Only weights are loaded without `optimizer_states`, or where the engine has no optimizer of this package. Behind a CheckpointError
    nothing has been loaded, unless the model's weights do not fit.
    """
    optimizer, path = optimizer_of(engine), Path(place_of(folder))
    groups = [] if optimizer is None else optimizer.training.shapes_by_group
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if optimizer is not None:
        # Before weights are loaded, which updates in flight would overwrite.
        optimizer.training.flush()
    with _loading(path):
        # `bfloat16_enabled` is DeepSpeed's, undocumented.
        saved = SavedCheckpoint(path, bf16=None if optimizer is None else engine.bfloat16_enabled(), tag=tag)
        saved.refuse_other_stage(is_stage_3=is_in_pieces(engine.module))
        if optimizer is not None:
            saved.refuse_other_model(groups)
        # Each file once, whatever the number of ranks. Under stage 3 the weights are in them.
        if optimizer is not None or saved.is_stage_3:
            saved.verify_optimizer(range(rank, saved.world_size, world_size))
    with _loading(path):
        state: Any = None if optimizer is None else saved.state_for(rank, optimizer.layouts, world_size=world_size)
        # Copied: callbacks keep what they have saved.
        states, pieces = saved.read_model(0, mapped=False), dict[str, Tensor]()
        if saved.is_stage_3:
            # The optimizer makes the others from its state.
            trained = {name for of_group in groups for name in of_group}
            shapes = {name: whole_shape(p) for name, p in engine.module.named_parameters() if name not in trained}
            pieces = saved.weights_for(rank, shapes, world_size=world_size)
    if optimizer is not None:
        state = _begun_alike(path, state, optimizer)
    with nullcontext() if optimizer is None else optimizer.loading(), _loading(path):
        if saved.is_stage_3:
            load_pieces(engine.module, states["module"], pieces, strict=strict)
        else:
            engine.module.load_state_dict(states["module"], strict=strict)
        restore_counts(engine, states)
        if engine.random_ltd_enabled() and "random_ltd" in states:
            engine.random_ltd_scheduler.load_state_dict(states["random_ltd"])
        if optimizer is not None:
            optimizer.load_partitions(state, optimizer_states=optimizer_states)
    return {key: value for key, value in states.items() if key not in _OF_THE_ENGINE}


def load_file_together(
    engine: Any,
    saved: SavedFile,
    weights: Mapping[str, Any] | None,
    states: Mapping[str, Any] | None,
    *,
    strict: bool = True,
) -> None:
    """Loads from one file `weights`, the module's state dict (None: they have been loaded), and `states`, that of the optimizer (None: only
    weights are loaded, as where the engine has no optimizer of this package). A collective: all ranks must call it.
    """
    optimizer = optimizer_of(engine)
    if optimizer is None:
        with _loading(saved.path):
            load_whole(engine.module, weights or {}, strict=strict)
        return
    state: Mapping[str, Any] | None = None
    if states is not None:
        with _loading(saved.path):
            state = saved.state_for(optimizer, states)
        state = _begun_alike(saved.path, state, optimizer)
    with optimizer.loading(), _loading(saved.path):
        if weights is not None:
            load_whole(engine.module, weights, strict=strict)
        optimizer.training.load({} if weights is None else saved.masters(optimizer, weights), state)
        if state is not None:
            saved.restore_engine(engine)


def _begun_alike(path: Path | str, state: Mapping[str, Any], optimizer: ZenFlowOptimizer) -> Mapping[str, Any]:
    """The state to load: all ranks start over where one of them cannot continue bit for bit. A collective."""
    with _loading(path):
        n_blocks = len(optimizer.training.parts.rank.blocks)
        if continues := state.get("continues", True) and (ours := state[CHECKPOINT_KEY]) is not None:
            continues = not difference_of(ours, optimizer.training.steps.layout, n_blocks)
    return {**state, "continues": all_agree(continues)}
