"""The part of a checkpoint that DeepSpeed's engine saves and loads: weights, buffers, counts, and the *client state*, which Lightning hands
to the engine. The optimizer saves and loads the rest.
"""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from torch import Tensor
from torch.nn import Module

from lightning_zenflow.deepspeed.parameters import is_in_pieces, load_pieces

AVERAGED = "averaged_state_dict"
"""Key of the averaged weights, which Lightning's `WeightAveraging` saves in the place of the model's."""

CURRENT = "current_model_state"
"""Key of the model's own weights, beside averaged ones."""

_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_OF_THE_ENGINE = (
    "module",
    FROZEN_PARAM_FRAGMENTS,
    "dp_world_size",
    "mp_world_size",
    "data_sampler",
    "random_ltd",
    *_COUNTS,
)
"""Keys of the model's file that DeepSpeed's engine writes; all others are the client state."""


def counts_of(engine: DeepSpeedEngine) -> dict[str, int]:
    """Counters of an engine by the names of its attributes, which are their keys in DeepSpeed's checkpoints as well."""
    return {name: getattr(engine, name) for name in _COUNTS}


def restore_counts(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restores the counters of an engine that were saved."""
    for name in saved.keys() & set(_COUNTS):
        setattr(engine, name, saved[name])


def load_engine(
    engine: DeepSpeedEngine, states: Mapping[str, Any], pieces: Mapping[str, Tensor], *, strict: bool
) -> dict[str, Any]:
    """Loads the content of a checkpoint. The engine's own `load_checkpoint` reads folders of as many ranks only, and under stage 3 gathers
    the whole model on every rank.

    Args:
        engine: has the model.
        states: content of the model's file.
        pieces: where the module is in pieces, this rank's, by name; those that the optimizer makes from its state may be absent.
        strict: whether the model must have exactly the saved weights and buffers.

    Returns:
        The client state.

    Raises:
        RuntimeError: the module has other weights or buffers.
    """
    if is_in_pieces(engine.module):
        load_pieces(engine.module, states["module"], pieces, strict=strict)
    else:
        engine.module.load_state_dict(states["module"], strict=strict)
    restore_counts(engine, states)
    if engine.random_ltd_enabled() and "random_ltd" in states:
        engine.random_ltd_scheduler.load_state_dict(states["random_ltd"])
    return {key: value for key, value in states.items() if key not in _OF_THE_ENGINE}


def to_save(checkpoint: Mapping[str, Any], engine: DeepSpeedEngine) -> dict[str, Any]:
    """The client state to save, of a checkpoint as Lightning or, with Fabric, the user made it.

    `DeepSpeedStrategy` drops "state_dict", because the engine saves the weights. `WeightAveraging` has put the averaged weights there, and
    the model's at `CURRENT`.

    "shared_params" has further names of parameters that have several, each with the first, under which the parameter is saved. It takes the
    place of what DeepSpeed finds: that compares addresses, which all parameters without elements have in common, so that `zero_to_fp32`
    would give them one shape, and it overlooks modules that have several names.
    """
    client_state = dict(checkpoint)
    if CURRENT in client_state:
        # The model's are the engine's, and need not be saved twice.
        client_state[CURRENT] = None
        client_state[AVERAGED] = client_state["state_dict"]
    client_state["shared_params"] = further_names(engine.module)
    return client_state


def further_names(module: Module) -> dict[str, str]:
    """Further names of the parameters that have several, each with the first."""
    firsts: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first for name, p in named if (first := firsts.setdefault(id(p), name)) != name}


def as_lightning_saved(client_state: Mapping[str, Any], module: pl.LightningModule) -> dict[str, Any]:
    """The loaded client state with the entries that callbacks expect; the engine has loaded the model's weights.

    A model in pieces has no whole weights to show: "state_dict" is absent, as under plain `DeepSpeedStrategy`.
    """
    checkpoint = dict(client_state)
    if is_in_pieces(module):
        return checkpoint
    weights = module.state_dict()
    checkpoint["state_dict"] = checkpoint.pop(AVERAGED, weights)
    if CURRENT in checkpoint:
        checkpoint[CURRENT] = weights
    return checkpoint
