"""How it is trained: every method of the comparison, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.strategies import Strategy

from benchmarks.deepspeed_peers import DeepSpeedZenFlow, ZeroOffload
from lightning_zenflow import ZenFlowStrategy


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train."""

    make_strategy: Callable[[], Strategy]
    title: str
    main: bool = False
    """Whether it is in the plots, and in settings whose runs take minutes."""


def _zenflow(title: str, *, main: bool = False, update_interval: int | str = 4, **keys: Any) -> Method:
    """`ZenFlowStrategy` with its defaults but for the given keys; the worker has one core, as the trainer."""
    keys = {"topk_ratio": 0.05, "publish_lag": 1, **keys}
    return Method(
        make_strategy=lambda: ZenFlowStrategy(worker_cores=1, update_interval=update_interval, **keys),
        title=title,
        main=main,
    )


def _deepspeed_zenflow(title: str, *, repair: bool, main: bool = False) -> Method:
    """DeepSpeed's own ZenFlow; `repair`: see `DeepSpeedZenFlow`."""
    return Method(
        make_strategy=lambda: DeepSpeedZenFlow(repair=repair),
        title=title,
        main=main,
    )


METHODS = {
    "adamw": Method(make_strategy=ZeroOffload, title="DeepSpeed ZeRO-2 offload, AdamW", main=True),
    "deepspeed_zenflow": _deepspeed_zenflow("DeepSpeed ZenFlow, S=4, repaired", repair=True, main=True),
    "deepspeed_zenflow_as_is": _deepspeed_zenflow("DeepSpeed ZenFlow, S=4, as released", repair=False),
    "zenflow_s1": _zenflow("ZenFlowStrategy, S=1", update_interval=1, main=True),
    "zenflow_s2": _zenflow("ZenFlowStrategy, S=2", update_interval=2, main=True),
    "zenflow_s4": _zenflow("ZenFlowStrategy, S=4", main=True),
    "zenflow_s8": _zenflow("ZenFlowStrategy, S=8", update_interval=8, main=True),
    "zenflow_auto": _zenflow("ZenFlowStrategy, S and d auto", update_interval="auto", publish_lag="auto", main=True),
    "zenflow_s4_accumulate": _zenflow("S=4, the window's mean gradient", deferred_update="accumulate"),
    "no_look_ahead": _zenflow("S=4, no look-ahead", weight_prediction=0),
    "no_provisional": _zenflow("S=4, no stand-in update", provisional_scale=0),
    "constants": _zenflow("S=4, look-ahead of 4, stand-in update of 0.5", weight_prediction=4, provisional_scale=0.5),
    "neither": _zenflow("S=4, no look-ahead, no stand-in update", weight_prediction=0, provisional_scale=0, main=True),
    "no_reselection": _zenflow("S=4, columns selected once", select_interval=0),
    "no_topk": _zenflow("S=4, no columns on the device", topk_ratio=0.0),
}
