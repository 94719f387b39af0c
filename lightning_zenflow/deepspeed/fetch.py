"""Fetches of parameters, those in host memory behind the worker's updates of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload, ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, iter_params
from deepspeed.utils import z3_leaf_module
from torch import Tensor
from torch.nn import Module

# Private: what finds tensors in nested containers.
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.users_module import is_divided
from lightning_zenflow.training import Training

_PROPERTIES = "dtype", "device", "shape", "is_cuda", "layout", "requires_grad", "_version"
_WITHOUT_ELEMENTS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(Tensor.numel, Tensor.size, Tensor.dim, Tensor.stride, Tensor.element_size, Tensor.data_ptr),
    Tensor.data.__set__,  # type: ignore[attr-defined]  # of other memory
}
"""Functions that neither read nor write a tensor's elements."""


class Piece(Tensor):
    """A rank's piece of a parameter in host memory, `ds_tensor`: who may use its elements first waits for the worker's updates."""

    before_use: Callable[[], None]

    @classmethod
    def of(cls, piece: Tensor, before_use: Callable[[], None]) -> "Piece":
        """The same memory and attributes."""
        ours = piece.as_subclass(cls)
        vars(ours).update(vars(piece), before_use=before_use)
        return ours

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WITHOUT_ELEMENTS:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Piece):
                    leaf.before_use()
        # Private. A `with` of torch's would stay in force if an interrupt came between its block and its end.
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})


class Fetched:
    """Handle, as DeepSpeed's, of parameters that one rank copies to the device, or uses where they are. DeepSpeed's own makes the host wait
    for the stream of all fetches; `fetch_sub_module` orders a module's stream behind it anyway.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._parameters = list(parameters)

    def wait(self, **kwargs: Any) -> None:
        """As DeepSpeed's; the host does not wait."""
        for parameter in self._parameters:
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        # Another of them may be dropped before its own call.
        self._parameters.clear()


