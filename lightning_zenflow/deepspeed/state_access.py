"""Master weights, moments and gradients of single parameters, for `deepspeed.utils.safe_get_full_*`, `safe_get_local_*` and the like."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.full_state import FullState

_DeepSpeedsOptimizer: Any = object
"""What comes after the mixin in the order of base classes."""


class StateAccess(_DeepSpeedsOptimizer):  # type: ignore[misc]
    """Mixin of stage 3's optimizer: what DeepSpeed's functions call for a parameter, on the arena.

    A whole parameter is read and written by all ranks together, a rank's piece by each rank for itself, after a flush by all of them. None
    is the answer for a parameter that was frozen at setup. Arguments, results and errors are those of `FullState`.
    """

    _full_state: FullState
    _numbers: dict[int, int]
    """Number of each trained parameter, by DeepSpeed's."""

    def _number_of(self, parameter: Any) -> int | None:
        return self._numbers.get(parameter.ds_id)

    @override
    def get_full_hp_param(self, param: Any, optim_state_key: str | None = None) -> Tensor | None:
        number = self._number_of(param)
        return None if number is None else self._full_state.read(number, optim_state_key)

    @override
    def set_full_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if (number := self._number_of(param)) is not None:
            self._full_state.write(number, value, optim_state_key)

    @override
    def get_fp32_grad_for_param(self, param: Any) -> Tensor | None:
        number = self._number_of(param)
        return None if number is None else self._full_state.gradient(number)

    @override
    def set_fp32_grad_for_param(self, value: Tensor, param: Any) -> None:
        if (number := self._number_of(param)) is not None:
            self._full_state.refuse_gradient(number, value)

    set_local_grad_for_param = set_fp32_grad_for_param

    @override
    def get_local_fp32_grad_for_param(self, param: Any) -> Tensor | None:
        """This rank's piece, float32, with its padding."""
        if (number := self._number_of(param)) is None:
            return None
        return _padded(self._full_state.local_gradient(number).to(param.device), param)

    @override
    def get_local_fp32_param(self, param: Any, optim_state_key: str | None = None) -> Tensor | None:
        """This rank's piece, float32, with its padding."""
        if (number := self._number_of(param)) is None:
            return None
        return _padded(self._full_state.read_local(number, optim_state_key), param)

    @override
    def set_local_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if (number := self._number_of(param)) is not None:
            self._full_state.write_local(number, value, optim_state_key)

    @override
    def update_fp32_grad_for_param_vectorized(self, update_func: Callable[..., Any], param_list: list[Any]) -> None:
        for param in param_list:
            self.set_fp32_grad_for_param(param.new_empty(0), param)

    @override
    def offload_states(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it would move weights and states away from where the worker's updates go."""
        raise MisconfigurationException(
            "ZenFlowStrategy does not support engine.offload_states: states are in host memory"
        )


def _padded(part: Tensor, parameter: Any) -> Tensor:
    """A rank's part of a parameter as its piece: [numel of the piece] float32, with zeros behind it."""
    piece = part.new_zeros(parameter.partition_numel(), dtype=torch.float32)
    piece[: part.numel()] = part
    return piece
