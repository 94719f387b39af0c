"""DeepSpeed's ZeRO-2 offload optimizer with the top-k step on the device and everything else deferred to the worker."""

from collections.abc import Callable, Collection
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.partition import row_length
from lightning_zenflow.core.step_inputs import GroupHyperparameters, mean_beta1, step_scale
from lightning_zenflow.schedule.staggered import UpdateSchedule
from lightning_zenflow.step.freezing import Freezing
from lightning_zenflow.step.run_state import CHECKPOINT_KEY
from lightning_zenflow.topk.selector import ColumnSquaredNorms
from lightning_zenflow.worker.cores import WorkerCores
from lightning_zenflow.worker.process import WorkerError
from lightning_zenflow.worker.supervisor import SupervisedWorker
from lightning_zenflow.zero.build import RankState, StepParts
from lightning_zenflow.zero.slices import parameters_in_order, read_slices
from lightning_zenflow.zero.supported import refuse_unsupported
from lightning_zenflow.zero.user_optimizer import read_hyperparameters


class ZenFlowZeroOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no type information
    """ZeRO-2 offload whose optimizer step does not wait for the CPU (ZenFlow, arXiv 2505.12242).

    DeepSpeed keeps its part: flat model weights, gradient buckets and their reduction, checkpoint format, the engine around it. Its
    fp32 partitions and AdamW's moments live in the arena that the worker shares, so DeepSpeed's own checkpoint code sees them as they are.

    During backward every reduced gradient passes through `copy_grads_in_partition`: it goes to the worker's slots (phase *fill* of
    `JobQueue`), and a stand-in for the worker's update moves the weights at once. `step` then runs these phases:

    1. *reduce*: gradients of unused parameters count as zero; the squared norm is added over the ranks.
    2. *clip*: one factor for every weight, on the device; NaN if the step must change nothing.
    3. *seal*: factor and step number follow the gradients to the worker.
    4. *update*: exact AdamW of the device-owned entries.
    5. *select*: at the end of the warm-up, and from time to time after it, the columns with the largest gradients become device-owned;
       each block changes over with its next window.
    6. *hand over*: the windows that close now go to the worker, but for blocks that went there in backward (`BackwardSubmission`).
    7. *publish*: jobs that are due overwrite the host-owned weights; the stand-in repeats what it had moved there for steps after the
       jobs'; device-owned weights are written over them.
    8. *gather*: the ranks exchange their updated weights, as in ZeRO-2.

    Args:
        *args: as `DeepSpeedZeroOptimizer`.
        zenflow: the configuration.
        worker_cores: those of this rank's worker.
        ranks_on_host: ranks that share this host's memory.
        **kwargs: as `DeepSpeedZeroOptimizer`.

    Attributes:
        stalls: where training waited.
        tracer: records what happens in single steps.
        counters: everything that is counted, to be read at any time.
        skipped: 0-D int64 on the device: steps that changed nothing because their gradient norm was not finite.
    """

    overlap_comm: bool  # DeepSpeed's own, declared for the type checker

    def __init__(
        self, *args: Any, zenflow: ZenFlowConfig, worker_cores: WorkerCores, ranks_on_host: int, **kwargs: Any
    ) -> None:
        # DeepSpeed's constructor calls `initialize_optimizer_states`, which needs these.
        self._config = zenflow
        self._worker_cores = worker_cores
        self._ranks_on_host = ranks_on_host
        self._step = 0
        self._flushed_step = 0
        self._groups: list[GroupHyperparameters] | None = None
        self._worker: SupervisedWorker | None = None
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            if not self.closed:
                self.abandon()
            raise
        # DeepSpeed links the moments to the parameters after its own first step; ours exist already.
        self._lazy_init_hp_params_optimizer_state()

    @override
    def initialize_optimizer_states(self) -> None:
        """Replaces DeepSpeed's host buffers by the arena and starts the worker."""
        refuse_unsupported(self)
        # Only the stock offload path needs these buffers of the size of the largest parameter.
        self.temp_grad_buffer_for_cpu_offload = self.temp_grad_buffer_for_gpu_offload = torch.empty(0)
        weights = [
            partitions[dist.get_rank(group=group)].detach()
            for partitions, group in zip(
                self.parallel_partitioned_bit16_groups, self.real_dp_process_group, strict=True
            )
        ]
        parameters = parameters_in_order(self)
        rank_state = RankState(
            optimizer=self.optimizer,
            fp32_groups=self.single_partition_of_fp32_groups,
            partition_sizes=self.partition_size,
            slices=read_slices(self),
            weights=weights,
            dtype=self.dtype,
            names=[self.param_names[p] for p in parameters],
            row_lengths=[row_length(p) for p in parameters],
            group=self.dp_process_group,
        )
        # Where the stock optimizer keeps its weights on their way to the device.
        self.param_buffer_of_bit16_for_cpu_offload_groups: list[Tensor] = []
        parts = StepParts(
            self._config,
            rank_state,
            worker_cores=self._worker_cores,
            ranks_on_host=self._ranks_on_host,
            hyperparameters=self._hyperparameters,
            clips=self.clip_grad > 0 or self.loss_scaler.dynamic,
        )
        self._hands_over_early, self._early = parts.submits_in_backward, parts.early
        self._worker = parts.worker
        self.tracer, self.stalls, self.counters, self.skipped = (
            parts.tracer,
            parts.stalls,
            parts.counters,
            parts.skipped,
        )
        self._arena, self._host_state, self._count = parts.arena, parts.host_state, parts.count
        self._jobs, self._planner, self._ownership = parts.jobs, parts.planner, parts.ownership
        self._provisional, self.router, self._run_state = parts.provisional, parts.router, parts.run_state
        self._freezing = Freezing(parts.partition, parameters)
        self._partition = parts.partition
        self._slice_of_parameter = {s.parameter: i for i, s in enumerate(parts.partition.slices)}
        self._start_over(count=0)
        rank_zero_info(parts.description())

    @override
    def copy_grads_in_partition(self, param: Tensor, group_idx: int | None = None) -> None:
        """Takes a reduced gradient before its bucket is reused."""
        index = self._slice_of_parameter.get(self.get_param_id(param))
        if index is not None:
            s = self._partition.slices[index]
            # One that was unfrozen between two micro-batches waits for the next step.
            if not self._freezing.is_frozen(s.parameter):
                gradient = self.get_gradient_for_reduction(param).detach().view(-1)
                if gradient.shape[0] != s.numel:
                    gradient = gradient.narrow(0, s.start, s.numel)
                last = self.is_gradient_accumulation_boundary()
                self.router.receive(index, gradient, step=self._step + 1, last=last)
        self.clear_grad_attribute(param)

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """Ends a backward pass, without the device synchronisation that DeepSpeed does when communication overlaps."""
        self.reduce_ipg_grads()
        if self.reduction_stream is not None:
            torch.cuda.current_stream().wait_stream(self.reduction_stream)
        # With the buckets empty and the streams ordered, what is left of DeepSpeed's epilogue needs no overlap.
        overlap_comm, self.overlap_comm = self.overlap_comm, False
        try:
            super().independent_gradient_partition_epilogue()
        finally:
            self.overlap_comm = overlap_comm

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One optimizer step; the phases are those of the class docstring."""
        self._step += 1
        step = self._step
        # Read anew: a hook may have changed them after backward.
        self._groups = None
        groups = self._hyperparameters()
        self._early.end(groups)
        self._arena.write_hyperparameters(step, groups)

        # reduce
        sum_of_squares = self.router.finish(step)
        self._add_over_ranks(sum_of_squares)
        # clip
        scale = step_scale(sum_of_squares, max_norm=self.clip_grad, loss_scale=self.loss_scale)
        self._count.add_(scale.finite)
        self.skipped.add_(~scale.finite)
        self._global_grad_norm = scale.norm
        # seal
        self._jobs.seal(step, scale.factor)
        # update
        with self.tracer.span("exact step"):
            self._ownership.step(groups, self._count, scale)
        if self._provisional is not None:
            self._provisional.end_step(scale.factor, scale.finite)
        # select
        max_interval_by_gradients = (
            self._select(self.router.column_norms) if self.router.column_norms is not None else None
        )
        # hand over
        self._ownership.submitted(
            self._jobs.submit_closing(
                step,
                beta1=mean_beta1(groups),
                synchronous=self._plan.synchronous,
                drain=self._ownership.waits,
            )
        )
        # publish
        published = self._jobs.publish(step)
        with self.tracer.span("provisional update"):
            self.router.repeated.published(published)
        self._change_owners(published)
        self._ownership.write_weights()
        # gather
        self._gather()
        self._update_loss_scale(scale.finite)
        # What torch's own Optimizer.step would note; schedulers warn without it that they were stepped first.
        self.optimizer._opt_called = True
        self.stalls.steps += 1
        self._planner.end_step(step, self._plan, max_interval_by_gradients)
        self._prepare_step()

    def start_epoch(self, epoch: int) -> None:
        """Says which epoch the next step belongs to; counts where `select_strategy` is "epoch"."""
        if epoch != self._planner.selector.epoch:
            self._planner.selector.epoch = epoch
            self._prepare_step()

    def follow_freezing(self) -> None:
        """Leaves parameters alone that were frozen, and takes those back in that were unfrozen; between steps, alike on all ranks."""
        if not self._freezing.update():
            return
        self.flush()
        self._jobs.change_ranges(self._freezing.trained_part())
        self._start_over(int(self._count))

    def flush(self) -> None:
        """Makes arena and weights the exact state of all steps so far; afterwards DeepSpeed's checkpoint code sees it.

        Raises:
            WorkerError: the worker is gone, and with it the steps it had not applied yet; or it is ahead of an interrupted backward pass.
        """
        if self._is_exact:
            return
        if self.closed:
            raise WorkerError(
                f"training ended before the worker had applied all of its {self._step} steps: the exact optimizer state is lost"
            )
        if self._jobs.is_ahead:
            # Whoever asks may be on the way out, and nobody would end the worker any more.
            self.abandon()
            raise WorkerError(
                f"the backward pass of step {self._step + 1} was interrupted when the worker had parts of it already, so the exact state"
                f" after step {self._step} is lost; optimizer_in_backward=False keeps it in such a case"
            )
        with torch.no_grad():
            self._jobs.flush(self._step)
            self.router.repeated.clear()
            self._ownership.reload()
            self._ownership.write_weights()
            self._gather()
        # Not the arena's count: on a rank with nothing but padding no round ever counts steps there.
        self._host_state.write_count(int(self._count))
        self._planner.interrupt()
        self._flushed_step = self._step

    def close(self) -> None:
        """Ends the worker and gives the shared memory back.

        An exact state is kept: it stays readable for as long as DeepSpeed's tensors live. Where steps are missing, nothing is.
        """
        if not self._is_exact:
            self.abandon()
            return
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._arena.close(keep_state=True)

    def abandon(self) -> None:
        """Ends the worker at once and gives all of the shared memory back: nobody can use the state. May be called again."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
        self._host_state.clear()
        self._arena.close(keep_state=False)

    @property
    def _is_exact(self) -> bool:
        """Whether the arena is the exact state of all steps so far."""
        return self._flushed_step == self._step and not self._jobs.is_ahead

    @property
    def schedule(self) -> UpdateSchedule:
        """S and d of the next steps."""
        return self._jobs.schedule

    @property
    def worker_pid(self) -> int | None:
        """Process number of the worker; None once it has been ended."""
        return None if self._worker is None else self._worker.pid

    @property
    def worker_cores(self) -> list[int]:
        """Logical cores of the worker."""
        return list(self._worker_cores.cores)

    @property
    def closed(self) -> bool:
        """Whether the worker has been ended."""
        return self._worker is None

    @override
    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's ZeRO-2 state with the exact master weights and moments, and what else continues this run bit for bit."""
        self.flush()
        state: dict[str, Any] = super().state_dict()
        state[CHECKPOINT_KEY] = self._run_state.state_dict(step=self._step, skipped=int(self.skipped))
        return state

    @override
    def load_state_dict(self, state_dict_list: Any, load_optimizer_states: bool = True, **kwargs: Any) -> None:
        """Loads DeepSpeed's ZeRO-2 state, and puts it back into the arena where loading replaced tensors.

        A checkpoint of this strategy with the same configuration and the same ranks continues as the run that wrote it; after any other
        one nothing is device-owned until the first step has selected anew.
        """
        self.flush()
        super().load_state_dict(state_dict_list, load_optimizer_states=load_optimizer_states, **kwargs)
        count = self._host_state.take_back()
        self._count.fill_(count)
        own = state_dict_list[dist.get_rank(group=self.dp_process_group)] if state_dict_list else None
        saved = own.get(CHECKPOINT_KEY) if own and load_optimizer_states else None
        difference = self._run_state.difference(saved) if saved is not None else "it is not one of ZenFlow"
        if saved is not None:
            self._step = self._flushed_step = saved["step"]
            self.skipped.fill_(saved["skipped"])
        self._arena.resolved = (self._step, count)
        self._start_over(count)
        if saved is not None and not difference:
            self._run_state.load_state_dict(saved)
            self._prepare_step()
        else:
            rank_zero_info(
                f"ZenFlow: the checkpoint has AdamW's exact state after {count} steps, but {difference}: columns are selected anew, and"
                " the schedule and the statistics of the stand-in begin anew"
            )

    @override
    def destroy(self) -> None:
        """As DeepSpeed's, and ends the worker. May be called again."""
        if not self.closed:
            self.close()
            super().destroy()

    def _hyperparameters(self) -> list[GroupHyperparameters]:
        """The hyperparameters of the present step; read once in backward and once after it, since the scheduler runs between steps only."""
        if self._groups is None:
            self._groups = read_hyperparameters(self.optimizer)
        return self._groups

    def _start_over(self, count: int) -> None:
        """Begins anew after `count` applied steps: nothing is device-owned until the next selection."""
        self._planner.start_over(self._step, count)
        self._ownership.clear()
        self._prepare_step()

    def _prepare_step(self) -> None:
        """Says what is to be done with the next step's gradients."""
        self._groups = None
        self._plan = self._planner.plan(self._step + 1)
        if self.tracer.needs_alignment:
            with self.stalls.measure("timeline"):
                self.tracer.align()
        self.tracer.begin_step(self._step + 1)
        self.router.stand_in_needed = not self._plan.shows_exact_weights
        self.router.column_norms = self._planner.selector.new_column_norms() if self._plan.measures else None
        # In a step that selects, the windows must end after the selection.
        early = self._jobs.publishes_at_once and not (self._plan.synchronous or self._plan.selects)
        self._early.begin(self._step + 1 if early and self._hands_over_early else None, loss_scale=self.loss_scale)

    def _add_over_ranks(self, values: Tensor) -> None:
        # For a single rank it would change nothing, and yet take as long as all collectives do.
        if dist.get_world_size(group=self.dp_process_group) > 1:
            dist.all_reduce(values, group=self.dp_process_group)

    def _select(self, column_norms: ColumnSquaredNorms) -> Tensor | None:
        """Adds the proxies over the ranks and selects anew where that is due; returns what the gradient rule of `auto` needs."""
        self._add_over_ranks(column_norms.flat)
        max_interval_by_gradients = self._planner.selector.max_interval_by_gradients(
            column_norms, self._config.auto_ratio
        )
        knows_columns = self._planner.selector.n_selections > 0
        if knows_columns:
            self.counters.note_owned_share(self._planner.selector.owned_norm_share(column_norms))
        if self._plan.selects:
            # The host gathers what the new columns need, so it waits for the device; counted as stall.
            with self.stalls.measure("select"):
                columns = self._planner.selector.select(column_norms, self._step)
            if columns is not None:
                self._ownership.select(self._freezing.of_slices(columns))
                self._planner.selected(self._step)
            if not knows_columns:
                self.counters.note_owned_share(self._planner.selector.owned_norm_share(column_norms))
        return max_interval_by_gradients

    def _change_owners(self, published: Collection[int]) -> None:
        """Gives the device the columns of the published blocks that it owns from now on."""
        if self._ownership.changes(published):
            # Their state is gathered by the host, and copied from memory that is not page-locked; counted as stall.
            with self.stalls.measure("select"):
                self._ownership.published(published)

    def _gather(self) -> None:
        all_gather_dp_groups(
            groups_flat=self.bit16_groups_flat,
            partitioned_param_groups=self.parallel_partitioned_bit16_groups,
            dp_process_group=self.real_dp_process_group,
            start_alignment_factor=self.nccl_start_alignment_factor,
            allgather_bucket_size=self.allgather_bucket_size,
        )

    def _update_loss_scale(self, finite: Tensor) -> None:
        """Tells DeepSpeed's loss scaler about overflow; only a dynamic scale (fp16) must know on the host, and waits for it."""
        if self.loss_scaler.dynamic:
            self.overflow = not bool(finite)
            self._update_scale(self.overflow)
