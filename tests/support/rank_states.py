"""State of a rank for tests of single components."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zenflow.core.device import SideStream
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.kernels.base import Kernels
from lightning_zenflow.kernels.select import kernels_for
from lightning_zenflow.telemetry.telemetry import Telemetry
from lightning_zenflow.worker.arena import Arena, ArenaSizes
from lightning_zenflow.worker.rank_state import RankState


def make_rank_state(
    partition: Partition, weights: Sequence[Tensor], *, kernels: Kernels | None = None, arena: Arena | None = None
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
        )
        arena = Arena(partition, sizes, device=torch.device("cpu"))
    return RankState(
        partition=partition,
        arena=arena,
        weights=weights,
        kernels=kernels or kernels_for(device),
        telemetry=Telemetry.create(device, worker_threads=1),
        d2h=SideStream(device),
    )
