"""`ZenFlowStep` without DeepSpeed and Lightning: the real arena and worker, gradients by hand."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import Slice
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.step.context import StepInputs
from lightning_zenflow.step.freezing import Freezing
from lightning_zenflow.step.step import ZenFlowStep
from lightning_zenflow.worker.cores import WorkerCores
from lightning_zenflow.zero.build import ZeroPartition, build
from lightning_zenflow.zero.environment import RankResources

ADAMW = GroupHyperparameters(lr=0.02, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)


class Environment:
    """What DeepSpeed's optimizer decides for the step."""

    loss_scale = 4.0
    max_norm = 3.0

    @classmethod
    def inputs(cls) -> StepInputs:
        return StepInputs(groups=[ADAMW], loss_scale=cls.loss_scale, max_norm=cls.max_norm)


class DirectStep:
    """One rank's step on some weights, in one parameter group.

    Args:
        weights: initial weights; copied.
        **keys: of the configuration.
    """

    def __init__(self, weights: Sequence[Tensor], **keys: Any) -> None:
        # Trainings in this process leave a group behind, of one rank as well.
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        slices, begin = [], 0
        for number, w in enumerate(weights):
            is_matrix = w.dim() > 1
            part: dict[str, Any] = {"begin": begin, "start": 0, "numel": w.numel(), "is_matrix": is_matrix}
            slices.append(Slice(parameter=number, param_group=0, columns=w.shape[1] if is_matrix else 1, **part))
            begin += w.numel()
        self.weights = torch.cat([w.flatten() for w in weights])
        self.master = torch.nn.Parameter(self.weights.clone())
        self.optimizer = torch.optim.AdamW([self.master])
        zero = ZeroPartition(
            optimizer=self.optimizer,
            fp32_groups=[self.master],
            partition_sizes=[len(self.weights)],
            slices=slices,
            weights=[self.weights],
            names=[str(number) for number in range(len(weights))],
            row_lengths=[w.shape[1] if w.dim() > 1 else 0 for w in weights],
            group=dist.group.WORLD,
        )
        config = ZenFlowConfig(**{"worker_timeout": 60, **keys})
        resources = RankResources(cores=WorkerCores(cores=(0,), reason="test", trainer_threads=1), ranks_on_host=1)
        self.parts = build(config, zero, resources)
        freezing = Freezing(self.parts.step.rank.partition, list(weights))
        self.step = ZenFlowStep(
            config,
            self.parts.step,
            freezing,
            dist.group.WORLD,
            read_inputs=Environment.inputs,
            gather_weights=lambda: None,
        )

    def backward(self, gradients: Sequence[Tensor], *, last: bool = True) -> None:
        """A micro-batch whose gradients arrive from the last parameter to the first."""
        for index in reversed(range(len(gradients))):
            self.step.receive(index, gradients[index].flatten() * Environment.loss_scale, last=last)

    def state(self) -> list[Tensor]:
        """Copies of master weights, moments and the weights that the model shows."""
        arena = self.parts.step.rank.arena
        return [t.detach().clone() for t in (arena.master, arena.exp_avg, arena.exp_avg_sq, self.weights)]

    def close(self) -> None:
        """Ends the worker and frees the memory."""
        self.parts.worker.kill()
        self.parts.step.rank.arena.close(keep_state=False)
