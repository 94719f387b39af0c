"""What the user's code finds and does between two steps: weights that it writes in place become master weights, as under a torch optimizer;
in `parameter.grad` stands a mark, from a backward pass to `zero_grad`, of gradients that have been taken in backward; and memory leaves the
device by DeepSpeed's `offload_states` and comes back bit for bit by `reload_states`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor, UntypedStorage
from typing_extensions import Self, override

from lightning_zenflow.core.device import AsyncHostCopy, runtime_of
from lightning_zenflow.core.errors import MisconfigurationException, OtherBases
from lightning_zenflow.deepspeed.parameters import is_divided
from lightning_zenflow.offload.rank_state import RankState

FOLLOWED = 16
"""Steps after the start, and after each write, in which writes through `parameter.data` are looked for in every one."""

_INSTEAD = (
    "under ZenFlowStrategy gradients are taken in backward: read them with `deepspeed.utils.safe_get_full_grad` in"
    " `on_before_optimizer_step`; change them in backward, with `parameter.register_hook(lambda gradient: ...)`; clip them by"
    " `Trainer(gradient_clip_val=...)` or `fabric.clip_gradients(max_norm=...)`; drop those of a whole step with"
    " `optimizer.zero_grad()`; to leave a parameter as it is, call `parameter.requires_grad_(False)` before the forward pass"
)


class WrittenWeights:
    """Notices what the user has written to a model's weights, by torch's counters of writes in place: neither our own writes nor
    DeepSpeed's gathers change those of the parameters, and of the pieces only the end of `GatheredParameters` does.

    Writes through `parameter.data` change no counter. Sums find them, behind flushes and `FOLLOWED` steps, in which the host waits for the
    device, and behind one step in 32 others, in which they are refused when the device is there. All ranks call all methods together.

    Args:
        rank: the rank's weights and master weights.
        names: of all parameters that are trained, in the order in which `Slice.parameter` counts them.
        group: data-parallel ranks.
    """

    def __init__(self, rank: RankState, names: dict[Any, str], *, group: dist.ProcessGroup) -> None:
        self._rank, self._names, self._parameters, self._group = rank, names, list(names), group
        self._n_ranks, self._is_divided = dist.get_world_size(group), any(map(is_divided, names))
        self._slices = {s.parameter: s for s in rank.partition.slices}
        self._followed_until = 0
        self._found = False
        self._kept, self._arrived = dict[int, Tensor](), set[int]()
        self._compared: tuple[AsyncHostCopy, set[int]] | None = None
        self.note()

    def follows(self, step: int) -> bool:
        """Whether a write was shortly before a step. The next one is likely then, and a flush behind the step makes what it meets exact."""
        return step <= self._followed_until

    def note(self, step: int | None = None) -> None:
        """Takes what the model shows now for our own, behind a step, whose gather comes before, or a flush (None)."""
        if step is None:
            self.note_gather()
        self._is_followed = step is None or step <= max(self._followed_until, FOLLOWED)
        # Others by Knuth's multiplicative hash, to meet what is written in every n-th step. In place, counters of pieces tell.
        sums = not self._rank.in_place and (self._is_followed or step * 2654435761 % 2**32 < 2**27)  # type: ignore[operator]
        self._sums = self._sum() if sums else None

    def note_gather(self) -> None:
        """Takes the counters as our own, while our own updates change weights."""
        self._counters, self._arrived = self._read_counters(), set()
        self.begin_updates()

    def note_arrival(self, number: int) -> None:
        """Notes that our own updates may write a parameter from here on in backward; torch refuses to use it then (`raise_late_read`)."""
        self._arrived.add(number)
        torch.autograd.graph.increment_version(self._parameters[number])

    def begin_updates(self) -> None:
        """Notes that our own updates change weights from here on, until `note`."""
        self._sums = None

    def look(self, step: int, *, shows_exact: bool) -> bool:
        """Copies what the user has written since `note`, before a flush overwrites it.

        Args:
            step: number of steps so far.
            shows_exact: whether the model's weights were those of all steps before the user's write.

        Returns:
            Whether there is something for `take_over`, on any rank.

        Raises:
            MisconfigurationException: the write cannot be taken over.
        """
        found, on_any_rank = self._counted(), self._found
        if self._sums is not None:
            differs = self._sum() != self._sums
            if self._is_followed:
                with self._rank.telemetry.measure("flush"):
                    if self._n_ranks > 1:
                        dist.all_reduce(any_differs := differs.any().int(), op=dist.ReduceOp.MAX, group=self._group)
                        on_any_rank |= bool(any_differs)
                    found |= self._numbers(differs)
            else:
                self._compared = AsyncHostCopy(differs), found
        if self._compared is not None and self._compared[0].arrived:
            (copy, seen), self._compared = self._compared, None
            if unseen := self._numbers(copy.read()) - seen:
                self._refuse(
                    unseen,
                    "through `parameter.data`, which goes unnoticed behind most steps: write to the parameter itself,"
                    " under `torch.no_grad()`",
                )
        if found and not shows_exact:
            self._refuse(
                found,
                "in place while updates of it are pending: call `trainer.strategy.flush()` before the first write, or set"
                " update_interval=1 and publish_lag=0",
            )
        # An interruption may come in the copies: a flush must not take what it cuts for noticed.
        self._kept |= {n: self._weights(n).to("cpu", copy=True) for n in self._slices.keys() & found}
        self._found = bool(found) or on_any_rank
        if self._found:
            self._followed_until = step + FOLLOWED
        if found:
            self.note_gather()
        return self._found

    @torch.no_grad()
    def take_over(self) -> bool:
        """Makes what `look` has copied the model's and the master weights, right after a flush; returns whether there was something, on any
        rank. What the user has left as it was keeps its precision there.
        """
        for number, theirs in self._kept.items():
            s = self._slices[number]
            master = self._rank.arena.master.narrow(0, s.begin, s.numel)
            master.copy_(torch.where(theirs == master.to(theirs.dtype), master, theirs.to(master.dtype)))
            self._weights(number).copy_(theirs)
        found, self._found, self._kept = self._found, False, {}
        return found

    def refuse(self) -> None:
        """Refuses writes between backward and step, when updates are under way."""
        if found := self._counted():
            self._refuse(found, "between backward and step: write it in `on_train_batch_start` or `on_train_batch_end`")

    def _counted(self) -> set[int]:
        """Numbers of the parameters whose counters have changed."""
        counters = self._read_counters()
        if counters == self._counters:
            return set()
        written, kept = (
            {i for i, (now, before) in enumerate(zip(*both, strict=True)) if now != before}
            for both in zip(counters, self._counters, strict=True)
        )
        # An arrival counts one, unless an interruption has come before.
        written -= {i for i in self._arrived if counters[0][i] == self._counters[0][i] + 1}
        if not self._is_divided:
            return written
        parameters = self._parameters
        missed = all(p.partition_numel() * (self._n_ranks - 1) >= p.ds_numel for p in (parameters[i] for i in kept))
        if lost := written - kept or (kept if missed else set()):
            instead = (
                "in `deepspeed.zero.GatheredParameters(..., modifier_rank=0)`, and some rank must not have padding only"
            )
            self._refuse(lost, f"under stage=3 but {instead}, or with `deepspeed.utils.safe_set_full_fp32_param`")
        return kept

    def _read_counters(self) -> tuple[list[int], list[int]]:
        counter = attrgetter("_version")  # private: torch's
        pieces = list(map(counter, [p.ds_tensor for p in self._names])) if self._is_divided else []
        return list(map(counter, self._names)), pieces

    def _refuse(self, numbers: set[int], how: str) -> None:
        self.note_gather()  # once: what saves on the exception flushes
        name = list(self._names.values())[min(numbers)]
        raise MisconfigurationException(f"ZenFlowStrategy: {name} must not be written {how}")

    def _numbers(self, differs: Tensor) -> set[int]:
        return {number for number, other in zip(self._slices, differs.tolist(), strict=True) if other}

    def _weights(self, number: int) -> Tensor:
        s = self._slices[number]
        return self._rank.weights_at(s.param_group, s.begin, s.numel)

    def _sum(self) -> Tensor:
        """Sum of the bits of each slice: [slices] int32 on the device."""
        sums = [torch.zeros((), dtype=torch.int32, device=self._rank.device)]
        for weights in map(self._weights, self._slices):
            # A CPU adds 32 bits at the speed of memory, others 50 times slower.
            is_aligned = (weights.storage_offset() | weights.numel()) * weights.itemsize % 4 == 0
            sums.append(weights.view(torch.int32 if is_aligned else torch.int16).sum(dtype=torch.int32))
        return torch.stack(sums)[1:]


class TakenGradient(Tensor):
    """Of the shape and type of a parameter's gradient, with memory for one element; refuses to be read or changed."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> Self:
        """The one for parameters of this shape, type and device."""
        # Private: torch's constructor of subclasses that see operations.
        taken: Self = Tensor._make_subclass(cls, parameter.detach().new_zeros(()).expand(parameter.shape))
        return taken

    # Functions of torch go on to `__torch_dispatch__`; what compiles a module may look at shapes and types.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's documentation has it

    def _refuse(*_: Any, **__: Any) -> NoReturn:
        raise MisconfigurationException(
            f"`parameter.grad` must not be used between backward and `zero_grad`: {_INSTEAD}"
        )

    # Every operation; and what torch refuses in its own name, or answers without one.
    __torch_dispatch__: Any = classmethod(_refuse)
    tolist = numpy = storage = map_ = __array__ = __reduce_ex__ = __format__ = _refuse
    __bool__ = __float__ = __int__ = __index__ = _refuse


