"""DeepSpeed's client state: Lightning's content of a checkpoint, beside the weights and states that DeepSpeed saves."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from deepspeed import DeepSpeedEngine

AVERAGED = "averaged_state_dict"
"""Key of the averaged weights, which Lightning's `WeightAveraging` saves in the place of the model's."""

_SHARED = "shared_params"


def to_save(checkpoint: Mapping[str, Any], engine: DeepSpeedEngine) -> dict[str, Any]:
    """The client state to save.

    `DeepSpeedStrategy` drops "state_dict", because the engine saves the weights. `WeightAveraging` has put the averaged weights there, and
    the model's at "current_model_state".

    Args:
        checkpoint: as Lightning made it.
        engine: DeepSpeed's engine.
    """
    client_state = dict(checkpoint)
    if "current_model_state" in client_state:
        # The model's are the engine's, and need not be saved twice.
        client_state["current_model_state"] = None
        client_state[AVERAGED] = client_state["state_dict"]
    client_state[_SHARED] = _shared_parameters(engine)
    return client_state


def of_fabric(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state to save with `fabric.save`. Fabric has no callbacks, hence no averaged weights.

    Args:
        state: the user's; its model is DeepSpeed's engine.
    """
    engines = [item for item in state.values() if isinstance(item, DeepSpeedEngine)]
    # Of none and of several, Lightning says what is wrong.
    return {**state, _SHARED: _shared_parameters(engines[0])} if len(engines) == 1 else dict(state)


def as_lightning_saved(client_state: Mapping[str, Any], module: pl.LightningModule) -> dict[str, Any]:
    """The loaded client state with the entries that callbacks expect; the engine has loaded the model's weights.

    Args:
        client_state: as loaded.
        module: the model.
    """
    checkpoint = dict(client_state)
    weights = module.state_dict()
    checkpoint["state_dict"] = checkpoint.pop(AVERAGED, weights)
    if "current_model_state" in checkpoint:
        checkpoint["current_model_state"] = weights
    return checkpoint


def load_averaged(client_state: Mapping[str, Any], module: pl.LightningModule) -> dict[str, Any]:
    """As `as_lightning_saved`, for evaluation: the model gets the averaged weights, if there are any, as from Lightning's checkpoints."""
    if AVERAGED in client_state:
        module.load_state_dict(client_state[AVERAGED], strict=module.strict_loading)
    return as_lightning_saved(client_state, module)


def _shared_parameters(engine: DeepSpeedEngine) -> dict[str, str]:
    """Further names of parameters that have several, each with the name under which the parameter is saved, the first.

    Saved as "shared_params", in the place of what DeepSpeed finds: it compares addresses, which all parameters without elements have in
    common, so that `zero_to_fp32` would give them one shape, and it overlooks modules that have several names.
    """
    saved: dict[int, str] = {}
    named = engine.module.named_parameters(remove_duplicate=False)
    return {name: first for name, p in named if (first := saved.setdefault(id(p), name)) != name}
