"""Memory that leaves the device by DeepSpeed's `offload_states` and comes back bit for bit by `reload_states`, between two steps."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, UntypedStorage

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.users_module import is_divided
from lightning_zenflow.training import Training


class Sleep:
    """Memory of one training that has left the device. Storages stay, without memory: all views of them, which DeepSpeed and the components
    of the step hold, are valid again when the storages have memory again, at other addresses. `wake` also undoes an interrupted `begin`.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.away: set[str] = set()
        # By the address of the storage object: the storage, and its bytes in host memory.
        self._storages: dict[int, tuple[UntypedStorage, Tensor]] = {}
        # Calls that undo the rest, the last first.
        self._undo: list[Callable[[], None]] = []

    def begin(self, include: Iterable[OffloadStateTypeEnum] | None) -> set[OffloadStateTypeEnum]:
        """Flushes, and refuses training until `wake`; returns what of `include` leaves the device now. All ranks call it together."""
        steps = self._training.steps
        if steps.is_complete and not steps.was_interrupted:
            raise MisconfigurationException(
                "ZenFlowStrategy: engine.offload_states must not be called between the backward pass of a step's last micro-batch and"
                " `optimizer.step()`, when updates are under way: call it behind the step"
            )
        self._training.flush()
        new = {*(OffloadStateTypeEnum if include is None else include)} - self.away
        # First: training is refused after an interruption.
        self.away.update(new)
        return new

    def release(self, new: set[OffloadStateTypeEnum], parameters: Iterable[Any], *, pin_memory: bool) -> None:
        """Frees the memory of what leaves, behind DeepSpeed's own part. All weights, under stage 3 all pieces, are in host memory then, and
        can be read and written there. Buffers of the module stay on the device, and what has the size of a row or a column. `new` is the
        result of `begin`, `parameters` are all of the module.
        """
        parts = self._training.parts
        if new and new == self.away and (sums := parts.fill.accumulation.release()) is not None:
            self._copy(sums, pin_memory=pin_memory)
        if new & {OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params}:
            parts.residents.release()
            self._undo.append(partial(parts.residents.load, self._training.steps.number))
        if OffloadStateTypeEnum.lp_params in new:
            ownership = parts.ownership
            # Without values, which are the arena's.
            self._undo.append(partial(ownership.load_state_dict, ownership.state_dict()))
            ownership.clear()
            for p in parameters:
                self._copy(p.ds_tensor if is_divided(p) else p, pin_memory=pin_memory)
        # Other streams may not be done with the memory.
        runtime_of(parts.rank.device).synchronize()
        for storage, _ in self._storages.values():
            storage.resize_(0)
        get_accelerator().empty_cache()

    def wake(self) -> None:
        """Ends it, behind DeepSpeed's own part; training goes on as behind a flush. If the device has no room, it can be called again."""
        for storage, copy in self._storages.values():
            storage.resize_(copy.nbytes)
            storage.copy_(copy.untyped_storage())
        # The copies are before later work of all streams.
        runtime_of(self._training.parts.rank.device).synchronize()
        # Columns after the weights.
        for undo in reversed(self._undo):
            undo()
        self.forget()

    def refuse(self, *, reads: Iterable[str] = OffloadStateTypeEnum) -> None:
        """Refuses what reads `reads` on the device, or changes them."""
        if away := self.away & {*reads}:
            raise MisconfigurationException(
                "ZenFlowStrategy: between `engine.offload_states` and `engine.reload_states` no training and no evaluation goes on and no"
                f" checkpoint is loaded, got {', '.join(sorted(away))} away from the device: call `engine.reload_states()` on all ranks"
            )

    def forget(self) -> None:
        """Drops the copies."""
        for memory in (self._storages, self._undo, self.away):
            memory.clear()

    def _copy(self, tensor: Tensor, *, pin_memory: bool) -> None:
        """Copies a tensor's storage, once for all of its tensors, to host memory, which the tensor then shows."""
        runtime, on_device = runtime_of(self._training.parts.rank.device), tensor.data
        storage = on_device.untyped_storage()
        # What a subclass has is not told, and memory that is not torch's is not freed.
        if type(on_device) is not Tensor or tensor.device != runtime.device or not storage.resizable():
            return
        number, shape = storage._cdata, (storage.nbytes(),)  # private: the address
        if number not in self._storages:
            empty = runtime.empty_on_host if pin_memory else partial(torch.empty, device="cpu")
            copy = empty(shape, dtype=torch.uint8)
            copy.untyped_storage().copy_(storage)
            self._storages[number] = storage, copy
        of_host = self._storages[number][1].untyped_storage()
        self._undo.append(partial(setattr, tensor, "data", on_device))
        on_host = torch.empty(0, dtype=tensor.dtype, device="cpu")
        tensor.data = on_host.set_(of_host, tensor.storage_offset(), tensor.shape, tensor.stride())
