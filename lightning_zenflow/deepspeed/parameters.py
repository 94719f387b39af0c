"""Parameters of the model, one by one: as stage 3 divides them, loaded without gathering, by each rank's own pieces; and their master
weights, moments and gradients on all ranks, for `deepspeed.utils.safe_get_full_*` and the like.

Private attributes of a divided parameter: `ds_shape` (of the whole), `ds_tensor` (this rank's piece, flat, with padding),
`ds_process_group` (of the ranks that share it), `partition_numel` (elements of a piece) and `partition`, which drops gathered weights.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException, OtherBases
from lightning_zenflow.core.partition import Slice
from lightning_zenflow.deepspeed.host_state import with_own_storage
from lightning_zenflow.worker.moments import Moment

if TYPE_CHECKING:
    from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer


def is_divided(parameter: Any) -> bool:
    """Whether stage 3 has divided a parameter."""
    return hasattr(parameter, "ds_tensor")


def is_in_pieces(module: Module) -> bool:
    """Whether stage 3 has divided the module's parameters."""
    return any(map(is_divided, module.parameters()))


def whole_shape(parameter: Tensor) -> torch.Size:
    """Shape of a parameter, also of one of which this rank has a piece only."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def further_names(module: Module) -> dict[str, str]:
    """Further names of the parameters that have several, each with the first."""
    firsts: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first for name, p in named if (first := firsts.setdefault(id(p), name)) != name}


def piece_of(whole: Tensor, parameter: Any) -> Tensor:
    """This rank's piece of a parameter, [elements of a piece]: a part of `whole`, or a copy with zeros as padding."""
    numel, flat = parameter.partition_numel(), whole.reshape(-1)
    begin = min(dist.get_rank(group=parameter.ds_process_group) * numel, flat.numel())
    part = flat[begin : begin + numel]
    return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])


@torch.no_grad()
def load_pieces(module: Module, states: Mapping[str, Any], pieces: Mapping[str, Tensor], *, strict: bool) -> None:
    """Loads into a divided module, and drops what is gathered of it.

    Args:
        module: the module.
        states: its buffers and extra state; of parameters only the names matter.
        pieces: this rank's piece of each parameter that is to be loaded, [elements of a piece], any type.
        strict: whether `states` must have exactly the module's names.

    Raises:
        RuntimeError: as of `Module.load_state_dict`.
    """
    parameters: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    # A parameter is loaded from itself: torch compares the names.
    module.load_state_dict({name: parameters.get(name, value) for name, value in states.items()}, strict=strict)
    for name, piece in pieces.items():
        parameters[name].partition()
        parameters[name].ds_tensor.copy_(piece)


def load_whole(module: Module, states: Mapping[str, Any], *, strict: bool) -> None:
    """`Module.load_state_dict`, also of a divided module, of which each rank takes its pieces.

    Raises:
        RuntimeError: as of `Module.load_state_dict`.
    """
    if not is_in_pieces(module):
        module.load_state_dict(states, strict=strict)
        return
    named: Any = module.named_parameters()
    pieces = {}
    for name, p in named:
        if name not in states:
            continue
        if tuple(states[name].shape) != tuple(p.ds_shape):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: size mismatch for {name}: the shape must be"
                f" {list(p.ds_shape)}, got {list(states[name].shape)}"
            )
        pieces[name] = piece_of(states[name], p)
    load_pieces(module, states, pieces, strict=strict)


