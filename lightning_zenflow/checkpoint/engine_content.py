"""What DeepSpeed's engine has in a checkpoint besides the optimizer's state: weights, buffers, counts, and the *client state*, which is
what Lightning saves.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from torch import Tensor
from torch.nn import Module
from typing_extensions import Self

from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from lightning_zenflow.deepspeed.pieces import is_in_pieces, load_pieces, whole_shapes

AVERAGED = "averaged_state_dict"
"""Key of the averaged weights, which Lightning's `WeightAveraging` saves in the place of the model's."""

CURRENT = "current_model_state"
"""Key under which it saves the model's."""

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
"""Keys that are no client state."""


def counts_of(engine: DeepSpeedEngine) -> dict[str, int]:
    """What an engine counts, by the names of its attributes, which DeepSpeed's checkpoints have as well."""
    return {name: getattr(engine, name) for name in _COUNTS}


def restore_counts(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restores what an engine counts, as far as it was saved."""
    for name in saved.keys() & set(_COUNTS):
        setattr(engine, name, saved[name])


@dataclass(frozen=True, kw_only=True)
class EngineContent:
    """Content of a checkpoint for one rank's engine.

    The engine's own `load_checkpoint` reads folders of as many ranks only, and under stage 3 gathers the whole model on every rank.
    """

    states: dict[str, Any]
    """As in the model's file."""
    pieces: dict[str, Tensor]
    """Where the module is in pieces, this rank's, by name."""

    @classmethod
    def read(cls, saved: SavedCheckpoint, engine: DeepSpeedEngine, *, trained: Collection[str] = ()) -> Self:
        """Reads it.

        Args:
            saved: a checkpoint.
            engine: has the model.
            trained: names of parameters whose pieces the optimizer makes from its state.

        Raises:
            CheckpointError: see `SavedCheckpoint.weights_for`.
        """
        pieces: dict[str, Tensor] = {}
        if saved.is_stage_3:
            shapes = {name: shape for name, shape in whole_shapes(engine.module).items() if name not in trained}
            pieces = saved.weights_for(dist.get_rank(), shapes, world_size=dist.get_world_size())
        return cls(states=saved.own_model_states(), pieces=pieces)

    def load(self, engine: DeepSpeedEngine, *, strict: bool) -> dict[str, Any]:
        """Loads it.

        Args:
            engine: the one that it was read for.
            strict: whether the model must have exactly the saved weights and buffers.

        Returns:
            The client state.

        Raises:
            RuntimeError: the module has other weights or buffers.
        """
        module = self.states["module"]
        if is_in_pieces(engine.module):
            load_pieces(engine.module, module, self.pieces, strict=strict)
        else:
            engine.module.load_state_dict(module, strict=strict)
        restore_counts(engine, self.states)
        if engine.random_ltd_enabled() and "random_ltd" in self.states:
            engine.random_ltd_scheduler.load_state_dict(self.states["random_ltd"])
        return {key: value for key, value in self.states.items() if key not in _OF_THE_ENGINE}


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
