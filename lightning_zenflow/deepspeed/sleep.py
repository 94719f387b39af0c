"""Memory that leaves the device by DeepSpeed's `offload_states` and comes back bit for bit by `reload_states`, between two steps."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor, UntypedStorage
from typing_extensions import override

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.errors import MisconfigurationException, OtherBases
from lightning_zenflow.deepspeed.parameters import is_divided


class Sleep(OtherBases):  # type: ignore[misc]
    """Mixin of `ZenFlowOptimizer`. Storages stay, without memory: all views of them, which DeepSpeed and the components of the step hold,
    are valid again when the storages have memory again, at other addresses. An interrupted call is undone by `reload_states`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Never bound anew: Fabric's wrapper of the optimizer has a copy of its attributes.
        self._away: set[str] = set()
        # By the address of the storage object: the storage, and its bytes in host memory.
        self._storages: dict[int, tuple[UntypedStorage, Tensor]] = {}
        # Calls that undo the rest, the last first.
        self._undo: list[Callable[[], None]] = []
        super().__init__(*args, **kwargs)

    @override
    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Flushes, and frees memory of the device until `reload_states`. All ranks call both together, by DeepSpeed's engine.

        Weights, frozen ones included, are in host memory then (under stage 3 the pieces) and can be read and written there. Master weights
        and moments always are. Buffers of the module stay on the device, and what has the size of a row or a column.

        Args:
            include: "lp_params": weights and the state of device-owned columns; "contiguous_grad_buffer": stage 3's bucket. None: all. Sums
                over micro-batches leave with any of them, and with "lp_grads", which DeepSpeed's engine passes on under stage 2 only.
            device: the CPU.
            pin_memory: whether the host memory is page-locked.
            non_blocking: has no effect: memory is free when the call returns.

        Raises:
            MisconfigurationException: a step has all of its gradients and has not been done.
        """
        if not self._away:
            self._refuse_moved()
        if self.zenflow_step.is_complete and not self.zenflow_step.was_interrupted:
            raise MisconfigurationException(
                "ZenFlowStrategy: engine.offload_states must not be called between the backward pass of a step's last micro-batch and"
                " `optimizer.step()`, when updates are under way: call it behind the step"
            )
        self.flush()
        new, is_first = {*(OffloadStateTypeEnum if include is None else include)} - self._away, not self._away
        # First: training is refused after an interruption.
        self._away.update(new)
        # DeepSpeed's drops what is gathered, and stage 3's buckets.
        super().offload_states(new & {OffloadStateTypeEnum.contiguous_grad_buffer}, device, pin_memory)
        if new and is_first and (sums := self.parts.fill.accumulation.release()) is not None:
            self._copy(sums, pin_memory=pin_memory)
        if OffloadStateTypeEnum.lp_params in new:
            ownership = self.parts.ownership
            # Without values, which are the arena's.
            self._undo.append(partial(ownership.load_state_dict, ownership.state_dict()))
            ownership.clear()
            for p in self.param_names:
                self._copy(p.ds_tensor if is_divided(p) else p, pin_memory=pin_memory)
        # Other streams may not be done with the memory.
        runtime_of(self.parts.rank.device).synchronize()
        for storage, _ in self._storages.values():
            storage.resize_(0)
        get_accelerator().empty_cache()

    @override
    def reload_states(self, non_blocking: bool = False) -> None:
        """Ends `offload_states`; training goes on as behind a flush. Where the device has no room, the call can be repeated.

        `non_blocking` has no effect.
        """
        super().reload_states()
        for storage, copy in self._storages.values():
            storage.resize_(copy.nbytes)
            storage.copy_(copy.untyped_storage())
        # The copies are before later work of all streams.
        runtime_of(self.parts.rank.device).synchronize()
        # Columns after the weights.
        for undo in reversed(self._undo):
            undo()
        self._forget_copies()

    def refuse_asleep(self, *, reads: Iterable[str] = OffloadStateTypeEnum) -> None:
        """Refuses what reads `reads` on the device, or changes them, between `offload_states` and `reload_states`."""
        if away := self._away & {*reads}:
            raise MisconfigurationException(
                "ZenFlowStrategy: between `engine.offload_states` and `engine.reload_states` no training and no evaluation goes on and no"
                f" checkpoint is loaded, got {', '.join(sorted(away))} away from the device: call `engine.reload_states()` on all ranks"
            )

    def _forget_copies(self) -> None:
        for memory in (self._storages, self._undo, self._away):
            memory.clear()

    def _copy(self, tensor: Tensor, *, pin_memory: bool) -> None:
        """Copies a tensor's storage, once for all of its tensors, to host memory, which the tensor then shows."""
        runtime, on_device = runtime_of(self.parts.rank.device), tensor.data
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
