"""Methods of the step-time benchmark, by name, and those of each device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch.optim import Optimizer

from benchmarks.peers.deepspeed_zenflow import DeepSpeedZenFlow
from benchmarks.peers.fsdp2 import Fsdp2, Fsdp2Offload
from benchmarks.peers.module_order import ModuleOrder
from benchmarks.peers.zero_offload import Floor, NoOffload, ZeroOffload
from lightning_zenflow import OffloadAdamW, ZenFlowStrategy


@dataclass(frozen=True, kw_only=True)
class StepMethod:
    """A training strategy and its optimizer."""

    make_strategy: Callable[..., Strategy]
    """Takes keywords of Lightning's `DeepSpeedStrategy`."""
    title: str
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    """Takes parameters, `lr` and `weight_decay`."""
    precision: Literal["bf16-true", "32-true"] = "bf16-true"
    """Of the trainer."""
    max_norm: float | None = 1.0
    """To which gradients are clipped."""
    large_every: int = 0
    """Steps from one with a larger gradient to the next; 0: none is larger (`SimulatedAccelerator`)."""
    stage: Literal[2, 3] = 2
    """Of ZeRO."""
    host_bytes: float | None = None
    """Host memory in bytes a parameter by formula, under stage 3."""
    has_keys: bool = False
    """`make_strategy` takes keys of `ZenFlowStrategy` as well."""
    decides_on: Sequence[str] = ()
    """Devices beside which the first `DECIDING` steps may change the schedule or the owners."""
    peer: bool = False
    """Another way to offload: its steps are long, and it may need DeepSpeed's compiled CPU optimizer."""
    not_on: Mapping[str, str] = field(default_factory=dict)
    """Devices to which the method does not apply -> reason."""


DECIDING = 64
"""Steps."""

_MOVES = ("cuda",)
"""Devices whose memory `offload_ratio: auto` uses."""

_AT_ONCE = {"update_interval": 1, "publish_lag": 0}
_ON_HOST = {"stage": 3, "offload_parameters": True}


def _zenflow(title: str, *, max_norm: float | None = 1.0, host_bytes: float | None = None, **keys: Any) -> StepMethod:
    moves = _MOVES if host_bytes is None and "offload_ratio" not in keys else ()
    keys |= {"topk_ratio": 0.05} if host_bytes is None else {**_AT_ONCE, **_ON_HOST}
    return StepMethod(
        make_strategy=partial(ZenFlowStrategy, **keys),
        title=f"ZenFlowStrategy, {title}",
        max_norm=max_norm,
        has_keys=True,
        stage=keys.get("stage", 2),
        host_bytes=host_bytes,
        decides_on=moves if "update_interval" in keys else ("cuda", "cpu", "simulated"),
    )


RATIO = "ratio_"
"""In names of methods, before `offload_ratio` in percent."""


def _of_ratios(name: str, title: str, **keys: Any) -> dict[str, StepMethod]:
    return {
        f"zenflow_{name}_{RATIO}{100 * ratio:.0f}": _zenflow(
            f"{title}, offload_ratio={ratio:g}", offload_ratio=ratio, **keys
        )
        for ratio in (1, 0.75, 0.5, 0.34, 0.25, 0)
    }


def _peer3(title: str, strategy: Callable[..., Strategy], *, host_bytes: float) -> StepMethod:
    peer, make = strategy is not Floor, partial(strategy, **_ON_HOST)
    optimizer = DeepSpeedCPUAdam if peer else torch.optim.AdamW
    return StepMethod(make_strategy=make, title=title, optimizer=optimizer, peer=peer, stage=3, host_bytes=host_bytes)


def _torchao(*args: Any, **kwargs: Any) -> Optimizer:
    from benchmarks.peers.torchao import HostAdamW

    return HostAdamW(*args, **kwargs)


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


_FUSED = partial(torch.optim.AdamW, fused=True)
_NEEDS_CUDA = "its optimizer only supports CUDA and XPU"

