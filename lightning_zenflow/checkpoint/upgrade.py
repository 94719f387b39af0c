"""Converts the run state of older checkpoints to the layout that `lightning_zenflow.step.run_state` reads. Pure functions."""

from collections.abc import Mapping
from typing import Any

_LATER_KEYS = {"moments_dtype": "float32", "tail": "auto"}
"""Keys of the configuration that were added without a new layout, with the value that runs without them had."""

_CONFIG_KEYS_OF_2 = {"early_hand_over": "optimizer_in_backward", "look_ahead": "weight_prediction"}


def upgrade(state: Mapping[str, Any], *, loss_scale: float | None) -> Mapping[str, Any]:
    """Converts a run state to the present layout.

    Layout 1 stays as it is, and so do states that cannot be converted exactly: a run takes only AdamW's state from them.

    Args:
        state: as `RunState.state_dict` of this or an older version returned it.
        loss_scale: of all steps of the run; None: it may have changed.
    """
    if state["version"] == 1:
        return state
    if state["version"] == 2:
        state = _from_2(state)
    if state["version"] == 3:
        state = _from_3(state, loss_scale)
    layout = state["layout"]
    return {**state, "layout": {**layout, "config": {**_LATER_KEYS, **layout["config"]}}}


def _from_2(state: Mapping[str, Any]) -> dict[str, Any]:
    """Layout 2, written up to commit 01ec44d, has other names for the same values; `n_updates` is no longer needed."""
    config = {_CONFIG_KEYS_OF_2.get(key, key): value for key, value in state["layout"]["config"].items()}
    if config["deferred_update"] == "replay":
        # The only rule now. A run with the other one cannot continue bit for bit: its key remains, and `difference` names it.
        del config["deferred_update"]
    planner = _renamed(state["planner"], {"pace": "schedule"})
    if planner["schedule"] is not None:
        planner["schedule"] = _renamed(planner["schedule"], {"deferral": "max_interval_by_gradients"})
    converted = _renamed(state, {"stand_in": "provisional"})
    del converted["n_updates"]
    if converted["provisional"] is not None:
        converted["provisional"] = _renamed(converted["provisional"], {"bodies": "second_moments"})
    return {**converted, "version": 3, "layout": {**state["layout"], "config": config}, "planner": planner}


def _from_3(state: Mapping[str, Any], loss_scale: float | None) -> Mapping[str, Any]:
    """Layout 3 has the clip coefficient divided by the loss scale of its step, which it does not say."""
    provisional = state["provisional"]
    if provisional is not None:
        if loss_scale is None:
            return state
        provisional = _renamed(provisional, {"factor": "clip"})
        provisional["clip"] = provisional["clip"] * loss_scale
    return {**state, "version": 4, "provisional": provisional}


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in state.items()}