class FullState:
    """Reads and writes the state of one parameter on all ranks, in the arena. All methods are collective.

    Args:
        optimizer: the rank's optimizer.
        states: `HostState.states`.
        names: of all parameters that are trained, in the order in which `Slice.parameter` counts them.
        shapes: of the whole parameters, by name.

    Attributes:
        parameters: the parameters by name, in the same order.
        names, shapes: as above.
    """

    def __init__(
        self,
        optimizer: "ZenFlowOptimizer",
        states: Mapping[str | None, Moment],
        names: Mapping[Tensor, str],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        self._optimizer, self._step, self._states = optimizer, optimizer.zenflow_step, states
        self.names, self.shapes = names, shapes
        self.parameters: dict[str, Any] = {name: p for p, name in names.items()}
        in_order = list(self.parameters)
        self._slices = {
            in_order[s.parameter]: (index, s) for index, s in enumerate(optimizer.parts.rank.partition.slices)
        }

    def read(self, name: str, optim_state_key: str | None = None) -> Tensor:
        """Exact state of a parameter after the last step; waits for updates that are pending.

        Args:
            name: of the parameter.
            optim_state_key: None: the weight; "exp_avg" or "exp_avg_sq": a moment.

        Returns:
            [*shape of the parameter] float32, on the parameter's device.

        Raises:
            ValueError: there is no state of this name.
            RuntimeError: the backward pass of a step's last micro-batch has begun, and the step has not been done.
            WorkerError: training was interrupted, and the exact state is lost.
        """
        state = self._exact(name, optim_state_key)
        return self._whole(name, lambda _, s: state.read(s.begin, s.numel))

    def in_memory(self, name: str, optim_state_key: str | None = None) -> Tensor | None:
        """What `read` gives, without a copy, where this rank has all of it in float32: [*shape of the parameter] on the CPU, in the arena's
        memory, exact until the next step; otherwise None. No collective.
        """
        state, shape = self._states[optim_state_key], self.shapes[name]
        if name not in self._slices or state.array.dtype != torch.float32:
            return None
        _, s = self._slices[name]
        part = state.array.narrow(0, s.begin, s.numel)
        return with_own_storage(part.view(shape)) if s.numel == shape.numel() else None

    def write(self, name: str, value: Tensor, optim_state_key: str | None = None) -> None:
        """Replaces the state of a parameter by `value`, of its shape and any type. Other arguments and errors are those of `read`.

        Training goes on with it; the model shows it with the next publish of its blocks, at most S + d steps later.
        """
        state = self._exact(name, optim_state_key)
        if value.shape != (shape := self.shapes[name]):
            raise ValueError(f"the new value of {name} must have the shape {list(shape)}, got {list(value.shape)}")
        if name in self._slices:
            _, s = self._slices[name]
            state.write(s.begin, value.detach().reshape(-1).narrow(0, s.start, s.numel))
        self._step.state_written()

    def gradient(self, name: str) -> Tensor:
        """Gradient of the whole step, averaged over the ranks; before clipping, times the loss scale. Waits for the device.

        Returns:
            [*shape of the parameter] float32, on the parameter's device; zero where the step did not use the parameter.

        Raises:
            ValueError: there is no gradient at this time.
        """
        if not self._step.has_gradients:
            raise ValueError(
                f"safe_get_full_grad({name}): gradients are there after the backward pass of a step's last micro-batch and"
                " before the step: call it in `on_before_optimizer_step`"
            )
        return self._whole(name, lambda index, _: self._optimizer.parts.fill.gradient(index))

    def refuse_gradient(self, name: str, value: Tensor) -> None:
        """Raises RuntimeError, which says where gradients can be changed."""
        raise RuntimeError(
            f"safe_set_full_grad({name}): gradients are taken in backward: change them there, `parameter.register_hook(lambda g: ...)`"
        )

    def shown(self) -> list[str]:
        """Names of the parameters that, right after a flush, show this rank's part of the master weights and no weights of the user's. No
        collective.
        """
        names = []
        for name, p in self.parameters.items():
            if name in self._slices:
                _, s = self._slices[name]
                begin, weights = (0, p.ds_tensor) if is_divided(p) else (s.start, p)
                part = weights.detach().reshape(-1)[begin : begin + s.numel].cpu()
                if not torch.equal(part, self._states[None].read(s.begin, s.numel).to(part.dtype)):
                    continue
            names.append(name)
        return names

    def _exact(self, name: str, key: str | None) -> Moment:
        """A state by its key, exact; `name` is for the error. Errors are those of `read`."""
        # The same on every rank. A flush would drop the step's gradients.
        if self._step.is_complete:
            raise RuntimeError(
                f"safe_get_full_*, safe_set_full_* of {name}: the gradients of a step are there and have not been applied; call it between"
                " steps, as in the Trainer's `on_train_batch_start` or `on_train_batch_end`"
            )
        self._optimizer.flush()
        if key not in self._states:
            raise ValueError(f"optim_state_key must be 'exp_avg' or 'exp_avg_sq', got {key!r}")
        return self._states[key]

    def _whole(self, name: str, part: Callable[[int, Slice], Tensor]) -> Tensor:
        """Puts together what the ranks hold of a parameter."""
        shape, group = self.shapes[name], self._optimizer.dp_process_group
        # NCCL takes the rank's device only, which the parameter has left when training has ended.
        flat = torch.zeros(shape.numel(), dtype=torch.float32, device=self._optimizer.parts.rank.device)
        if name in self._slices:
            index, s = self._slices[name]
            flat.narrow(0, s.start, s.numel).copy_(part(index, s))
        if dist.get_world_size(group) > 1:
            dist.all_reduce(flat, group=group)
        return flat.view(shape).to(self.parameters[name].device)


class StateAccess(OtherBases):  # type: ignore[misc]
    """Mixin of stage 3's optimizer: what DeepSpeed's functions call for a parameter, on the arena.

    None is the answer for a parameter that was frozen at setup. Arguments, results and errors are those of `FullState`.
    """

    full_state: FullState

    @override
    def get_full_hp_param(self, param: Any, optim_state_key: str | None = None) -> Tensor | None:
        name = self.full_state.names.get(param)
        return None if name is None else self.full_state.read(name, optim_state_key)

    @override
    def set_full_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if (name := self.full_state.names.get(param)) is not None:
            self.full_state.write(name, value, optim_state_key)

    @override
    def get_fp32_grad_for_param(self, param: Any) -> Tensor | None:
        name = self.full_state.names.get(param)
        return None if name is None else self.full_state.gradient(name)

    @override
    def set_fp32_grad_for_param(self, value: Tensor, param: Any) -> None:
        if (name := self.full_state.names.get(param)) is not None:
            self.full_state.refuse_gradient(name, value)

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
