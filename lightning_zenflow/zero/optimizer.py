"""DeepSpeed's ZeRO-2 offload optimizer around `ZenFlowStep`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.partition import row_length
from lightning_zenflow.step.context import StepInputs
from lightning_zenflow.step.freezing import Freezing
from lightning_zenflow.step.readings import CounterReader
from lightning_zenflow.step.run_state import CHECKPOINT_KEY
from lightning_zenflow.step.step import ZenFlowStep
from lightning_zenflow.telemetry.telemetry import Telemetry
from lightning_zenflow.worker.process import WorkerError
from lightning_zenflow.worker.supervisor import SupervisedWorker
from lightning_zenflow.zero.build import ZeroPartition, build
from lightning_zenflow.zero.environment import RankResources
from lightning_zenflow.zero.exchange import OrderedCopy
from lightning_zenflow.zero.flat_layout import FlatLayout
from lightning_zenflow.zero.flat_order import balanced_order
from lightning_zenflow.zero.full_state import FullState
from lightning_zenflow.zero.host_state import MOMENTS
from lightning_zenflow.zero.slices import flat_layouts, fragments, parameters_in_order, read_slices
from lightning_zenflow.zero.supported import refuse_moved, refuse_unsupported, refuse_unused
from lightning_zenflow.zero.user_optimizer import read_hyperparameters


class ZenFlowZeroOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no type information
    """ZeRO-2 offload whose optimizer step does not wait for the CPU (ZenFlow, arXiv 2505.12242).

    DeepSpeed keeps its part: flat model weights, gradient buckets and their reduction, checkpoint format, the engine around it. Its fp32
    partitions and AdamW's moments live in the arena that the worker shares, so DeepSpeed's own checkpoint code sees them as they are.
    Gradients and steps go to `ZenFlowStep`.

    Args:
        *args: as `DeepSpeedZeroOptimizer`.
        zenflow: configuration.
        resources: cores and memory of the rank.
        **kwargs: as `DeepSpeedZeroOptimizer`.

    Attributes:
        telemetry: stall clock, tracer and copied bytes.
        counters: all counters, to be read at any time.
        parts: components of the step.
        clip_grad: largest norm of the whole gradient after clipping, DeepSpeed's; also of a step that is complete already. 0: no clipping.
            Infinity: no clipping, which backward passes do not rely on.
        worker_cores: logical cores of the worker.
        zenflow_step: the step. Not `zenflow`, which is a flag of the base class.
    """

    # DeepSpeed's own, declared for the type checker.
    overlap_comm: bool
    round_robin_bit16_groups: list[list[Tensor]]

    def __init__(self, *args: Any, zenflow: ZenFlowConfig, resources: RankResources, **kwargs: Any) -> None:
        # DeepSpeed's constructor calls `initialize_optimizer_states`, which needs these.
        self._config = zenflow
        self._resources = resources
        self.worker_cores = list(resources.cores.cores)
        self._worker: SupervisedWorker | None = None
        self._destroyed = False
        self._is_round_robin = bool(kwargs.get("round_robin_gradients", False))
        self._saved: OrderedCopy | None = None
        try:
            # The order of the flat buffers is that of `_round_robin_reorder`.
            super().__init__(*args, **{**kwargs, "round_robin_gradients": True})
        except BaseException:
            if not self.closed:
                self.close(keep_state=False)
            raise
        # Lightning's `LearningRateMonitor` reads them, as from torch's.
        self.defaults = dict(self.optimizer.defaults)
        # Private: DeepSpeed links the moments to the parameters after its own first step; ours exist already.
        self._lazy_init_hp_params_optimizer_state()
        self._addresses = [parameter.data_ptr() for parameter in self._trained_parameters]

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
        """Replaces DeepSpeed's host buffers by the arena and starts the worker."""
        refuse_unsupported(self)
        # Buffers of the size of the largest parameter, which only the stock offload path needs.
        self.temp_grad_buffer_for_cpu_offload = self.temp_grad_buffer_for_gpu_offload = torch.empty(0)
        # Weights on their way to the device, in the stock offload path.
        self.param_buffer_of_bit16_for_cpu_offload_groups: list[Tensor] = []
        self._trained_parameters = parameters = parameters_in_order(self)
        zero = ZeroPartition(
            optimizer=self.optimizer,
            slices=read_slices(self),
            weights=[
                partitions[dist.get_rank(group=group)].detach()
                for partitions, group in zip(
                    self.parallel_partitioned_bit16_groups, self.real_dp_process_group, strict=True
                )
            ],
            names=[self.param_names[p] for p in parameters],
            row_lengths=[row_length(p) for p in parameters],
            group=self.dp_process_group,
        )
        parts = build(self._config, zero, self._resources)
        self._worker, self._host_state, self._rank = parts.worker, parts.host_state, parts.step.rank
        self.telemetry: Telemetry = parts.step.rank.telemetry
        self.counters: CounterReader = parts.step.counters
        self.parts = parts.step
        self._slice_of_parameter = {s.parameter: i for i, s in enumerate(self._rank.partition.slices)}
        freezing = Freezing(self._rank.partition, parameters)
        self.zenflow_step = ZenFlowStep(
            self._config,
            parts.step,
            freezing,
            self.dp_process_group,
            read_inputs=self._read_inputs,
            gather_weights=self._gather_weights,
        )
        self._full_state = FullState(self)
        # DeepSpeed's start needs up to 6 bytes a parameter more than a step, which `has_room` would count for ever.
        runtime_of(parts.step.rank.device).forget_peak()

    @override
    def _link_all_hp_params(self) -> None:
        # Private: adds to each parameter what `deepspeed.utils.safe_get_full_fp32_param` and the like call.
        super()._link_all_hp_params()
        self._full_state.attach()

    @override
    def copy_grads_in_partition(self, param: Tensor, group_idx: int | None = None) -> None:
        """Routes a reduced gradient before its bucket is reused."""
        index = self._slice_of_parameter.get(self.get_param_id(param))
        if index is not None:
            s = self._rank.partition.slices[index]
            gradient = self.get_gradient_for_reduction(param).detach().view(-1)
            if gradient.shape[0] != s.numel:
                gradient = gradient.narrow(0, s.start, s.numel)
            self.zenflow_step.receive(index, gradient, last=self.is_gradient_accumulation_boundary())
        self.clear_grad_attribute(param)

    @override
    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Reduces a bucket, and orders the stream of the reduction behind the copies of its gradients to the host.

        DeepSpeed orders the stream that fills a bucket again behind the stream of the reduction.
        """
        runtime = runtime_of(self._rank.device)
        if self.overlap_comm and self.reduction_stream is not None:
            # DeepSpeed waits for the bucket's gradients only. Compiled layers give several at once: the training stream may since have been
            # given reads of memory that was allocated on the reduction's stream (provisional updates) and is free for it to use again.
            self.reduction_stream.wait_stream(runtime.current_stream())
        if all(bucket.buffer for bucket in self.ipg_buckets.values()):
            # DeepSpeed makes the buffers at a backward pass' first gradient; without any there is nothing to reduce.
            super().reduce_ipg_grads(comm_dtype)
        with runtime.on(self.reduction_stream) if self.overlap_comm and self.reduction_stream else nullcontext():
            self._rank.d2h.join()

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """Ends a backward pass, without the device synchronisation that DeepSpeed does when communication overlaps."""
        self.reduce_ipg_grads()
        if self.reduction_stream is not None:
            runtime_of(self._rank.device).current_stream().wait_stream(self.reduction_stream)
        # With empty buckets and ordered streams, the rest of DeepSpeed's epilogue needs no overlap.
        overlap_comm, self.overlap_comm = self.overlap_comm, False
        try:
            super().independent_gradient_partition_epilogue()
        finally:
            self.overlap_comm = overlap_comm

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One optimizer step (`ZenFlowStep.step`), and the bookkeeping that DeepSpeed and torch expect of it.

        Raises:
            MisconfigurationException: the memory of a weight was replaced; or the step did not use a parameter, and
                `ignore_unused_parameters` is false.
            WorkerError: training has ended.
        """
        # First: the end of training may move the weights to the CPU, which replaces their memory.
        if self.closed:
            raise WorkerError(
                "training has ended, and the ZenFlow worker of this training has been ended with it: set up the training again"
            )
        if self._addresses != (addresses := [parameter.data_ptr() for parameter in self._trained_parameters]):
            places = zip(self._trained_parameters, addresses, self._addresses, strict=True)
            refuse_moved(self.param_names[parameter] for parameter, now, before in places if now != before)
        if not self.ignore_unused_parameters:
            refuse_unused(self.param_names[p] for p in self.zenflow_step.unused_parameters())
        scale, finite = self.zenflow_step.step(copies_finite=self.loss_scaler.dynamic)
        # Private: DeepSpeed's engine reads it for `get_global_grad_norm`.
        self._global_grad_norm = scale.norm
        if finite is not None:
            # A dynamic loss scale (fp16) must know on the host whether the step overflowed, and waits for the device.
            with self.telemetry.stalls.measure("loss_scale"):
                self.overflow = not bool(finite.read())
            # Private: the loss scaler's own rule, which DeepSpeed's `step` calls.
            self._update_scale(self.overflow)
        # Private: torch's Optimizer.step sets it; schedulers warn without it that they were stepped first.
        self.optimizer._opt_called = True

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As DeepSpeed's, and drops the gradients that no step has used."""
        self.zenflow_step.drop_gradients()
        super().zero_grad(set_to_none)

    def reset_master_from_model(self) -> None:
        """Makes the model's weights, loaded from elsewhere right after a flush, the master weights; moments stay."""
        # Private: DeepSpeed's own way to do the same with its buffers.
        self._restore_from_bit16_weights()
        self.zenflow_step.start_over(int(self.zenflow_step.count))

    def _read_inputs(self) -> StepInputs:
        groups = read_hyperparameters(self.optimizer)
        return StepInputs(groups=groups, loss_scale=self.loss_scale, max_norm=float(self.clip_grad))

    def _gather_weights(self) -> None:
        """Exchanges the ranks' updated weights, as ZeRO-2."""
        all_gather_dp_groups(
            groups_flat=self.bit16_groups_flat,
            partitioned_param_groups=self.parallel_partitioned_bit16_groups,
            dp_process_group=self.real_dp_process_group,
            start_alignment_factor=self.nccl_start_alignment_factor,
            allgather_bucket_size=self.allgather_bucket_size,
        )

    def flush(self) -> None:
        """Makes arena and weights the exact state of all steps so far, which DeepSpeed's checkpoint code then reads.

        Raises:
            WorkerError: the worker has ended, or an interrupted step has been submitted to it; the exact state is lost.
        """
        if self.closed and not self.zenflow_step.is_exact:
            raise WorkerError(
                f"training ended before the worker had applied all of its {self.zenflow_step.number} steps:"
                " the exact optimizer state is lost"
            )
        try:
            self.zenflow_step.flush()
        except WorkerError:
            # The caller may be ending with an error of its own, and nothing else would end the worker.
            self.close(keep_state=False)
            raise

    def close(self, *, keep_state: bool | None = None) -> None:
        """Ends the worker and releases the shared memory. May be called again.

        Args:
            keep_state: whether master weights and moments stay readable for as long as DeepSpeed's tensors live, after a regular end of
                the worker; if not, the worker is killed. None: they stay if they are exact.
        """
        if keep_state is None:
            keep_state = self.zenflow_step.is_exact
        if self._worker is not None:
            if keep_state:
                self._worker.close()
            else:
                self._worker.kill()
            self._worker = None
        if not keep_state:
            self._host_state.clear()
        self._rank.arena.close(keep_state=keep_state)

    @property
    def closed(self) -> bool:
        """Whether the worker has been ended."""
        return self._worker is None

    @override
    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's ZeRO-2 state with exact master weights and moments, and what else continues this run bit for bit."""
        self.flush()
        state: dict[str, Any] = super().state_dict()
        base = state[BASE_OPTIMIZER_STATE]
        if self._saved is None:
            state[BASE_OPTIMIZER_STATE] = self._host_state.as_saved(base)
        else:
            rank = dist.get_rank(group=self.dp_process_group)
            # Private: cuts off the padding.
            masters = self._get_groups_without_padding([masters for masters, *_ in self._saved.states])
            state[SINGLE_PARTITION_OF_FP32_GROUPS] = masters
            moments = [dict(zip(MOMENTS, of_group, strict=True)) for _, *of_group in self._saved.states]
            of_keys = zip(base["state"].items(), moments, strict=True)
            state[BASE_OPTIMIZER_STATE] = {**base, "state": {key: {**old, **new} for (key, old), new in of_keys}}
            state[PARAM_SLICE_MAPPINGS] = fragments(flat_layouts(self, self._plain_groups()), rank)
        state[CHECKPOINT_KEY] = self.zenflow_step.state_dict()
        return state

    def copy_for_save(self, folder: Path) -> OrderedCopy | None:
        """Disk space for the ranks' states in the order in which plain DeepSpeed has them; None where that is ours.

        Args:
            folder: of the checkpoint.

        Raises:
            OSError: the disk is full.
        """
        layouts = flat_layouts(self, self._plain_groups())
        return None if layouts == self.layouts else OrderedCopy(folder, layouts, n_states=1 + len(MOMENTS))

    @contextmanager
    def saved_as(self, copy: OrderedCopy | None) -> Iterator[None]:
        """Context in which DeepSpeed saves the exact state in its own order; the ranks exchange their parts before.

        Args:
            copy: result of `copy_for_save`.
        """
        if copy is None:
            yield
            return
        self.flush()
        states = [
            [flat.detach(), *(self.optimizer.state[flat][name] for name in MOMENTS)]
            for flat in self.single_partition_of_fp32_groups
        ]
        copy.fill(states, self.layouts, device=self._rank.device, group=self.dp_process_group)
        # Private: the engine saves the parameters' shapes in the order of these groups.
        ours = self.round_robin_bit16_groups
        self._saved, self.round_robin_bit16_groups = copy, self._plain_groups()
        try:
            yield
        finally:
            self._saved, self.round_robin_bit16_groups = None, ours

    @property
    def layouts(self) -> list[FlatLayout]:
        """Layout of each parameter group in training."""
        return flat_layouts(self, self.round_robin_bit16_groups)

    def _plain_groups(self) -> list[list[Tensor]]:
        """The parameters in the order of plain DeepSpeed's flat buffers, with the user's configuration."""
        if not self._is_round_robin:
            return list(self.bit16_groups)
        n_ranks, reorder = dist.get_world_size(group=self.dp_process_group), super()._round_robin_reorder
        return [reorder(group, n_ranks)[0] for group in self.bit16_groups]

    @override
    def load_state_dict(self, state_dict_list: Any, load_optimizer_states: bool = True, **kwargs: Any) -> None:
        """Loads DeepSpeed's ZeRO-2 state into the arena.

        A checkpoint of this strategy with the same configuration and the same ranks continues the run that wrote it; after any other one
        nothing is device-owned until the first step has selected columns.
        """
        self.flush()
        rank = dist.get_rank(group=self.dp_process_group)
        own = state_dict_list[rank] if state_dict_list else None
        if own and load_optimizer_states:
            own = {**own, BASE_OPTIMIZER_STATE: self._host_state.read_moments(own[BASE_OPTIMIZER_STATE])}
            state_dict_list = [*state_dict_list[:rank], own, *state_dict_list[rank + 1 :]]
        super().load_state_dict(state_dict_list, load_optimizer_states=load_optimizer_states, **kwargs)
        count = self._host_state.copy_loaded_state_into_arena()
        saved = own.get(CHECKPOINT_KEY) if own and load_optimizer_states else None
        difference = self.zenflow_step.load_state_dict(saved, count)
        if difference:
            rank_zero_info(
                f"ZenFlow: the checkpoint has AdamW's exact state after {count} steps, but {difference}: the schedule,"
                " the selection of columns and the second moments of provisional updates start again"
            )

    @override
    def destroy(self) -> None:
        """As DeepSpeed's, and ends the worker if an error has not. May be called again."""
        if not self.closed:
            self.close()
        if not self._destroyed:
            self._destroyed = True
            super().destroy()
