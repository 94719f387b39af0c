"""Methods of the comparison, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.strategies import Strategy

from benchmarks.peers.deepspeed_zenflow import DeepSpeedZenFlow
from benchmarks.peers.zero_offload import ZeroOffload
from lightning_zenflow import ZenFlowStrategy


@dataclass(frozen=True, kw_only=True)
class Method:
    """A training strategy under comparison."""

    make_strategy: Callable[[], Strategy]
    title: str
    main: bool = False
    """In the plots, and in settings whose runs take minutes."""


def _zenflow(title: str, *, main: bool = False, **keys: Any) -> Method:
    """`ZenFlowStrategy` with S=4, d=1 and its defaults except for `keys`; the worker has one core, as the trainer."""
    keys = {"topk_ratio": 0.05, "update_interval": 4, "publish_lag": 1, "worker_cores": 1, **keys}
    return Method(make_strategy=lambda: ZenFlowStrategy(**keys), title=title, main=main)


def _deepspeed_zenflow(title: str, *, repair: bool, main: bool = False) -> Method:
    return Method(make_strategy=lambda: DeepSpeedZenFlow(repair=repair), title=title, main=main)


METHODS = {
    "adamw": Method(make_strategy=ZeroOffload, title="DeepSpeed ZeRO-2 offload, AdamW", main=True),
    "deepspeed_zenflow": _deepspeed_zenflow("DeepSpeed ZenFlow, S=4, repaired", repair=True, main=True),
    "deepspeed_zenflow_as_is": _deepspeed_zenflow("DeepSpeed ZenFlow, S=4, as released", repair=False),
    "zenflow_adamw": _zenflow("ZenFlowStrategy, S=1, d=0", update_interval=1, publish_lag=0, main=True),
    "zenflow_s1": _zenflow("ZenFlowStrategy, S=1", update_interval=1, main=True),
    "zenflow_s2": _zenflow("ZenFlowStrategy, S=2", update_interval=2, main=True),
    "zenflow_s4": _zenflow("ZenFlowStrategy, S=4", main=True),
    "zenflow_s8": _zenflow("ZenFlowStrategy, S=8", update_interval=8, main=True),
    "zenflow_auto": _zenflow("ZenFlowStrategy, S and d auto", update_interval="auto", publish_lag="auto", main=True),
    "no_weight_prediction": _zenflow("S=4, no weight prediction", weight_prediction=0),
    "no_provisional": _zenflow("S=4, no provisional update", provisional_scale=0),
    "constants": _zenflow(
        "S=4, weight prediction of 4, provisional update of 0.5", weight_prediction=4, provisional_scale=0.5
    ),
    "neither": _zenflow(
        "S=4, no weight prediction, no provisional update", weight_prediction=0, provisional_scale=0, main=True
    ),
    "no_reselection": _zenflow("S=4, columns selected once", select_interval=0),
    "no_topk": _zenflow("S=4, no columns on the device", topk_ratio=0.0),
}

REMOVED = {"zenflow_s4_accumulate": "S=4, the window's mean gradient (removed)"}
"""Titles of methods that have been measured and removed; their records stay in the tables."""


def title_of(method: str) -> str:
    """The title of a method or a removed one."""
    return REMOVED[method] if method in REMOVED else METHODS[method].title
