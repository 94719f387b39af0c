"""DeepSpeed's ZeRO-2 offload optimizer around `ZenFlowStep`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import deepspeed.comm as dist
import deepspeed.runtime.engine as engine_module
import torch
from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, PARAM_SLICE_MAPPINGS, SINGLE_PARTITION_OF_FP32_GROUPS
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.device import Stream, runtime_of
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.flat_buffers import Layout, balanced_order
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.users_objects import refuse_features
from lightning_zenflow.offload.run_state import MOMENTS


class ZenFlowZeroOptimizer(ZenFlowOptimizer, DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no type information
    """ZeRO stage 2, or 1, under ZenFlow: each rank has all weights, and the optimizer states of its part of them. Its flat buffers have an
    order of ours (`balanced_order`); checkpoints have DeepSpeed's.
    """

    namespace = engine_module
    state_key = BASE_OPTIMIZER_STATE
    # DeepSpeed's own.
    overlap_comm: bool
    has_moe_layers: bool
    reduction_stream: Stream | None
    bit16_groups: list[list[Tensor]]
    bit16_groups_flat: list[Tensor]
    round_robin_bit16_groups: list[list[Tensor]]
    parallel_partitioned_bit16_groups: list[list[Tensor]]
    single_partition_of_fp32_groups: list[Tensor]
    partition_size: list[int]
    real_dp_process_group: list[dist.ProcessGroup]
    nccl_start_alignment_factor: int
    allgather_bucket_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_round_robin = bool(kwargs.get("round_robin_gradients", False))
        # The order of the flat buffers is that of `_round_robin_reorder`.
        super().__init__(*args, **{**kwargs, "round_robin_gradients": True})
        # Private: DeepSpeed links the moments to the parameters after its own first step; ours exist already.
        self._lazy_init_hp_params_optimizer_state()

    @override
    def _round_robin_reorder(
        self, tensor_list: list[Tensor], num_partitions: int
    ) -> tuple[list[Tensor], dict[int, int]]:
        # Private: the order of a group's parameters in its flat buffer: the parameters, and the place of each. Where the device has no room
        # for the buffer, DeepSpeed has moved the weights to `cpu_data`.
        order = balanced_order([getattr(p, "cpu_data", p).numel() for p in tensor_list], num_partitions)
        return [tensor_list[index] for index in order], {index: place for place, index in enumerate(order)}

    @override
    def initialize_optimizer_states(self) -> None:
        refuse_features(self, {"mixture of experts": self.has_moe_layers})
        # Buffers of the size of the largest parameter, which only the stock offload path needs.
        self.temp_grad_buffer_for_cpu_offload = self.temp_grad_buffer_for_gpu_offload = None
        # Weights on their way to the device, in the stock offload path.
        self.param_buffer_of_bit16_for_cpu_offload_groups: list[Tensor] = []
        rank = dist.get_rank(group=self.dp_process_group)
        # Not `detach`: a group's only parameter may be the flat buffer, and our writes would count as the user's.
        weights = [partitions[rank].data for partitions in self.parallel_partitioned_bit16_groups]
        self._start_training(masters=self.single_partition_of_fp32_groups, weights=weights)

    @override
    def copy_grads_in_partition(self, param: Tensor, group_idx: int | None = None) -> None:
        """Routes a reduced gradient before its bucket is reused."""
        index = self.training.slice_of.get(param)
        if index is not None:
            s = self.training.parts.rank.partition.slices[index]
            gradient = self.get_gradient_for_reduction(param).detach().view(-1)
            if gradient.shape[0] != s.numel:
                gradient = gradient.narrow(0, s.start, s.numel)
            self.training.receive(index, gradient, last=self.is_gradient_accumulation_boundary())
        self.clear_grad_attribute(param)

    @override
    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Reduces a bucket, and orders what fills it again, on whatever stream, behind the copies of its gradients to the host."""
        rank = self.training.parts.rank
        runtime, d2h = runtime_of(rank.device), rank.d2h
        if self.overlap_comm and self.reduction_stream is not None:
            # DeepSpeed waits for the bucket's gradients only. Compiled layers give several at once: the training stream may since have been
            # given reads of memory that was allocated on the reduction's stream (provisional updates) and is free for it to use again.
            self.reduction_stream.wait_stream(runtime.current_stream())
        if all(bucket.buffer for bucket in self.ipg_buckets.values()):
            # DeepSpeed makes the buffers at a backward pass' first gradient; without any there is nothing to reduce.
            super().reduce_ipg_grads(comm_dtype)
        for bucket in self.ipg_buckets.values():
            # Private: DeepSpeed's producers of gradients wait for this event only, which it has recorded before the copies.
            if (reduced := bucket.reuse_events.get(bucket.index)) is not None:
                d2h.wait_for(reduced)
                bucket.reuse_events[bucket.index] = d2h.record_event()

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """Ends a backward pass, without the device synchronisation that DeepSpeed does when communication overlaps."""
        self.reduce_ipg_grads()
        self._wait_for(self.reduction_stream)
        # With empty buckets and ordered streams, the rest of DeepSpeed's epilogue needs no overlap.
        overlap_comm, self.overlap_comm = self.overlap_comm, False
        try:
            super().independent_gradient_partition_epilogue()
        finally:
            self.overlap_comm = overlap_comm

    @override
    def refuse_moved(self) -> None:
        for group, flat in zip(self.round_robin_bit16_groups, self.bit16_groups_flat, strict=True):
            address = flat.data_ptr()
            for parameter in group:
                name = self.param_names[parameter]
                numel = self.training.full_state.shapes[name].numel()
                if (parameter.data_ptr(), parameter.numel()) != (address, numel):
                    raise MisconfigurationException(
                        f"ZenFlowStrategy: {name} must keep its memory, got another one since set-up, as by"
                        " `parameter.data = ...`, `module.to(...)` or `module.load_state_dict(..., assign=True)`: updates do not reach it"
                        " there. To give it other values, use deepspeed.utils.safe_set_full_fp32_param"
                    )
                address += parameter.nbytes

    @override
    def _forget_weights(self) -> None:
        super()._forget_weights()
        self.bit16_groups_flat = []
        self.parallel_partitioned_bit16_groups = []

    @override
    def gather_weights(self) -> None:
        all_gather_dp_groups(
            groups_flat=self.bit16_groups_flat,
            partitioned_param_groups=self.parallel_partitioned_bit16_groups,
            dp_process_group=self.real_dp_process_group,
            start_alignment_factor=self.nccl_start_alignment_factor,
            allgather_bucket_size=self.allgather_bucket_size,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        state, copies = super().state_dict(), self.reordered.copies
        if copies is not None and len(copies[0]) > len(MOMENTS):
            # Private: cuts off the padding.
            masters = self._get_groups_without_padding([masters for masters, *_ in copies])
            state[SINGLE_PARTITION_OF_FP32_GROUPS] = masters
            rank = dist.get_rank(group=self.dp_process_group)
            # By which DeepSpeed makes universal checkpoints.
            state[PARAM_SLICE_MAPPINGS] = [
                {
                    name: fragment_address(numel=part.numel, start=part.begin)
                    for name, parts in layout.parts.items()
                    for part in parts
                    if part.rank == rank
                }
                for layout in self.saved_layouts
            ]
        return state

    @contextmanager
    @override
    def gathered(self) -> Iterator[None]:
        """DeepSpeed saves in its own order."""
        # Private: the engine saves the parameters' shapes in the order of these groups.
        with super().gathered(), patch.object(self, "round_robin_bit16_groups", self._plain_groups()):
            yield

    @property
    @override
    def layouts(self) -> list[Layout]:
        return self._layouts_of(self.round_robin_bit16_groups)

    @property
    @override
    def saved_layouts(self) -> list[Layout]:
        return self._layouts_of(self._plain_groups())

    def _layouts_of(self, groups: Sequence[Sequence[Tensor]]) -> list[Layout]:
        """Layout of each parameter group, with the parameters in the order of `groups`."""
        return [
            Layout.of_partitions({self.param_names[p]: p.numel() for p in g}, [0] * len(g), partition_numel=numel)
            for g, numel in zip(groups, self.partition_size, strict=True)
        ]

    def _plain_groups(self) -> list[list[Tensor]]:
        """The parameters in the order of plain DeepSpeed's flat buffers, with the user's configuration."""
        if not self._is_round_robin:
            return list(self.bit16_groups)
        n_ranks, reorder = dist.get_world_size(group=self.dp_process_group), super()._round_robin_reorder
        return [reorder(group, n_ranks)[0] for group in self.bit16_groups]
