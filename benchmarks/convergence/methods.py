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

from benchmarks.convergence.optimizers import DelayedOptimizer, MakeOptimizer, adamw, delays_by_stage
from benchmarks.peers.deepspeed_zenflow import DeepSpeedZenFlow
from benchmarks.peers.rounded_moments import RoundedMoments
from benchmarks.peers.zero_offload import ZeroOffload
from lightning_zenflow import ZenFlowStrategy

Family = Literal["AdamW", "ZenFlowStrategy", "ZenFlowStrategy, switched off in part", "others"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A training strategy under comparison."""

    make_strategy: Callable[[], Strategy]
    title: str
    family: Family
    """Its colour in the plots."""
    main: bool = False
    """Whether its training loss is plotted; without delay also whether it is a row of settings whose runs take minutes."""
    about_delay: bool = False
    """Whether it is a row of the settings about delay."""
    plain: str | None = None
    """Method with the same delay and without compensation: the share of the gap from it to AdamW that this method recovers is reported."""
    make_optimizer: MakeOptimizer = adamw
    clips: bool = False
    """Whether the optimizer clips gradients itself."""


def _zenflow(
    title: str,
    *,
    family: Family = "ZenFlowStrategy",
    main: bool = False,
    about_delay: bool = False,
    plain: str | None = None,
    **keys: Any,
) -> Method:
    """`ZenFlowStrategy` with S=4, d=1 and its defaults except for `keys`; the worker has one core, as the trainer."""
    keys = {"topk_ratio": 0.05, "update_interval": 4, "publish_lag": 1, "worker_cores": 1, **keys}
    return Method(
        make_strategy=lambda: ZenFlowStrategy(**keys),
        title=title,
        family=family,
        main=main,
        about_delay=about_delay,
        plain=plain,
    )


_switched_off = partial(_zenflow, family="ZenFlowStrategy, switched off in part")


Rule = Callable[[Sequence[Tensor], float], list[Optimizer]]
"""torch's optimizers for weights and a weight decay; the learning rate is set in every step."""


def _adamw_rule(beta1: float) -> Rule:
    return lambda weights, decay: [torch.optim.AdamW(weights, betas=(beta1, 0.999), weight_decay=decay)]


def _nadamw_rule(beta1: float, *, momentum_decay: float = 4e-3) -> Rule:
    """NAdamW; with 0.99 and torch's momentum decay, that of AsyncPP (arXiv 2505.01099).

    The momentum in step t is beta1 (1 - 0.96^(momentum_decay t) / 2): with torch's default about half of beta1 in these short trainings.
    """
    return lambda weights, decay: [
        torch.optim.NAdam(
            weights,
            betas=(beta1, 0.999),
            weight_decay=decay,
            momentum_decay=momentum_decay,
            decoupled_weight_decay=True,
        )
    ]


_NESTEROV = _nadamw_rule(0.9, momentum_decay=1e4)
"""AdamW with Nesterov's momentum: a decay so large leaves beta1 as it is from the first step."""


def _muon_rule(weights: Sequence[Tensor], decay: float) -> list[Optimizer]:
    """Muon for the matrices of hidden layers, with updates as large as AdamW's; AdamW for the first and last tensors and for vectors."""
    last = max(index for index, weight in enumerate(weights) if weight.ndim == 2)
    hidden = [w for i, w in enumerate(weights) if w.ndim == 2 and 2 <= i < last]
    rest = [w for w in weights if not any(w is h for h in hidden)]
    muon: list[Optimizer] = (
        [torch.optim.Muon(hidden, weight_decay=decay, adjust_lr_fn="match_rms_adamw")] if hidden else []
    )
    return [*muon, torch.optim.AdamW(rest, weight_decay=decay)]


def _delayed(
    title: str,
    *,
    delay: int,
    rule: Rule,
    delays: Literal["constant", "by stage"] = "constant",
    error_feedback: bool = False,
    plain: str | None = None,
    main: bool = False,
) -> Method:
    """A rule of torch whose gradients are `delay` steps late, or 0 to `delay` in a pipeline of `delay` + 1 stages."""

    def make_optimizer(module: Module, lr: float, weight_decay: float) -> Optimizer:
        parameters = list(module.parameters())
        constant = [delay] * len(parameters)
        return DelayedOptimizer(
            parameters,
            lr,
            rule=lambda weights: rule(weights, weight_decay),
            delays=delays_by_stage(module, delay + 1) if delays == "by stage" else constant,
            error_feedback=error_feedback,
        )

    return Method(
        make_strategy=lambda: SingleDeviceStrategy("cpu"),
        title=title,
        family="others",
        main=main,
        about_delay=True,
        plain=plain,
        make_optimizer=make_optimizer,
        clips=True,
    )


def _deepspeed_zenflow(title: str, *, repair: bool, main: bool = False) -> Method:
    return Method(
        make_strategy=lambda: DeepSpeedZenFlow(repair=repair),
        title=title,
        family="others",
        main=main,
        about_delay=repair,
    )


METHODS = {
    "adamw": Method(
        make_strategy=ZeroOffload, title="DeepSpeed ZeRO-2 offload, AdamW", family="AdamW", main=True, about_delay=True
    ),
    "adamw_nearest": Method(
        make_strategy=lambda: RoundedMoments("nearest"),
        title="AdamW, bf16 moments, both rounded to nearest",
        family="AdamW",
    ),
    "adamw_stochastic": Method(
        make_strategy=lambda: RoundedMoments("stochastic"),
        title="AdamW, bf16 moments, the second rounded stochastically",
        family="AdamW",
    ),
    "deepspeed_zenflow": _deepspeed_zenflow("DeepSpeed ZenFlow, S=4, repaired", repair=True, main=True),
    "deepspeed_zenflow_as_is": _deepspeed_zenflow("DeepSpeed ZenFlow, S=4, as released", repair=False),
    "zenflow_adamw": _zenflow(
        "ZenFlowStrategy, S=1, d=0", update_interval=1, publish_lag=0, main=True, about_delay=True
    ),
    "zenflow_adamw_bf16_moments": _zenflow(
        "ZenFlowStrategy, S=1, d=0, bf16 moments", update_interval=1, publish_lag=0, moments_dtype="bfloat16"
    ),
    "zenflow_s1": _zenflow("ZenFlowStrategy, S=1", update_interval=1, main=True, about_delay=True, plain="delayed_1"),
    "zenflow_s2": _zenflow("ZenFlowStrategy, S=2", update_interval=2, main=True),
    "zenflow_s4": _zenflow("ZenFlowStrategy, S=4", main=True, about_delay=True, plain="neither"),
    "zenflow_s8": _zenflow("ZenFlowStrategy, S=8", update_interval=8, main=True),
    "zenflow_s2_d0": _zenflow("ZenFlowStrategy, S=2, d=0", update_interval=2, publish_lag=0, about_delay=True),
    "zenflow_s4_d0": _zenflow("ZenFlowStrategy, S=4, d=0", publish_lag=0, about_delay=True),
    "zenflow_s8_d0": _zenflow("ZenFlowStrategy, S=8, d=0", update_interval=8, publish_lag=0, about_delay=True),
    "zenflow_auto": _zenflow(
        "ZenFlowStrategy, S and d auto", update_interval="auto", publish_lag="auto", main=True, about_delay=True
    ),
    "no_weight_prediction": _switched_off("S=4, no weight prediction", weight_prediction=0),
    "no_provisional": _switched_off("S=4, no provisional update", provisional_scale=0),
    "constants": _switched_off(
        "S=4, weight prediction of 4, provisional update of 0.5", weight_prediction=4, provisional_scale=0.5
    ),
    "neither": _switched_off(
        "S=4, no weight prediction, no provisional update",
        weight_prediction=0,
        provisional_scale=0,
        main=True,
        about_delay=True,
    ),
    "no_reselection": _switched_off("S=4, columns selected once", select_interval=0),
    "no_topk": _switched_off("S=4, no columns on the device", topk_ratio=0.0),
    "delayed_1": _delayed("AdamW, 1 step late", delay=1, rule=_adamw_rule(0.9), main=True),
    "delayed_2": _delayed("AdamW, 2 steps late", delay=2, rule=_adamw_rule(0.9)),
    "delayed_4": _delayed("AdamW, 4 steps late", delay=4, rule=_adamw_rule(0.9)),
    "feedback_1": _delayed(
        "AdamW, 1 step late, error feedback",
        delay=1,
        rule=_adamw_rule(0.9),
        error_feedback=True,
        plain="delayed_1",
        main=True,
    ),
    "feedback_4": _delayed(
        "AdamW, 4 steps late, error feedback", delay=4, rule=_adamw_rule(0.9), error_feedback=True, plain="delayed_4"
    ),
    "beta95_1": _delayed("AdamW with beta1 = 0.95, 1 step late", delay=1, rule=_adamw_rule(0.95), plain="delayed_1"),
    "beta98_1": _delayed("AdamW with beta1 = 0.98, 1 step late", delay=1, rule=_adamw_rule(0.98), plain="delayed_1"),
    "nesterov": _delayed("AdamW with Nesterov momentum", delay=0, rule=_NESTEROV),
    "nesterov_1": _delayed("AdamW with Nesterov momentum, 1 step late", delay=1, rule=_NESTEROV, plain="delayed_1"),
    "nadamw_1": _delayed("NAdamW 0.99, 1 step late", delay=1, rule=_nadamw_rule(0.99), plain="delayed_1", main=True),
    "nadamw_4": _delayed("NAdamW 0.99, 4 steps late", delay=4, rule=_nadamw_rule(0.99), plain="delayed_4"),
    "stages_4": _delayed("AdamW, 4 to 0 steps late by stage", delay=4, rule=_adamw_rule(0.9), delays="by stage"),
    "nadamw_stages_4": _delayed(
        "NAdamW 0.99, 4 to 0 steps late by stage", delay=4, rule=_nadamw_rule(0.99), delays="by stage", plain="stages_4"
    ),
    "muon": _delayed("Muon", delay=0, rule=_muon_rule),
    "muon_1": _delayed("Muon, 1 step late", delay=1, rule=_muon_rule),
}
"""Error feedback (arXiv 2606.30634): its formula was not to be had. The form here is the one that its description implies: the update of a
late gradient stands in for the one that is not known yet as well, and is taken back when that arrives, so the weights are those of the late
optimizer moved on by `delay` more of its last update."""

REMOVED = {"zenflow_s4_accumulate": "S=4, the window's mean gradient (removed)"}
"""Titles of methods that have been measured and removed; their records stay in the tables."""


def names_of(which: Literal["main", "all", "delay"] | tuple[str, ...]) -> list[str]:
    """Methods of a setting by default, in the order of `METHODS`."""
    if isinstance(which, tuple):
        return list(which)
    if which == "delay":
        return [name for name, method in METHODS.items() if method.about_delay]
    rows = {name: method for name, method in METHODS.items() if not method.clips}
    return [name for name, method in rows.items() if method.main or which == "all"]


def family_of(method: str) -> Family:
    """The family of a method or a removed one."""
    return "ZenFlowStrategy, switched off in part" if method in REMOVED else METHODS[method].family


def title_of(method: str) -> str:
    """The title of a method or a removed one."""
    return REMOVED[method] if method in REMOVED else METHODS[method].title