METHODS = {
    "floor": StepMethod(make_strategy=Floor, title="floor: gradients dropped, no step"),
    # Not fused in records before d6c81b05.
    "none": StepMethod(make_strategy=NoOffload, title="no offload (DeepSpeed ZeRO-2)", optimizer=_FUSED),
    "zero_offload": StepMethod(
        make_strategy=ZeroOffload,
        title="DeepSpeed ZeRO-Offload (DeepSpeedCPUAdam)",
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
        max_norm=None,
        peer=True,
        not_on={"cpu": _NEEDS_CUDA, "simulated": _NEEDS_CUDA},
    ),
    "fsdp2": StepMethod(
        make_strategy=lambda: Fsdp2Offload(_device()),
        title="FSDP2 CPUOffloadPolicy, fused AdamW",
        optimizer=_FUSED,
        precision="32-true",
        peer=True,
    ),
    "zenflow": _zenflow("S=4, d=1", update_interval=4, publish_lag=1),
    "zenflow_no_provisional": _zenflow(
        "S=4, d=1, no provisional update", update_interval=4, publish_lag=1, provisional_scale=0
    ),
    "zenflow_s2": _zenflow("S=2, d=1", update_interval=2, publish_lag=1),
    "zenflow_s4_d0": _zenflow("S=4, d=0", update_interval=4, publish_lag=0),
    "zenflow_exact": _zenflow("S=1, d=0", **_AT_ONCE),
    "zenflow_exact_half": _zenflow(
        "S=1, d=0, half of the cores for the trainer", pt_reserved_cores_perc=0.5, **_AT_ONCE
    ),
    "zenflow_module_order": StepMethod(
        make_strategy=partial(ModuleOrder, topk_ratio=0.05, update_interval=1, publish_lag=0),
        title="ZenFlowStrategy, S=1, d=0, ZeRO-2's own order",
        has_keys=True,
    ),
    "zenflow_auto": _zenflow("auto"),
    "zenflow_at_once": _zenflow("S=1, d=0, no clipping", max_norm=None, **_AT_ONCE),
    "zenflow_adamw": _zenflow("S=1, d=0, no predicted factor, every step clips", clip_prediction=False, **_AT_ONCE),
    "offload_adamw": StepMethod(
        make_strategy=lambda: SingleDeviceStrategy(_device()),
        title="OffloadAdamW without DeepSpeed, every step clips",
        optimizer=OffloadAdamW,
        decides_on=_MOVES,
    ),
    "offload_adamw_fsdp2": StepMethod(
        make_strategy=lambda: Fsdp2(_device()),
        title="OffloadAdamW under FSDP2, every step clips",
        optimizer=OffloadAdamW,
        decides_on=_MOVES,
    ),
    **_of_ratios("exact", "S=1, d=0", **_AT_ONCE),
    **{
        f"zenflow_exact_{dtype}": _zenflow(
            f"S=1, d=0, offload_ratio=1, {dtype} moments", offload_ratio=1, moments_dtype=dtype, **_AT_ONCE
        )
        for dtype in ("bfloat16", "int8")
    },
    **_of_ratios("adamw", "S=1, d=0, no predicted factor, every step clips", clip_prediction=False, **_AT_ONCE),
    "zenflow_adamw_5_percent": replace(
        _zenflow(
            "S=1, d=0, no predicted factor, 5 % of the steps clip", max_norm=10, clip_prediction=False, **_AT_ONCE
        ),
        large_every=20,
    ),
    "zenflow_adamw_unclipped": _zenflow(
        "S=1, d=0, no predicted factor, no step clips", max_norm=10, clip_prediction=False, **_AT_ONCE
    ),
    "zenflow_at_the_end": _zenflow(
        "S=1, d=0, submitted after backward, no clipping", overlap_step=False, max_norm=None, **_AT_ONCE
    ),
    "floor3": _peer3("floor: stage 3, offload_param, gradients dropped, no step", Floor, host_bytes=2),
    "zero3_offload": _peer3("DeepSpeed ZeRO-3, offload_param (DeepSpeedCPUAdam)", ZeroOffload, host_bytes=20),
    "superoffload": replace(
        _peer3("DeepSpeed SuperOffload, offload_param", partial(ZeroOffload, super_offload=True), host_bytes=20),
        not_on=dict.fromkeys(("cpu", "simulated"), "SuperOffload only supports NVIDIA CUDA GPUs"),
    ),
    "zenflow3": _zenflow("stage 3, parameters on the host", host_bytes=16.7),
    "zenflow3_clipped": replace(
        _zenflow("stage 3, the same, every step clips, by another factor", host_bytes=16.7, max_norm=0.1), large_every=2
    ),
    "zenflow3_bf16": _zenflow(
        "stage 3, parameters on the host, bf16 moments", host_bytes=12.7, moments_dtype="bfloat16"
    ),
    "zenflow3_on_device": _zenflow("stage 3, parameters on the device", stage=3, **_AT_ONCE),
}

_ALWAYS = ["zero_offload", "deepspeed_zenflow", "zenflow", "zenflow_auto", "zenflow_exact"]
DEVICES = {
    "simulated": ["floor", *_ALWAYS, "fsdp2", "zenflow_no_provisional", "zenflow_at_the_end"],
    "cpu": ["none", *_ALWAYS, "fsdp2"],
    "cuda": ["none", *_ALWAYS, "torchao", "fsdp2", "zenflow_no_provisional"],
}
"""Device -> methods by default."""
OF_RANKS = ["floor", "zero_offload", "deepspeed_zenflow", "zenflow_exact", "zenflow_module_order"]
"""Methods by default on several ranks."""
OF_STAGE_3 = [name for name, method in METHODS.items() if method.stage == 3 and "simulated" not in method.not_on]
"""Methods by default with `--stage 3`."""
