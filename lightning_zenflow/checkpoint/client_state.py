"""DeepSpeed's client state: Lightning's content of a checkpoint, beside the weights and states that DeepSpeed saves."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from deepspeed import DeepSpeedEngine
from torch.nn import Module

from lightning_zenflow.engine.pieces import is_in_pieces

AVERAGED = "averaged_state_dict"
"""Key of the averaged weights, which Lightning's `WeightAveraging` saves in the place of the model's."""

CURRENT = "current_model_state"
"""Key under which it saves the model's."""


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
