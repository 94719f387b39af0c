"""Collective loading of checkpoints: either all ranks succeed, or all ranks raise an error."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lightning_zenflow.checkpoint.files import CheckpointError, place_of, read, recover, verify
from lightning_zenflow.checkpoint.reader import SavedCheckpoint, with_another_partition
from lightning_zenflow.checkpoint.single_file import COUNTS, SavedFile, restore_counts
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import all_agree, raising_together
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.users_module import is_in_pieces, load_pieces, load_whole, whole_shape
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY, difference_of
from lightning_zenflow.worker.process import WorkerError

_OF_THE_ENGINE = (
    *("module", FROZEN_PARAM_FRAGMENTS, "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"),
    *COUNTS,
)
"""Keys of the model's file that DeepSpeed's engine writes; all others are the client state."""


@contextmanager
def _loading(path: Path | str) -> Iterator[None]:
    """Raises an error of this part of a load on all ranks.

    Raises:
        CheckpointError: the checkpoint at `path` does not have what it must have, or the model does not have the saved weights.
    """
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


def read_file_together(path: Any, io: CheckpointIO | None, *, weights_only: bool | None) -> SavedFile | None:
    """Reads a checkpoint that is one file; None: it is a folder. A collective: all ranks must call it.

    Args:
        path: path of the checkpoint.
        io: reads files; None: this package, which also puts back what a killed save was replacing, and checks the model's file.
        weights_only: see `torch.load`.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, or a rank cannot read it.
    """
    place, is_file = place_of(path), [True]
    if io is None:
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
    load = partial(read, Path(place)) if io is None else partial(io.load_checkpoint, path)
    with _loading(place):
        return SavedFile(place, load(weights_only=weights_only))


def one_engine(items: Iterable[Any]) -> DeepSpeedEngine:
    """Finds DeepSpeed's engine among the objects that are saved or loaded.

    Raises:
        MisconfigurationException: there is none, or there are several, or one has two names.
    """
    engines = [item for item in items if isinstance(item, DeepSpeedEngine)]
    if len(engines) != 1:
        raise MisconfigurationException(
            f"a checkpoint must have one model that was set up, under one name, got {len(engines)}: save or load each model by itself"
        )
    return engines[0]


def load_together(
    engine: Any, path: Path, *, strict: bool, optimizer_states: bool = True, tag: str | None = None
) -> dict[str, Any]:
    """Loads model and optimizer from a folder of any number of ranks, after `read_file_together`. A collective: all ranks must call it.

    The engine's own `load_checkpoint` reads folders of as many ranks only, and under stage 3 gathers the whole model on every rank.

    Args:
        engine: DeepSpeed's engine; without an optimizer of this package only weights are loaded.
        path: path of the checkpoint.
        strict: whether the model must have exactly the saved weights and buffers.
        optimizer_states: whether the optimizer's state is loaded; if not, only weights are.
        tag: folder in `path`; None: the one that was saved last.

    Returns:
        The client state, as Lightning saved it.

    Raises:
        CheckpointError: a rank cannot continue from the checkpoint, of which nothing has been loaded; or the model is another one.
    """
    optimizer = optimizer_of(engine)
    groups = [] if optimizer is None else optimizer.training.shapes_by_group
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if optimizer is not None:
        # Before weights are loaded, which updates in flight would overwrite.
        optimizer.flush()
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
    order: Sequence[Sequence[str]],
    *,
    strict: bool = True,
) -> None:
    """Loads model and optimizer from one file. A collective: all ranks must call it.

    Args:
        engine: DeepSpeed's engine; without an optimizer of this package only weights are loaded.
        saved: the file.
        weights: the saved module's state dict; None: they have been loaded.
        states: the state dict of the saved optimizer; None: only weights are loaded.
        order: as of `WholeState`.
        strict: whether the model must have exactly the saved weights and buffers.

    Raises:
        CheckpointError: a rank cannot continue from the checkpoint.
    """
    optimizer = optimizer_of(engine)
    if optimizer is None:
        with _loading(saved.path):
            load_whole(engine.module, weights or {}, strict=strict)
        return
    state: Mapping[str, Any] | None
    with _loading(saved.path):
        state = None if states is None else saved.state_for(optimizer, order, states)
    if state is not None:
        state = _begun_alike(saved.path, state, optimizer)
    with optimizer.loading(), _loading(saved.path):
        if weights is not None:
            load_whole(engine.module, weights, strict=strict)
        optimizer.training.load({} if weights is None else saved.masters(optimizer, weights), state)
        if state is not None:
            saved.restore_engine(engine)


def _begun_alike(path: Path | str, state: Mapping[str, Any], optimizer: ZenFlowOptimizer) -> Mapping[str, Any]:
    """The state to load: all ranks start over where one of them cannot continue bit for bit. A collective."""
    ours = state[CHECKPOINT_KEY]
    with _loading(path):
        n_blocks = len(optimizer.training.parts.rank.blocks)
        continues = ours is None or not difference_of(ours, optimizer.training.steps.layout, n_blocks)
    if all_agree(continues) or ours is None:
        return state
    return {**state, CHECKPOINT_KEY: with_another_partition(ours)}


def optimizer_of(engine: Any) -> ZenFlowOptimizer | None:
    """The optimizer of this package that an engine has, if any."""
    return engine.optimizer if isinstance(engine.optimizer, ZenFlowOptimizer) else None
