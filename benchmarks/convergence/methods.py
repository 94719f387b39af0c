"""Methods of the comparison, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from benchmarks.convergence.optimizers import DelayedOptimizer, MakeOptimizer, Rule, adamw
from benchmarks.peers.deepspeed_zenflow import DeepSpeedZenFlow
from benchmarks.peers.zero_offload import RoundedMoments, ZeroOffload
from lightning_zenflow import ZenFlowStrategy

Family = Literal["AdamW", "ZenFlowStrategy", "ZenFlowStrategy, switched off in part", "others"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A training strategy under comparison."""

    make_strategy: Callable[[], Strategy | str]
    title: str
    family: Family
    """Its colour in the plots."""
    make_optimizer: MakeOptimizer = adamw
    clips: bool = False
    """Whether the optimizer clips gradients itself."""


def _zenflow(title: str, *, family: Family = "ZenFlowStrategy", **keys: Any) -> Method:
    """`ZenFlowStrategy` with S=4, d=1 and its defaults except for `keys`; the worker has one core, as the trainer."""
    keys = {"topk_ratio": 0.05, "update_interval": 4, "publish_lag": 1, "worker_cores": 1, **keys}
    return Method(make_strategy=lambda: ZenFlowStrategy(**keys), title=title, family=family)


_switched_off = partial(_zenflow, family="ZenFlowStrategy, switched off in part")


def _late(title: str, rule: Rule, *, error_feedback: bool = False) -> Method:
    """A rule of torch whose gradients are one step late."""

    def make_optimizer(module: Module, lr: float, weight_decay: float) -> Optimizer:
        return DelayedOptimizer(
            list(module.parameters()),
            lr,
            rule=lambda weights: rule(weights, weight_decay),
            delay=1,
            error_feedback=error_feedback,
        )

    return Method(
        make_strategy=lambda: SingleDeviceStrategy("cpu"),
        title=title,
        family="others",
        make_optimizer=make_optimizer,
        clips=True,
    )


def _adamw_rule(weights: Sequence[Tensor], decay: float) -> Optimizer:
    return torch.optim.AdamW(weights, weight_decay=decay)


def _nadamw_rule(weights: Sequence[Tensor], decay: float) -> Optimizer:
    """With torch's momentum decay, that of AsyncPP (arXiv 2505.01099).

    The momentum in step t is beta1 (1 - 0.96^(0.004 t) / 2): about half of beta1 in these short trainings.
    """
    return torch.optim.NAdam(weights, betas=(0.99, 0.999), weight_decay=decay, decoupled_weight_decay=True)


def _deepspeed_zenflow(title: str, *, repair: bool) -> Method:
    return Method(make_strategy=lambda: DeepSpeedZenFlow(repair=repair), title=title, family="others")


METHODS = {
    "adamw": Method(make_strategy=ZeroOffload, title="DeepSpeed ZeRO-2 offload, AdamW", family="AdamW"),
    "adamw_int8_nearest": Method(
        make_strategy=RoundedMoments, title="AdamW, int8 moments, both rounded to nearest", family="AdamW"
    ),
    "deepspeed_zenflow": _deepspeed_zenflow("DeepSpeed ZenFlow, S=4, repaired", repair=True),
    "deepspeed_zenflow_as_is": _deepspeed_zenflow("DeepSpeed ZenFlow, S=4, as released", repair=False),
    "zenflow_adamw": _zenflow("ZenFlowStrategy, S=1, d=0", update_interval=1, publish_lag=0),
    "zenflow_adamw_bf16_moments": _zenflow(
        "ZenFlowStrategy, S=1, d=0, bf16 moments", update_interval=1, publish_lag=0, moments_dtype="bfloat16"
    ),
    "zenflow_adamw_int8_moments": _zenflow(
        "ZenFlowStrategy, S=1, d=0, int8 moments", update_interval=1, publish_lag=0, moments_dtype="int8"
    ),
    "zenflow_s1": _zenflow("ZenFlowStrategy, S=1", update_interval=1),
    "zenflow_s2": _zenflow("ZenFlowStrategy, S=2", update_interval=2),
    "zenflow_s4": _zenflow("ZenFlowStrategy, S=4"),
    "zenflow_s8": _zenflow("ZenFlowStrategy, S=8", update_interval=8),
    "zenflow_s4_d0": _zenflow("ZenFlowStrategy, S=4, d=0", publish_lag=0),
    "zenflow_auto": _zenflow("ZenFlowStrategy, S and d auto", update_interval="auto", publish_lag="auto"),
    "no_weight_prediction": _switched_off("S=4, no weight prediction", weight_prediction=0),
    "no_provisional": _switched_off("S=4, no provisional update", provisional_scale=0),
    "constants": _switched_off(
        "S=4, weight prediction of 4, provisional update of 0.5", weight_prediction=4, provisional_scale=0.5
    ),
    "neither": _switched_off(
        "S=4, no weight prediction, no provisional update", weight_prediction=0, provisional_scale=0
    ),
    "no_reselection": _switched_off("S=4, columns selected once", select_interval=0),
    "no_topk": _switched_off("S=4, no columns on the device", topk_ratio=0.0),
    "delayed_1": _late("AdamW, 1 step late", _adamw_rule),
    "feedback_1": _late("AdamW, 1 step late, error feedback", _adamw_rule, error_feedback=True),
    "nadamw_1": _late("NAdamW 0.99, 1 step late", _nadamw_rule),
}
"""Error feedback (arXiv 2606.30634): its formula was not to be had. The form here is the one that its description implies: the update of a
late gradient stands in for the one that is not known yet as well, and is taken back when that arrives, so the weights are those of the late
optimizer moved on by one more of its last update."""

WITHOUT_DELAY = tuple(name for name, method in METHODS.items() if not method.clips)
"""Rows of `fast`: this package, its parts switched off, and DeepSpeed."""

ABOUT_DELAY = (
    *("adamw", "deepspeed_zenflow", "zenflow_adamw", "zenflow_s1", "zenflow_s4", "zenflow_s4_d0", "zenflow_auto"),
    *("neither", "no_topk", "delayed_1", "feedback_1", "nadamw_1"),
)
"""Rows of the settings about delay."""

ABOUT_MOMENTS = (
    "zenflow_adamw",
    "zenflow_adamw_bf16_moments",
    "zenflow_adamw_int8_moments",
    "adamw_int8_nearest",
)
"""Rows about the element type of the moments."""

OVERVIEWS = {"delay": ABOUT_DELAY, "moments": ABOUT_MOMENTS}
"""Tables of several settings: their rows, which are compared with the first one."""
