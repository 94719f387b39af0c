"""The model's weights between backward and step, when some have been updated and others have not: nothing may use them."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_zenflow.core.errors import Calls, MisconfigurationException


# Private: torch's documented way to see each operation, and its stack of those who do. Neither has a public name.
class WeightsInUpdate(TorchDispatchMode):  # type: ignore[no-untyped-call]  # nor are the methods typed
    """Refuses operations of torch that read or write the weights' memory, from `begin` to `end`, in the thread that calls both: a forward
    pass, a copy, `state_dict`, pickling. An operation that is refused has changed nothing.

    Not seen: what reads the memory without an operation, `tolist` of a weight on the CPU.

    Args:
        weights: flat tensors in whose memory all trained weights are, or this rank's pieces of them.
        names: the trained parameters, for the error.
        piece_of: this rank's piece of a parameter that the ranks divide; None: all parameters are whole.
        calls: the front's, for the error.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        names: Mapping[Tensor, str],
        piece_of: Callable[[Tensor], Tensor] | None,
        calls: Calls,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {_storage(flat) for flat in weights}
        # It may stay on torch's stack when nothing else of the training is left.
        self._names = [(weakref.ref(p), name) for p, name in names.items()]
        self._piece_of, self._calls = piece_of, calls
        self.is_active = self._is_paused = False

    def begin(self) -> None:
        """Refuses from here on."""
        modes = _get_current_dispatch_mode_stack()
        others = [mode for mode in modes if mode is self or not (isinstance(mode, WeightsInUpdate) and mode.is_left)]
        if not others:
            _set_modes([])
            # Compiled code runs as it is written then, and is seen.
            self.__enter__()  # type: ignore[no-untyped-call]
        elif self not in others:
            # Below what the user has entered: torch removes the last one where a `with` ends, whichever that is.
            _set_modes([self, *others])
        self.is_active = True

    def end(self) -> None:
        """Allows all again; may be called at any time."""
        self.is_active = self._is_paused = False
        modes = _get_current_dispatch_mode_stack()
        if modes == [self] and self.old_dispatch_mode_flags:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        elif self in modes:
            _set_modes([mode for mode in modes if mode is not self])

    @property
    def is_left(self) -> bool:
        """Whether it is without effect: ended in another thread, or left by a training that is gone."""
        return not self.is_active or all(p() is None for p, _ in self._names)

    def pause(self) -> None:
        """Allows all until `resume`, for hooks whose result is dropped."""
        self.is_active, self._is_paused = False, self.is_active

    def resume(self) -> None:
        """Ends `pause`."""
        self.is_active, self._is_paused = self._is_paused, False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_left:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and _storage(value) in self._storages:
                    self._refuse(value, "written" if func._schema.is_mutable else "read")
        return func(*args, **kwargs)

    def _refuse(self, used: Tensor, how: str) -> None:
        address = used.data_ptr()
        parameters = ((alive, name) for p, name in self._names if (alive := p()) is not None)
        pieces = ((p if self._piece_of is None else self._piece_of(p), name) for p, name in parameters)
        names = [name for piece, name in pieces if 0 <= address - piece.data_ptr() < max(1, piece.nbytes)]
        raise MisconfigurationException(
            f"{self._calls.front}: {(names or ['a weight'])[0]} must not be {how} between backward and step, by a forward pass or"
            f" otherwise, when some weights are updated and others are not: do it {self._calls.write}; for a step of several micro-batches"
            f" {self._calls.accumulate}; or set update_interval=1 and overlap_step=False, which update weights in the step"
        )


def _set_modes(modes: Sequence[TorchDispatchMode]) -> None:
    """Makes these torch's stack, the last one being asked first."""
    for _ in _get_current_dispatch_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def _storage(tensor: Tensor) -> int | None:
    """Address of the tensor's storage object, whose memory may change; None: there is none."""
    # Private: both. Subclasses and sparse tensors may have no storage.
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None
