"""DeepSpeed's ZeRO-3 offload optimizer around `ZenFlowStep`, with parameters on the device or in host memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import deepspeed.comm as dist

# Before the name in `stage3_module` is replaced: it has a subclass of the class.
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
import deepspeed.runtime.zero.stage3 as stage3_module
import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.device import Stream, runtime_of
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from lightning_zenflow.deepspeed.fetch import FetchCoordinator, Fetched, Offload, Piece
from lightning_zenflow.deepspeed.flat_buffers import Layout
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.users_module import in_pieces
from lightning_zenflow.deepspeed.users_objects import check_inputs_of_leaf_modules, refuse_features_of_stage_3


def _without_memory(flat: Tensor) -> Tensor:
    """A tensor of the same length and type that takes no memory. It is NaN, so that a model whose construction fails is not used again."""
    return flat.new_full((1,), torch.nan).expand(flat.numel())


class ZenFlowZero3Optimizer(ZenFlowOptimizer, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]  # DeepSpeed has no type information
    """ZeRO stage 3 under ZenFlow: each rank has a piece of every parameter, and its optimizer state.

    DeepSpeed gathers the weights of a module before it runs and drops them after it. What is published goes to the rank's pieces, so no
    gather ends a step; small parameters, which DeepSpeed keeps gathered, are gathered again. With `offload_param` the pieces are in host
    memory: in the arena, until training ends, where the worker writes them and DeepSpeed fetches them behind its answers (`Piece`).

    Private: DeepSpeed's constructor calls `initialize_ds_offload`, `_create_param_groups_fp16_flat_cpu_memory` (with `offload_param`),
    `_setup_for_real_optimizer` and `create_reduce_and_remove_grad_hooks`, in this order.
    """

    namespace = stage3_module
    state_key = OPTIMIZER_STATE_DICT
    # DeepSpeed's own.
    module: Any  # its parameters have attributes of DeepSpeed's
    dtype: torch.dtype
    offload_param: bool
    parameter_offload: DeepSpeedZeRoOffload
    trainable_param_groups: list[dict[str, Any]]
    fp16_groups: list[list[Any]]
    fp16_partitioned_groups: list[list[Tensor]]
    fp16_partitioned_groups_flat: list[Tensor]
    fp32_partitioned_groups_flat: list[Tensor]
    param_groups_fp16_flat_cpu_memory: list[Tensor]
    persistent_parameters: list[Any]
    sub_group_to_group_id: dict[int, int]
    reduce_bucket_size: int
    reduce_and_partition_stream: Stream | None

    def __init__(self, *args: Any, ds_config: dict[str, Any], **kwargs: Any) -> None:
        # DeepSpeed itself reads it under stage 1 and 2 only.
        self.ignore_unused_parameters = ds_config["zero_optimization"].get("ignore_unused_parameters", True)
        super().__init__(*args, ds_config=ds_config, **kwargs)
        in_pieces.add(self)

    @override
    def initialize_ds_offload(self, **options: Any) -> DeepSpeedZeRoOffload:
        return Offload(**options)

    @override
    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        """Makes the memory to which each group's pieces move first; not page-locked, since torch would keep it when they move on."""
        self.param_groups_fp16_flat_cpu_memory = [
            torch.empty(sum(p.partition_numel() for p in group["params"]), dtype=self.dtype, device="cpu")
            for group in self.trainable_param_groups
        ]

    @override
    def _setup_for_real_optimizer(self) -> None:
        """Makes the state, without DeepSpeed's buffers for gradients in host memory: 4 and 2 bytes a parameter."""
        refuse_features_of_stage_3(self)
        # Private: copies the weights to `fp32_partitioned_groups_flat`.
        self._create_fp32_partitions()
        self._start_training(
            masters=self.fp32_partitioned_groups_flat,
            # In place, memory of their own would be held until the worker has started.
            weights=[
                _without_memory(f) if self.offload_param else f.detach() for f in self.fp16_partitioned_groups_flat
            ],
            piece_of=lambda parameter: getattr(parameter, "ds_tensor", parameter),
            in_place=self.offload_param,
            release_weights=lambda: self._use_memory_of(list(map(_without_memory, self.fp16_partitioned_groups_flat))),
        )
        coordinator = FetchCoordinator(self.parameter_offload.param_coordinator, self.training)
        self.parameter_offload.param_coordinator = coordinator
        if self.offload_param:
            self._use_memory_of(self.training.parts.rank.weights)
            arena, trained = self.training.parts.rank.arena, self.training.full_state.names
            for parameter in self.module.parameters():
                # Never trained. One after the other: the host's free memory has been checked.
                if parameter not in trained and parameter.ds_tensor.device.type == "cpu":
                    parameter.ds_tensor.data = arena.page_locked_copy(parameter.ds_tensor.data)
            for sub_group, pieces in zip(self.fp16_groups, self.fp16_partitioned_groups, strict=True):
                for index, parameter in enumerate(sub_group):
                    wait = partial(coordinator.before_use, parameter)
                    parameter.ds_tensor = pieces[index] = Piece.of(pieces[index], wait)
        for dtype, bucket in self.ipg_buckets.items():
            bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=self.training.parts.rank.device)

    @override
    def _create_fp32_partitions(self) -> None:
        """With `offload_param` the flat partitions are the weights until `HostState` copies them to the arena, and no copies in float32."""
        if not self.offload_param:
            super()._create_fp32_partitions()
            return
        self.fp32_partitioned_groups_flat = [f.detach().requires_grad_() for f in self.fp16_partitioned_groups_flat]
        for group in self.optimizer.param_groups:
            group["params"] = []

    @override
    def create_reduce_and_remove_grad_hooks(self) -> None:
        super().create_reduce_and_remove_grad_hooks()
        # Private: DeepSpeed's list of those that `destroy` removes.
        self._leaf_module_hooks += check_inputs_of_leaf_modules(self.module)

    def _use_memory_of(self, flats: Sequence[Tensor]) -> None:
        """Makes this the memory of the rank's pieces; drops the one before."""
        self.fp16_partitioned_groups_flat = [flat.detach() for flat in flats]
        # Private: DeepSpeed's flat copy in host memory of each parameter group.
        self.param_groups_fp16_flat_cpu_memory = []
        for index in range(len(self.fp16_groups)):
            # Private: makes each piece a view of the flat partition.
            self._unflatten_partitioned_parameters(index)

    @override
    def has_ended(self) -> None:
        # What an interrupted pass has gathered; other ranks may have ended.
        with suppress(RuntimeError):
            self._partition_all_parameters()

    @override
    def _forget_weights(self) -> None:
        super()._forget_weights()
        self.fp16_partitioned_groups_flat = []
        # Private: the memory of them all.
        self.lp_param_buffer: Tensor | None = None

    @override
    def take_weights(self) -> None:
        if not self.offload_param:
            return
        rank = self.training.parts.rank
        self._use_memory_of([flat.clone() for flat in rank.weights])
        freed = rank.arena.publish.untyped_storage().data_ptr()
        for parameter in self.training.full_state.names:
            # On a CPU with one rank, what DeepSpeed gathers of a parameter is its piece.
            if parameter.untyped_storage().data_ptr() == freed:
                parameter.data = parameter.data.clone()

    @override
    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> None:
        """Routes this rank's pieces of reduced gradients, on the stream of the reduction, before their bucket is reused."""
        rank, last = self.training.parts.rank, self.is_gradient_accumulation_boundary()
        runtime = runtime_of(rank.device)
        for parameter, piece in zip(params_to_release, grad_partitions, strict=True):
            index = self.training.slice_of.get(parameter)
            if index is not None:
                if last and self.training.in_backward and index in self.training.parts.fill.arrived:
                    # The first may have been applied.
                    raise MisconfigurationException(
                        f"ZenFlowStrategy: {self.param_names[parameter]} must have one gradient in a backward pass with stage=3, got a"
                        " second: it is used more than once, and at least once in re-entrant checkpointing, which is a backward pass of its"
                        " own, or in a leaf module that runs more than once; use torch.utils.checkpoint with use_reentrant=False"
                    )
                numel = rank.partition.slices[index].numel
                self.training.receive(index, piece.detach().view(-1).narrow(0, 0, numel), last=last)
            if parameter.grad is not None:
                # One that is too large for the bucket was allocated on the training stream.
                runtime.keep_for(runtime.current_stream(), parameter.grad)
            parameter.grad = None
        # The pieces may lie in the bucket, which is filled again on this stream, or be freed for it to use again. DeepSpeed makes the host
        # wait for it two buckets later, which bounds the memory of gradients on their way. The training stream does not wait.
        rank.d2h.join()

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """Ends a backward pass, without DeepSpeed's wait of the host for the stream of the reduction."""
        for dtype in self.ipg_buckets:
            # Private: reduces the gradients of a bucket, and calls `partition_grads`.
            self._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)
        self._wait_for(self.reduce_and_partition_stream)

    @override
    def read_groups(self) -> list[GroupHyperparameters]:
        groups = super().read_groups()
        return [groups[self.sub_group_to_group_id[index]] for index in range(len(self.fp16_groups))]

    @override
    def _step(self) -> None:
        # Private: DeepSpeed's own begin of a step, which empties buckets that an interrupted backward pass has left.
        self._pre_step()
        self.join_reads()
        super()._step()

    @property
    def fetches(self) -> Stream | None:
        """Stream on which DeepSpeed gathers weights; None where the device does not run behind the host. After a wrong prediction there may
        be fetches that no module has waited for: writes to the pieces are ordered behind them.
        """
        # Private.
        stream: Stream | None = self.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
        return stream

    @override
    def join_reads(self) -> None:
        self._wait_for(self.fetches)

    @override
    def gather_weights(self) -> None:
        """Drops gathered weights, gathers those anew that stay gathered, and orders later fetches behind the new weights: DeepSpeed's
        stream of fetches never waits for the training stream, since its own step makes the host wait for the device. One rank uses its
        pieces in place. Those in host memory are gathered where they are used next, since the worker may not have written them.
        """
        if self.training.closed:
            return
        # Private: drops what is gathered of every parameter.
        self._partition_all_parameters()
        if self.offload_param:
            self.parameter_offload.param_coordinator.fetched.clear()
            return
        one_rank = dist.get_world_size(group=self.dp_process_group) == 1
        if persistent := self.persistent_parameters:
            # Private: as a fetch does. `all_gather`, which DeepSpeed's own step calls, makes the host wait for the device.
            handle = persistent[0].all_gather_coalesced(persistent)
            (Fetched(persistent) if one_rank else handle).wait()
        if self.fetches is not None and not one_rank:
            self.fetches.wait_stream(runtime_of(self.training.parts.rank.device).current_stream())

    @override
    def load_partitions(self, saved: Mapping[str, Any], *, optimizer_states: bool) -> None:
        super().load_partitions(saved, optimizer_states=optimizer_states)
        # Which the module has not loaded. By `data`, so that they do not count as the user's writes.
        for weights, master in zip(self.fp16_partitioned_groups_flat, self.fp32_partitioned_groups_flat, strict=True):
            weights.data.copy_(master.data)

    @override
    @contextmanager
    def gathered(self) -> Iterator[None]:
        with super().gathered(), ExitStack() as end:
            # Also where it fails on some ranks only.
            end.callback(self.gather_weights)
            yield

    @override
    @contextmanager
    def loading(self) -> Iterator[None]:
        # As DeepSpeed's engine: drops what is gathered.
        self.checkpoint_event_prologue()
        with super().loading(), ExitStack() as end:
            end.callback(self.gather_weights)
            yield

    @override
    def checkpoint_event_prologue(self) -> None:
        """As DeepSpeed's, which drops what is gathered; nothing after the end of training, when all is dropped."""
        if not self.training.closed:
            super().checkpoint_event_prologue()

    @override
    def checkpoint_event_epilogue(self) -> None:
        """Nothing: the contexts of saves and loads gather at their end, and what is not gathered is where it is used."""

    @property
    @override
    def layouts(self) -> list[Layout]:
        n_ranks = dist.get_world_size(group=self.dp_process_group)
        return [
            Layout.of_pieces({self.param_names[p]: p.ds_numel for p in g}, n_ranks=n_ranks) for g in self.fp16_groups
        ]

    # What DeepSpeed's functions call for a parameter.

    def _of(self, param: Any, method: Callable[..., Tensor | None], *args: Any) -> Tensor | None:
        """A method of `FullState`; None, DeepSpeed's answer, for a parameter that was frozen at setup."""
        name = self.training.full_state.names.get(param)
        return None if name is None else method(name, *args)

    @override
    def get_full_hp_param(self, param: Any, optim_state_key: str | None = None) -> Tensor | None:
        return self._of(param, self.training.full_state.read, optim_state_key)

    @override
    def set_full_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        self._of(param, self.training.full_state.write, value, optim_state_key)

    @override
    def get_fp32_grad_for_param(self, param: Any) -> Tensor | None:
        return self._of(param, self.training.full_state.gradient)

    @override
    def set_fp32_grad_for_param(self, value: Tensor, param: Any) -> None:
        self._of(param, self.training.full_state.refuse_gradient, value)

    set_local_grad_for_param = set_fp32_grad_for_param

    @override
    def get_local_fp32_param(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: DeepSpeed's own code reads and writes partitions that may be some updates behind."""
        raise MisconfigurationException(
            "ZenFlowStrategy does not support safe_get_local_* and safe_set_local_*: use safe_get_full_* and safe_set_full_*"
        )

    get_local_fp32_grad_for_param = set_local_hp_param = get_local_fp32_param

    @override
    def update_fp32_grad_for_param_vectorized(self, update_func: Callable[..., Any], param_list: list[Any]) -> None:
        for param in param_list:
            self.set_fp32_grad_for_param(param.new_empty(0), param)
