"""Methods of the step-time benchmark, by name, and those of each device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch.optim import Optimizer

from benchmarks.peers.deepspeed_zenflow import DeepSpeedZenFlow
from benchmarks.peers.module_order import ModuleOrder
from benchmarks.peers.zero_offload import Floor, NoOffload, ZeroOffload
from lightning_zenflow import ZenFlowStrategy


@dataclass(frozen=True, kw_only=True)
class StepMethod:
    """A training strategy and its optimizer."""

    make_strategy: Callable[..., Strategy]
    """Takes keywords of Lightning's `DeepSpeedStrategy`."""
    title: str
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    """Takes parameters, `lr` and `weight_decay`."""
    clips: bool = True
    """Clips gradients by norm."""
    has_keys: bool = False
    """`make_strategy` takes keys of `ZenFlowStrategy` as well."""
    peer: bool = False
    """Another way to offload: its steps are long, and it may need DeepSpeed's compiled CPU optimizer."""
    not_on: Mapping[str, str] = field(default_factory=dict)
    """Devices to which the method does not apply -> reason."""


def _zenflow(title: str, *, clips: bool = True, **keys: Any) -> StepMethod:
    return StepMethod(
        make_strategy=partial(ZenFlowStrategy, topk_ratio=0.05, **keys),
        title=f"ZenFlowStrategy, {title}",
        clips=clips,
        has_keys=True,
    )


def _torchao(*args: Any, **kwargs: Any) -> Optimizer:
    from benchmarks.peers.torchao import HostAdamW

    return HostAdamW(*args, **kwargs)


_NEEDS_CUDA = "its optimizer copies between a CUDA device and the host"

METHODS = {
    "floor": StepMethod(make_strategy=Floor, title="floor: gradients dropped, no step"),
    "none": StepMethod(make_strategy=NoOffload, title="no offload (DeepSpeed ZeRO-2)"),
    "zero_offload": StepMethod(
        make_strategy=ZeroOffload,
        title="DeepSpeed ZeRO-Offload (DeepSpeedCPUAdam)",
        optimizer=DeepSpeedCPUAdam,
        peer=True,
    ),
    "zero_offload_default_buckets": StepMethod(
        make_strategy=partial(ZeroOffload, default_buckets=True),
        title="the same with Lightning's default buckets",
        optimizer=DeepSpeedCPUAdam,
        peer=True,
    ),
    "deepspeed_zenflow": StepMethod(
        make_strategy=partial(DeepSpeedZenFlow, repair=False), title="DeepSpeed ZenFlow, S=4, overlap", peer=True
    ),
    "torchao": StepMethod(
        make_strategy=lambda: SingleDeviceStrategy(torch.device("cuda", 0)),
        title="torchao CPUOffloadOptimizer, bf16 states, no clipping",
        optimizer=_torchao,
        clips=False,
        peer=True,
        not_on={"cpu": _NEEDS_CUDA, "simulated": _NEEDS_CUDA},
    ),
    "zenflow": _zenflow("S=4, d=1", update_interval=4, publish_lag=1),
    "zenflow_no_provisional": _zenflow(
        "S=4, d=1, no provisional update", update_interval=4, publish_lag=1, provisional_scale=0
    ),
    "zenflow_s2": _zenflow("S=2, d=1", update_interval=2, publish_lag=1),
    "zenflow_s4_d0": _zenflow("S=4, d=0", update_interval=4, publish_lag=0),
    "zenflow_exact": _zenflow("S=1, d=0 (AdamW itself)", update_interval=1, publish_lag=0),
    "zenflow_module_order": StepMethod(
        make_strategy=partial(ModuleOrder, topk_ratio=0.05, update_interval=1, publish_lag=0),
        title="ZenFlowStrategy, S=1, d=0, ZeRO-2's own order",
        has_keys=True,
    ),
    "zenflow_auto": _zenflow("auto"),
    "zenflow_at_once": _zenflow("S=1, d=0 (AdamW itself), no clipping", update_interval=1, publish_lag=0, clips=False),
    "zenflow_at_the_end": _zenflow(
        "S=1, d=0, submitted after backward, no clipping",
        update_interval=1,
        publish_lag=0,
        optimizer_in_backward=False,
        clips=False,
    ),
}

_ALWAYS = ["zero_offload", "deepspeed_zenflow", "zenflow", "zenflow_auto", "zenflow_exact"]
DEVICES = {
    "simulated": ["floor", *_ALWAYS, "zenflow_no_provisional", "zenflow_at_the_end"],
    "cpu": ["none", *_ALWAYS],
    "cuda": ["none", *_ALWAYS, "torchao", "zenflow_no_provisional"],
}
"""Device -> methods by default."""
OF_RANKS = ["floor", "zero_offload", "deepspeed_zenflow", "zenflow_exact", "zenflow_module_order"]
"""Methods by default on several ranks."""