class TakenGradients:
    """`TakenGradient` in the parameters of a model, as long as torch would have gradients there.

    Args:
        names: of all parameters that are trained.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = names
        self._of_shape: dict[torch.Size, TakenGradient] = {}
        self._are_put = self._are_shown = False

    def mark(self) -> None:
        """Puts them into the parameters, after a backward pass."""
        # First: who is interrupted below removes what has been put in.
        self._are_put = True
        for p in self._names:
            # Under stage 3 parameters have another shape where they are gathered.
            if p.shape not in self._of_shape:
                self._of_shape[p.shape] = TakenGradient(p)
            p.grad = self._of_shape[p.shape]
        self._are_shown = True

    def show(self) -> None:
        """Ends `hide`."""
        if self._are_put:
            self.mark()

    def hide(self) -> None:
        """Takes them out of the parameters in a forward pass, in which there may be a backward pass of the user's own."""
        if self._are_put:
            self._are_shown = False
            for p in self._names:
                p.grad = None

    def clear(self) -> None:
        """Removes them, before a backward pass and before the parameters are given back."""
        self.hide()
        # Last: who is interrupted before does it again.
        self._are_put = False

    def are_dropped(self, *, pending: bool) -> bool:
        """Whether the user's code has dropped them, by `module.zero_grad()`; refuses others, and some while a step is `pending`."""
        marked = self._names.items() if self._are_shown else ()
        replaced = {name: p.grad for p, name in marked if not isinstance(p.grad, TakenGradient)}
        in_part = 0 < len(replaced) < len(self._names)
        if (pending and in_part) or any(gradient is not None for gradient in replaced.values()):
            raise MisconfigurationException(
                f"{', '.join(replaced)}: `grad` must not be assigned between backward and step: {_INSTEAD}"
            )
        return bool(replaced) and not in_part

    def refuse_accumulation(self) -> None:
        """Refuses gradients that were there before a step's first backward pass, to which torch would add."""
        if any(isinstance(p.grad, TakenGradient) for p in self._names):
            raise MisconfigurationException(
                "`optimizer_zero_grad`, in manual optimization `training_step`, must call `optimizer.zero_grad()` before the first backward"
                " pass of each step: ZenFlowStrategy does not keep gradients of a step that is done; accumulate them before it, with"
                " `Trainer(accumulate_grad_batches=...)` or, in manual optimization, by several backward passes"
            )

    def refuse_second_step(self) -> None:
        """Refuses a step by gradients that a step before has used."""
        if self._are_put:
            raise MisconfigurationException(
                "ZenFlowStrategy: a step must have a backward pass of its own, got a second call of `optimizer.step` behind one"
            )


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
        """Ends `offload_states`; training goes on as behind a flush. Where the device has no room, the call can be repeated. `non_blocking`
        has no effect.
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
