"""One training run as data: what tests train, under which keys, and what the oracle says of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from typing_extensions import override

import models
import networks
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deepspeed.trained_engine import new_engine
from lightning_zenflow.strategy import ZenFlowPrecision
from lightning_zenflow.worker.machine import allowed_cores
from models import OptimizerOptions, TestModule
from oracle import Oracle
from scripted_schedule import Entry
from stage3_runs import PlainStage3
from zenflow_reference import AdamWState, Groups

APPROXIMATE = {"weight_prediction": "auto", "provisional_scale": "auto"}
RESELECTING = {"select_interval": 5}
"""Windows of four steps close in between: the steps that select are synchronous."""
EVERYTHING = {**APPROXIMATE, **RESELECTING}
"""All that changes weights or the ownership of columns between two exact results."""
AUTO = {"update_interval": "auto", "publish_lag": "auto"}


PLACES: dict[str, dict[str, Any]] = {
    "stage 2": {},
    "stage 3": {"stage": 3},
    "in host memory": {"stage": 3, "offload_parameters": True},
}
"""Of the parameters: fields of a `Case`, or keywords of the strategy."""

UP_TO_TWO = min(2, len(allowed_cores()))
"""Cores, where this machine has them."""


class StockStrategy(ZenFlowStrategy):
    """DeepSpeed's own ZeRO offload: of `ZenFlowStrategy` it has only what makes DeepSpeed run on the CPU, and its saves."""

    precision_class = DeepSpeedPrecision  # Lightning's own

    @override
    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        engine = new_engine(model, optimizer, self.config, self.root_device, lr_scheduler)
        return engine, engine.optimizer

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        super().on_train_batch_start(*args)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self.deepspeed_engine.set_gradient_accumulation_boundary(True)
        return super().optimizer_step(*args, **kwargs)

    @override
    def _saves_file(self, *, weights_only: bool = False) -> bool:
        return False

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return DeepSpeedStrategy.load_checkpoint(self, *args, **kwargs)

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # as DeepSpeedStrategy's


def flatten(weights: Sequence[Tensor]) -> Tensor:
    """The weights, end to end and padded to an even number; those that are parameters become views of it."""
    flat = torch.cat([w.detach().flatten() for w in weights])
    flat = torch.cat([flat, flat.new_zeros(len(flat) % 2)])
    show(flat, weights)
    return flat


