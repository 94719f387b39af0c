"""Fetches of parameters in host memory behind the worker's updates: each waits for what the worker has not written yet, where it is needed."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.device import Stream

_WITHOUT_ELEMENTS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "is_cuda", "layout", "requires_grad")),
        *(Tensor.numel, Tensor.size, Tensor.dim, Tensor.stride, Tensor.element_size, Tensor.data_ptr),
        Tensor.data.__set__,  # type: ignore[attr-defined]  # of other memory
    ]
)
"""Functions that neither read nor write a tensor's elements."""


class Piece(Tensor):
    """A rank's piece of a parameter in host memory, as DeepSpeed's `ds_tensor`: every function that may read or write its elements first
    waits for the worker's updates of it. So stale weights are never read, however they are fetched.
    """

    before_use: Callable[[], None]
    """Waits until the worker has written the piece."""

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
            for piece in _pieces_in([args, kwargs or {}]):
                piece.before_use()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _pieces_in(values: Any) -> Iterable[Piece]:
    if isinstance(values, Piece):
        yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _pieces_in(value)


class LateGather:
    """Handle, as DeepSpeed's, of a gather that begins where it is waited for, or as soon as the worker has written all of it.

    Args:
        parameters: not gathered; "in flight" from now on.
        before_use: waits until the worker has written a parameter's piece.
        begin: gathers; returns DeepSpeed's handle.
        dropped: called with each parameter if the gather could not begin.
    """

    def __init__(
        self,
        parameters: list[Any],
        before_use: Callable[[Any], None],
        begin: Callable[[list[Any]], Any],
        dropped: Callable[[Any], None],
    ) -> None:
        self.parameters = parameters
        self._before_use, self._begin, self._dropped = before_use, begin, dropped
        self._handle: Any = None
        for parameter in parameters:
            parameter.ds_status = ZeroParamStatus.INFLIGHT

    def begin(self) -> None:
        """Begins the gather, if it has not begun."""
        if self._handle is not None:
            return
        try:
            # First: the longest wait, which an interrupt cuts most likely.
            for parameter in self.parameters:
                self._before_use(parameter)
            for parameter in self.parameters:
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
            self._handle = self._begin(self.parameters)
        except BaseException:
            for parameter in self.parameters:
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
                self._dropped(parameter)
            raise

    def wait(self, **kwargs: Any) -> None:
        """As DeepSpeed's."""
        self.begin()
        self._handle.wait(**kwargs)


class FetchCoordinator(PartitionedParameterCoordinator):  # type: ignore[misc]  # DeepSpeed has no type information
    """DeepSpeed's coordinator of fetches, whose prefetches do not wait for weights that the worker has not written, while others could be
    fetched and modules could run.

    All ranks gather in the same order, but their workers are not equally fast. So of several ranks, each fetches a parameter for the first
    time after a step where it is needed; one rank, as soon as it is written.

    Private: takes over the state of DeepSpeed's, which is new, and its names, which begin with the name of the class.

    Args:
        deepspeeds: coordinator that it replaces.
        stream: of the fetches.
        before_use: waits until the worker has written a parameter's piece.
        is_written: whether that would not wait.
        one_rank: whether there is one rank only.
    """

    def __init__(
        self,
        deepspeeds: PartitionedParameterCoordinator,
        stream: Stream | None,
        *,
        before_use: Callable[[Any], None],
        is_written: Callable[[Any], bool],
        one_rank: bool,
    ) -> None:
        vars(self).update(vars(deepspeeds))
        self._stream = stream
        self._before_use, self._is_written, self._one_rank = before_use, is_written, one_rank
        self._late: list[LateGather] = []
        self._fetched: set[Any] = set()

    def weights_change(self) -> None:
        """Notes that the worker writes all weights anew: a step has ended."""
        self._fetched.clear()
        self._late.clear()

    def _PartitionedParameterCoordinator__all_gather_params_(  # noqa: N802  # private: begins all fetches
        self, params: Iterable[Any], forward: bool, quantize: bool = False
    ) -> None:
        if self._one_rank:
            for gather in self._late:
                if all(map(self._is_written, gather.parameters)):
                    gather.begin()
        late = [p for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE and not self._is_known(p)]
        at_once = [p for p in params if not any(p is other for other in late)]
        super()._PartitionedParameterCoordinator__all_gather_params_(at_once, forward, quantize)
        if late:
            in_flight = self._PartitionedParameterCoordinator__inflight_param_registry
            self._PartitionedParameterCoordinator__n_available_params += sum(p.ds_numel for p in late)
            gather = LateGather(late, self._before_use, self._gather, lambda p: in_flight.pop(p, None))
            self._late.append(gather)
            in_flight.update(dict.fromkeys(late, gather))

    def _is_known(self, parameter: Any) -> bool:
        if parameter in self._fetched or (self._one_rank and self._is_written(parameter)):
            self._fetched.add(parameter)
            return True
        return False

    def _gather(self, parameters: list[Any]) -> Any:
        self._fetched.update(parameters)
        self._late = [gather for gather in self._late if gather.parameters is not parameters]
        with get_accelerator().stream(self._stream):
            return parameters[0].all_gather_coalesced(parameters)
