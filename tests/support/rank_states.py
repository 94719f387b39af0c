"""State of a rank for tests of single components."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_zenflow.core.device import SideStream
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.kernels.base import Kernels, kernels_for
from lightning_zenflow.offload.columns import export_bytes
from lightning_zenflow.offload.rank_state import Blocks, RankState
from lightning_zenflow.telemetry import Telemetry
from lightning_zenflow.worker.arena import Arena, ArenaSizes
from lightning_zenflow.worker.machine import allowed_cores
from lightning_zenflow.worker.process import Worker
from lightning_zenflow.worker.supervisor import Submission, SupervisedWorker


def make_rank_state(
    partition: Partition,
    weights: Sequence[Tensor],
    *,
    kernels: Kernels | None = None,
    arena: Arena | None = None,
    topk_ratio: float = 0.0,
) -> RankState:
    """A rank with these weights; its arena, if none is given, has slots for two steps and is never page-locked."""
    device = weights[0].device
    if arena is None:
        sizes = ArenaSizes(
            n_param_groups=len(weights),
            n_step_records=4,
            n_slots=2 * len(partition.blocks),
            n_publish_buffers=1,
            dtype=weights[0].dtype,
            export_bytes=export_bytes(partition, topk_ratio),
        )
        arena = Arena(partition, sizes, device=torch.device("cpu"))
    return RankState(
        partition=partition,
        blocks=Blocks(partition),
        arena=arena,
        weights=weights,
        device=device,
        kernels=kernels or kernels_for(device),
        telemetry=Telemetry(device),
        d2h=SideStream(device),
    )


def supervised_worker(rank: RankState, *, n_threads: int = 1) -> SupervisedWorker:
    """A worker on the rank's arena, of as many threads as there are cores for; to be closed or killed."""
    start = partial(Worker, rank.arena, cores=allowed_cores()[:n_threads], timeout_s=30.0)
    return SupervisedWorker(start, max_restarts=100, telemetry=rank.telemetry)


def seen(worker: SupervisedWorker, submission: Submission, is_answered: bool) -> bool:
    """In the place of `SupervisedWorker.has_answered`: what it answers; waits for the worker where it is to be done."""
    if is_answered:
        worker.wait_for(submission)
    return is_answered
