"""`ZenFlowStep` without DeepSpeed and Lightning: the real arena and worker, gradients by hand."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import Slice
from lightning_zenflow.core.step_inputs import GroupHyperparameters, StepScale
from lightning_zenflow.step.freezing import Freezing
from lightning_zenflow.step.step import ZenFlowStep
from lightning_zenflow.worker.cores import WorkerCores
from lightning_zenflow.zero.build import ZeroPartition, build
from lightning_zenflow.zero.environment import RankResources
from reference import AdamWState

STEPS, BAD_STEP, MAX_NORM = 11, 5, 3.0
SHAPES = ((12, 8), (5,), (3, 7))
ADAMW = GroupHyperparameters(lr=0.02, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)


class Environment:
    """The interface that DeepSpeed's optimizer has for the step."""

    loss_scale = 4.0
    max_norm = MAX_NORM

    def read_hyperparameters(self) -> list[GroupHyperparameters]:
        return [ADAMW]

    def scaled(self, scale: StepScale) -> None:
        pass

    def gather_weights(self) -> None:
        pass


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    # Trainings in this process leave theirs behind, of one rank as well.
    new = not dist.is_initialized()
    if new:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if new:
        dist.destroy_process_group()


def random(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize(("update_interval", "publish_lag"), [(1, 0), (2, 1), (4, 2)])
def test_its_state_is_adamws(update_interval: int, publish_lag: int, group: dist.ProcessGroup) -> None:
    """With accumulation, clipping, a loss scale, selections, and a step whose gradients are not finite."""
    weights = random(0)
    flat = torch.cat([w.flatten() for w in weights])
    slices, begin = [], 0
    for number, w in enumerate(weights):
        columns = w.shape[1] if w.dim() > 1 else 1
        part = {"begin": begin, "start": 0, "numel": w.numel(), "columns": columns, "is_matrix": w.dim() > 1}
        slices.append(Slice(parameter=number, param_group=0, **part))
        begin += w.numel()
    master = torch.nn.Parameter(flat.clone())
    zero = ZeroPartition(
        optimizer=torch.optim.AdamW([master]),
        fp32_groups=[master],
        partition_sizes=[len(flat)],
        slices=slices,
        weights=[flat.clone()],
        names=["a", "b", "c"],
        row_lengths=[8, 0, 7],
        group=group,
    )
    keys = {"update_interval": update_interval, "publish_lag": publish_lag, "select_interval": 3, "topk_ratio": 0.3}
    config = ZenFlowConfig(worker_timeout=60, **keys)
    resources = RankResources(cores=WorkerCores(cores=(0,), reason="test", trainer_threads=1), ranks_on_host=1)
    parts = build(config, zero, resources)
    step = ZenFlowStep(config, parts.step, Environment(), Freezing(parts.step.rank.partition, weights), group)
    exact = AdamWState.start(weights, torch.float64)
    try:
        for t in range(1, STEPS + 1):
            first, last = random(2 * t), random(2 * t + 1)
            if t == BAD_STEP:
                last[0][0, 0] = torch.inf
            for gradients, is_last in ((first, False), (last, True)):
                for index in reversed(range(len(SHAPES))):
                    step.receive(index, gradients[index].flatten() * Environment.loss_scale, last=is_last)
            step.step()
            exact.step([a + b for a, b in zip(first, last, strict=True)], [ADAMW] * 3, max_norm=MAX_NORM)  # type: ignore[list-item]
        step.flush()
        assert step.is_exact
        assert (int(step.count), int(step.skipped)) == (exact.count, exact.skipped) == (STEPS - 1, 1)
        expected = torch.cat([w.flatten() for w in exact.weights])
        torch.testing.assert_close(master.detach().double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(zero.weights[0], master.detach(), rtol=0, atol=0)
    finally:
        parts.worker.close()
        parts.step.rank.arena.close(keep_state=False)
