"""How steps are timed: every method of the step-time benchmark, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks.deepspeed_peers import DeepSpeedZenFlow, ZeroOffload
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.zero.engine import zenflow_optimizer


class NoOffload(ZeroOffload):
    """DeepSpeed's ZeRO-2 with the optimizer states on the device."""

    @override
    def _format_config(self) -> None:
        super()._format_config()
        # Not in the constructor: ZenFlowStrategy puts it there again.
        assert isinstance(self.config, dict)
        del self.config["zero_optimization"]["offload_optimizer"]


class _Dropping(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no type information
    """Takes reduced gradients and does nothing with them."""

    @override
    def copy_grads_in_partition(self, param: Tensor, group_idx: int | None = None) -> None:
        self.clear_grad_attribute(param)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.optimizer._opt_called = True


class Floor(ZeroOffload):
    """What a step costs before anything is done with its gradients: the model, Lightning, DeepSpeed's engine and buckets."""

    @override
    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with zenflow_optimizer(_Dropping):
            return super()._setup_model_and_optimizer(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class StepMethod:
    """A way to train."""

    make_strategy: Callable[[], Strategy]
    title: str
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    """Of parameters, `lr` and `weight_decay`."""
    clips: bool = True
    """Whether gradients are clipped by norm."""
    zenflow_keys: Mapping[str, Any] = field(default_factory=dict)
    """Ours: keys of `ZenFlowConfig` that differ from its defaults."""
    not_on: Mapping[str, str] = field(default_factory=dict)
    """Devices of the benchmark that it does not apply to, and why."""


def _zenflow(title: str, *, clips: bool = True, **keys: Any) -> StepMethod:
    return StepMethod(
        make_strategy=lambda: ZenFlowStrategy(topk_ratio=0.05, **keys), title=title, clips=clips, zenflow_keys=keys
    )


def _torchao(*args: Any, **kwargs: Any) -> Optimizer:
    from benchmarks.torchao_peer import HostAdamW

    return HostAdamW(*args, **kwargs)


_NEEDS_CUDA = "its optimizer copies between a CUDA device and the host"

METHODS = {
    "floor": StepMethod(make_strategy=Floor, title="floor: gradients dropped, no step"),
    "none": StepMethod(make_strategy=NoOffload, title="no offload (DeepSpeed ZeRO-2)"),
    "zero_offload": StepMethod(
        make_strategy=ZeroOffload, title="DeepSpeed ZeRO-Offload (DeepSpeedCPUAdam)", optimizer=DeepSpeedCPUAdam
    ),
    "zero_offload_default_buckets": StepMethod(
        make_strategy=lambda: ZeroOffload(default_buckets=True),
        title="the same with Lightning's default buckets",
        optimizer=DeepSpeedCPUAdam,
    ),
    "deepspeed_zenflow": StepMethod(
        make_strategy=lambda: DeepSpeedZenFlow(repair=False),
        title="DeepSpeed ZenFlow, S=4, overlap",
    ),
    "torchao": StepMethod(
        make_strategy=lambda: SingleDeviceStrategy(torch.device("cuda", 0)),
        title="torchao CPUOffloadOptimizer, bf16 states, no clipping",
        optimizer=_torchao,
        clips=False,
        not_on={"cpu": _NEEDS_CUDA, "simulated": _NEEDS_CUDA},
    ),
    "zenflow": _zenflow("ours, S=4, d=1", update_interval=4, publish_lag=1),
    "zenflow_no_stand_in": _zenflow(
        "ours, S=4, d=1, no stand-in", update_interval=4, publish_lag=1, provisional_scale=0
    ),
    "zenflow_auto": _zenflow("ours, auto"),
    "zenflow_auto_unclipped": _zenflow("ours, auto, no clipping", clips=False),
    "zenflow_at_once": _zenflow(
        "ours, S=1, d=0 (AdamW itself), no clipping", update_interval=1, publish_lag=0, clips=False
    ),
    "zenflow_at_the_end": _zenflow(
        "the same, handed over at the end of the step",
        update_interval=1,
        publish_lag=0,
        optimizer_in_backward=False,
        clips=False,
    ),
}