class FetchCoordinator(PartitionedParameterCoordinator):  # type: ignore[misc]  # DeepSpeed has no type information
    """DeepSpeed's coordinator of fetches. Its trace of a step ends where a module uses other parameters than before: what the user's code
    first reads in a late step becomes an external parameter of the module at work, which DeepSpeed does not expect.

    With parameters in host memory, a prefetch does not wait for weights that the worker has not written. All ranks gather in the same
    order, but their workers are not equally fast: so the gather begins, with several ranks, where the parameter is needed for the first
    time after a step, with one rank as soon as it is written.

    Private: takes over the state of DeepSpeed's, which is new, and its names, which begin with the name of the class. Each parameter in the
    registry is INFLIGHT, has a handle, None where its gather has not begun, and is counted as available.
    """

    # Private: its registry of parameters under way, the modules of its trace, the place there, and the elements that are available.
    _PartitionedParameterCoordinator__inflight_param_registry: Any
    _PartitionedParameterCoordinator__submodule_order: list[Any]
    _PartitionedParameterCoordinator__step_id: int
    _PartitionedParameterCoordinator__n_available_params: int

    def __init__(self, deepspeeds: PartitionedParameterCoordinator, training: Training) -> None:
        self.__dict__.update(vars(deepspeeds))
        # None: the gather has not begun. The registry's dictionary, since the registry itself refuses a second handle.
        self._handles: dict[Any, Any] = self._PartitionedParameterCoordinator__inflight_param_registry.data
        self._training, rank = training, training.parts.rank
        self._one_rank, self._in_host_memory = rank.group is None, rank.in_place
        self._external: list[frozenset[int]] = []  # of the trace
        self.fetched: set[Any] = set()  # since the last step, after which the worker writes all weights anew
        self._needed: frozenset[Any] = frozenset()  # now

    def _slice_in_flight(self, parameter: Any) -> int | None:
        """This rank's slice of a parameter in host memory, which the worker may write; None: it is frozen or all padding here."""
        may_be_written = self._in_host_memory and not self._training.closed
        return self._training.slice_of.get(parameter) if may_be_written else None

    def before_use(self, parameter: Any) -> None:
        """Waits until the worker has written this rank's piece of a parameter."""
        if (index := self._slice_in_flight(parameter)) is not None:
            self._training.parts.jobs.await_slice(index)

    def _is_written(self, parameter: Any) -> bool:
        index = self._slice_in_flight(parameter)
        return index is None or self._training.parts.jobs.is_written(index)

    @property
    def _late(self) -> list[Any]:
        """Parameters whose gathers have not begun."""
        return [parameter for parameter, handle in self._handles.items() if handle is None]

    @override
    def construct_parameter_trace_from_module_trace(self) -> None:
        super().construct_parameter_trace_from_module_trace()
        modules = self._PartitionedParameterCoordinator__submodule_order  # private: of the trace
        self._external = [frozenset(module._external_params) for module in modules]

    @override
    def trace_prologue(self, sub_module: Any) -> None:
        super().trace_prologue(sub_module)
        step = self._PartitionedParameterCoordinator__step_id  # private: place in the trace
        external: Any = sub_module._external_params  # private: by their identity
        if self.is_complete_trace() and external.keys() != self._external[step]:
            # Private: as `trace_prologue` does for another module.
            self._invalidate_trace()

    @override
    def release_and_reset_all(self, module: Module) -> None:
        divided = list(filter(is_divided, iter_params(module, recurse=True)))
        in_flight = [p for p in divided if p.ds_status == ZeroParamStatus.INFLIGHT]
        # An interrupt has cut the fetches of those that are not in the registry.
        self._drop([*self._late, *(p for p in in_flight if p not in self._handles)])
        for parameter in divided:
            if parameter in self._handles:
                self._handles.pop(parameter).wait()
            parameter.ds_active_sub_modules.clear()
            self._PartitionedParameterCoordinator__release_param(parameter)  # private: drops what is gathered

    @override
    def _clean_inflight_param_registry(self) -> None:
        # Private: waits for what has been prefetched and is not needed, one by one, in an order that differs from rank to rank.
        self._drop(self._late)
        super()._clean_inflight_param_registry()

    @override
    def fetch_sub_module(self, current_submodule: Module, forward: bool) -> None:
        self._needed = frozenset(iter_params(current_submodule, recurse=z3_leaf_module(current_submodule)))
        self._begin([p for p in self._late if p in self._needed], forward)
        if self._one_rank:
            self._begin([p for p in self._late if self._is_written(p)], forward)
        super().fetch_sub_module(current_submodule, forward)

    def _PartitionedParameterCoordinator__all_gather_params_(  # private: begins all fetches
        self, params: Iterable[Any], forward: bool, quantize: bool = False
    ) -> None:
        at_once: list[Any] = []
        late: list[Any] = []
        for parameter in params:
            if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                is_known = parameter in self.fetched or (self._one_rank and self._is_written(parameter))
                (at_once if is_known or parameter in self._needed else late).append(parameter)
        for parameter in at_once:
            # Before their status changes, so that an interrupt of the wait leaves them as they were.
            self.before_use(parameter)
        super()._PartitionedParameterCoordinator__all_gather_params_(at_once, forward, quantize)
        if self._one_rank:
            self._handles.update(dict.fromkeys(at_once, handle := Fetched(at_once)))
        if self._one_rank and not self._in_host_memory:
            # There is no copy whose end DeepSpeed's bound of the fetches under way could make the host wait for.
            handle.wait()
            for parameter in at_once:
                del self._handles[parameter]
        self.fetched.update(at_once)
        for parameter in late:
            parameter.ds_status = ZeroParamStatus.INFLIGHT
            self._handles[parameter] = None
            self._PartitionedParameterCoordinator__n_available_params += parameter.ds_numel

    def _begin(self, parameters: list[Any], forward: bool) -> None:
        """Begins late gathers, as one."""
        self._drop(parameters)
        # It counts them again.
        self._PartitionedParameterCoordinator__n_available_params -= sum(p.ds_numel for p in parameters)
        self._PartitionedParameterCoordinator__all_gather_params_(parameters, forward)

    def _drop(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
            self._handles.pop(parameter, None)


def _refuse_transforms(module: Module) -> None:
    """Refuses transforms of `torch.func`, in which what DeepSpeed does for a module ends in errors of torch, or the end of the process."""
    # Private: of the transforms that are under way.
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise MisconfigurationException(
            f"ZenFlowStrategy: {type(module).__name__} must not run in a transform of `torch.func` (vmap, grad, jacrev, ...) with stage=3,"
            " whose hooks of modules do not take it: use stage=2, or `torch.autograd.grad(..., create_graph=True)`"
        )


class _Parameters(ZeROOrderedDict):  # type: ignore[misc]
    """DeepSpeed's parameters of a module, which gathers what is read in a forward pass."""

    _in_forward: bool
    _parent_module: Module

    @override
    def __getitem__(self, key: str) -> Any:
        parameter: Any = dict.__getitem__(self, key)
        if getattr(parameter, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE and self._in_forward:
            _refuse_transforms(self._parent_module)
        return super().__getitem__(key)


class Offload(DeepSpeedZeRoOffload):  # type: ignore[misc]
    """DeepSpeed's division of a model, and its hooks of modules. A first parameter of integers is not taken for the type of the weights."""

    module: Module

    def __init__(self, module: Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        for part in module.modules():
            part._parameters = _Parameters(part, part._parameters)

    @override
    def _convert_to_zero_parameters(self, ds_config: Any, module: Module, mpu: Any) -> None:
        self.dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
        scalars = [name for name, p in module.named_parameters() if p.dim() == 0]
        if scalars:
            raise MisconfigurationException(
                f"ZenFlowStrategy: parameters must have a dimension under stage 3, got the scalar {scalars[0]}: DeepSpeed cannot"
                " gather it; give it the shape [1], or use stage 2"
            )
        super()._convert_to_zero_parameters(ds_config, module, mpu)

    @override
    def partition_all_parameters(self) -> None:
        """As DeepSpeed's; a module that a callback has added since the set-up keeps its whole parameters."""
        self.get_param_coordinator().release_and_reset_all(self.module)

    @override
    def pre_sub_module_forward_function(self, sub_module: Module) -> None:
        _refuse_transforms(sub_module)
        if not all(map(is_divided, sub_module.parameters(recurse=z3_leaf_module(sub_module)))):
            raise MisconfigurationException(
                f"ZenFlowStrategy: {type(sub_module).__name__} must run with its own parameters with stage=3, got others, as by"
                " `torch.func.functional_call`: use stage=2"
            )
        super().pre_sub_module_forward_function(sub_module)

    @override
    def post_sub_module_backward_function(self, sub_module: Module) -> None:
        if torch.is_grad_enabled():
            # With `create_graph=True` the backward pass through this one reads the weights again: they stay until the end of the step, as
            # with a module, -1, at work.
            for parameter in iter_params(sub_module, recurse=z3_leaf_module(sub_module)):
                parameter.ds_active_sub_modules.add(-1)
        else:
            super().post_sub_module_backward_function(sub_module)