def show(flat: Tensor, weights: Sequence[Tensor]) -> None:
    """Makes those of the weights that are parameters views of a flat tensor, end to end."""
    begin = 0
    for w in weights:
        if isinstance(w, nn.Parameter):
            w.data = flat[begin : begin + w.numel()].view(w.shape)
        begin += w.numel()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run; everything about it, so that it can be sent to other processes."""

    model: str | type[TestModule] = "LinearLossModule"
    """A class, or the name of one in `models` or `networks`."""
    model_options: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    topk_ratio: float = 0.05
    update_interval: int = 4
    publish_lag: int = 1
    warm_up: int = 0
    steps: int = 8
    accumulate: int = 1
    max_norm: float | None = None
    precision: str = "32-true"
    flush_after: tuple[int, ...] = ()
    """Steps, counted from 1, after which a validation runs, and with it a flush."""
    save_at: int = 0
    """Step, counted from 1, after which `checkpoint` is written; 0: none."""
    checkpoint: str | None = None
    """Where a checkpoint is written, or, where `save_at` is 0, read."""
    schedules: tuple[Entry, ...] = ()
    """(step, S, d): what `auto` decides on; for it
    `update_interval` and `publish_lag` must be "auto" in `strategy_options`."""
    strategy_options: dict[str, Any] = field(default_factory=dict)
    accelerator: Literal["cpu", "gpu"] = "cpu"
    """One of them only in each process: DeepSpeed keeps to the first."""
    callbacks: tuple[pl.Callback, ...] = ()
    """Further ones, of classes that other processes can import."""
    recorded: bool = True
    """Whether losses and shown weights are kept, for which the host waits for a GPU in every step."""
    watched: bool = True
    """Whether shown weights are kept: they are read before each step, besides by the model."""
    loop: Literal["trainer", "fabric", "direct", "recorded", "stage 3"] = "trainer"
    """Who runs the steps: Lightning's Trainer, or in plain Python `fabric_runs` under Fabric, or `direct_step` without DeepSpeed; or the
    Trainer on a recorded device, or with plain DeepSpeed's stage 3 and its keys of "zero_optimization", for which `stock` must be set."""
    stock: bool = False
    """Whether DeepSpeed's own ZeRO offload trains."""
    stage: Literal[2, 3] = 2
    """Of ZeRO. Under stage 3, matrices are gathered where they are used, small parameters stay gathered."""
    offload_parameters: bool = False
    """Whether the parameters are in host memory; under stage 3."""
    fails: bool = False
    """Whether it ends with an error, on all ranks at the same point, so that they can go on with other cases."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the model."""
        if "bf16" in self.precision:
            return torch.bfloat16
        return torch.float16 if "16" in self.precision else torch.float32

    def with_keys(self, **keys: Any) -> "Case":
        """The case with other keys of the strategy."""
        return replace(self, strategy_options={**self.strategy_options, **keys})

    def exact(self) -> "Case":
        """AdamW on the same gradients: all columns host-owned, nothing late, every clip factor the true one."""
        exact = replace(self, topk_ratio=0, update_interval=1, publish_lag=0, schedules=(), flush_after=())
        return replace(exact, strategy_options={"overlap_step": False})

    def make_model(self) -> TestModule:
        """The model, before it is converted to `dtype`."""
        model_class = {**vars(models), **vars(networks)}[self.model] if isinstance(self.model, str) else self.model
        options = {"accumulate": self.accumulate, "optimizer": self.optimizer, **self.model_options}
        return model_class(length=self.steps * self.accumulate, **options)

    def make_strategy(self) -> ZenFlowStrategy | PlainStage3:
        """The strategy with this case's keys."""
        if self.loop == "stage 3":
            return PlainStage3(self.strategy_options, fp16=self.dtype == torch.float16)
        return (StockStrategy if self.stock else ZenFlowStrategy)(**self.keys())

    def keys(self) -> dict[str, Any]:
        """This case's keys of the strategy."""
        keys = {
            "topk_ratio": self.topk_ratio,
            "full_warm_up_rounds": self.warm_up,
            "worker_timeout": 250,  # only so that a hang ends before the test runner does
            "update_interval": self.update_interval,
            "publish_lag": self.publish_lag,
            # Off, so that the model shows the exact weights of some step; tests switch on what they are about.
            "weight_prediction": 0,
            "provisional_scale": 0,
            "select_interval": 0,
            "worker_cores": 1,
            # On one rank as on several.
            "checkpoint_format": "deepspeed",
            **({} if self.stage == 2 else {"config": {"zero_optimization": self.zero_3()}}),
            **self.strategy_options,
        }
        if (config := keys.get("config")) is not None:
            # Keywords of ZeRO are for strategies without a configuration.
            zero = {key: keys.pop(key) for key in ("reduce_bucket_size", "overlap_comm") if key in keys}
            keys["config"] = {**config, "zero_optimization": {**config.get("zero_optimization", {}), **zero}}
        return keys

    @property
    def sub_group_size(self) -> int:
        """Elements after which stage 3 begins a further sub-group; 0: stage 2."""
        return 0 if self.stage == 2 else self.keys()["config"]["zero_optimization"].get("sub_group_size", 10**9)

    def zero_3(self) -> dict[str, Any]:
        """DeepSpeed's configuration of stage 3, with the buckets of the case's keys."""
        buckets = {
            key: value for key, value in self.strategy_options.items() if key in ("reduce_bucket_size", "overlap_comm")
        }
        gathered = {"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 1000}
        sizes = {"sub_group_size": 500, "reduce_bucket_size": 400, **gathered, **buckets}
        return {"stage": 3, "offload_param": {"device": "cpu" if self.offload_parameters else "none"}, **sizes}

    def make_oracle(self, *, world_size: int = 1) -> Oracle:
        """The oracle of this case."""
        module = self.make_model()
        if self.precision == "32-true":
            ZenFlowPrecision(self.precision).convert_module(module)
        elif not self.precision.endswith("mixed"):
            module.to(self.dtype)
        # As DeepSpeed lays them out: how far they are from a cache line decides about torch's kernels, as do strides of one element.
        for p in module.parameters():
            dtype = p.dtype if self.precision == "32-true" else self.dtype
            p.data = torch.empty(p.shape, dtype=dtype).copy_(p.data)
        for parameters in module.parameter_groups():
            flatten(parameters)
        return Oracle(case=self, module=module, world_size=world_size)

    def fixed_gradients(self, *, world_size: int = 1) -> tuple[list[Tensor], list[list[Tensor]], list[Groups]]:
        """Of a `LinearLossModule`: initial weights; for each step the gradients, and the groups; one a parameter."""
        oracle = self.make_oracle(world_size=world_size)
        weights = [p.detach().clone() for p in oracle.parameters]
        gradients, groups = [], []
        for step in range(self.steps):
            oracle.steps = step
            gradients.append(oracle.gradients()[1])
            groups.append(oracle.groups(step))
        return weights, gradients, groups

    def adamw(self, *, world_size: int = 1) -> AdamWState:
        """AdamW in float64 on `fixed_gradients`."""
        weights, *of_steps = self.fixed_gradients(world_size=world_size)
        state = AdamWState.start(weights, torch.float64)
        for gradients, groups in zip(*of_steps, strict=True):
            state.step(gradients, groups, max_norm=self.max_norm or 0.0)
        return state
