"""`fabric.save` and `fabric.load`: what a loop names, as one file or as a folder."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.strategies.deepspeed import _validate_state_keys
from lightning.fabric.utilities.load import _move_state_into

from lightning_zenflow.checkpoint.checkpoints import Source, io_of
from lightning_zenflow.checkpoint.engine import (
    FolderSource,
    load_file_together,
    load_together,
    one_engine,
    optimizer_of,
    read_file_together,
    to_save,
)
from lightning_zenflow.checkpoint.files import place_of, refusal
from lightning_zenflow.checkpoint.single_file import FILE_KEY, FileSource, SavedFile, WholeState
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer


def source_of(
    strategy: DeepSpeedStrategy, path: Any, state: dict[str, Any], storage_options: Any, filter: Any, *, as_file: bool
) -> Source:
    """One file, which Fabric's other strategies read as well, or a folder, which the Trainer's strategy and DeepSpeed read."""
    engine, io = one_engine(state.values()), strategy.checkpoint_io
    optimizer, without_frozen = optimizer_of(engine), strategy.exclude_frozen_parameters
    ours = {name: item for name, item in state.items() if item is engine or isinstance(item, ZenFlowOptimizer)}
    others = {name: item for name, item in state.items() if name not in ours}
    # Private: what Lightning's own strategies convert and filter objects with.
    convert = strategy._convert_stateful_objects_in_state
    if not as_file:
        for option, value in (("storage_options", storage_options), ("filter", filter)):
            if value is not None:
                raise TypeError(f"{option} must be None for a folder, got {value!r}: nothing reads it")
        _validate_state_keys(others)
        client_state = convert(to_save(others, engine), {})
        return FolderSource(engine=engine, state=optimizer, client_state=client_state, without_frozen=without_frozen)
    if FILE_KEY in state:
        raise MisconfigurationException(f"fabric.save: no entry may have the name {FILE_KEY!r}, which is ours")
    converted = convert(others, {})
    whole = WholeState(
        engine,
        optimizer,
        engine.module.state_dict(),
        moments=any(item is engine.optimizer for item in ours.values()),
        without_frozen=without_frozen,
    )

    def content(whole: WholeState) -> dict[str, Any]:
        of_ours = {name: whole.weights if item is engine else whole.optimizer_state for name, item in ours.items()}
        entries = {name: of_ours[name] if name in of_ours else converted[name] for name in state}
        return dict(convert(entries, filter or {}))

    writer = io_of(place_of(path), io)
    return FileSource(state=whole, content=content, path=path, io=writer, storage_options=storage_options)


def load_all(
    path: Any, state: dict[str, Any], io: CheckpointIO, *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Loads a checkpoint of any number of ranks, right after a flush: a file that Fabric saved, under ZenFlow or a strategy for one device,
    or a folder that Fabric or the Trainer saved under ZenFlow or DeepSpeed's ZeRO. Returns what it has besides model and optimizer.

    `state` has the model, with its optimizer or without, and further objects by the names under which they were saved. With `strict` the
    model must have exactly the saved weights and buffers, and the checkpoint all names of `state`.
    """
    saved = read_file_together(path, io_of(place_of(path), io), weights_only=weights_only)
    if saved is not None:
        return _load_from_file(saved, state, strict=strict)
    if weights_only:
        raise refusal(path, "weights_only must be false for a folder, in which DeepSpeed has Python objects, got true")
    engine = one_engine(state.values())
    has_optimizer = any(isinstance(item, ZenFlowOptimizer) for item in state.values())
    client_state = load_together(engine, Path(place_of(path)), strict=strict, optimizer_states=has_optimizer)
    names = {name for name, item in state.items() if item is not engine and not isinstance(item, ZenFlowOptimizer)}
    if optimizer_of(engine) is None:
        # As in the base class: what DeepSpeed has under these names is not the user's.
        names -= {"optimizer", "lr_scheduler"}
    if strict and (missing := names - client_state.keys()):
        raise refusal(path, f"the folder must have an entry {min(missing)!r}, got {', '.join(client_state)}")
    # Private: what Lightning's own strategies load further objects with.
    _move_state_into(client_state, state, keys=names)
    return client_state


def _load_from_file(saved: SavedFile, state: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    engine = one_engine(state.values())
    (model,) = (name for name, item in state.items() if item is engine)
    optimizers = [name for name, item in state.items() if isinstance(item, ZenFlowOptimizer)]
    ours = {model, *optimizers}
    saved.unmap_others(tuple(ours))
    states = saved.entry(optimizers[0]) if optimizers else None
    load_file_together(engine, saved, saved.entry(model), states, strict=strict)
    wanted = {name for name in state if name not in ours and (strict or name in saved.content)}
    rest = {name: value for name, value in saved.content.items() if name not in ours}
    for name in wanted:
        saved.entry(name)
    _move_state_into(rest, state, keys=wanted)
    return rest
