"""AdamW's state in the arena, as DeepSpeed and the user's optimizer find it and as saves have it; and what DeepSpeed's code for checkpoints
and this package's call of an optimizer.

Moments in fewer bits get to every reader of a checkpoint's file as float32, DeepSpeed's tools among them: with 16 bits the file has those
of the arena and the call of `Tensor.float`; this package copies such moments to its own arena, and leaves that call out. What torch has no
type for is copied to disk before, as float32.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from operator import methodcaller
from typing import Any, ClassVar, NoReturn, SupportsIndex
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException, OtherBases
from lightning_zenflow.core.partition import Partition
from lightning_zenflow.deepspeed.flat_buffers import DiskCopies, Layout, runs
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.moments import CodedMoment, Moment

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's moments in the state of a flat partition."""


class HostState:
    """Replaces DeepSpeed's flat fp32 partitions and the optimizer's moments by views of the arena, so that DeepSpeed's checkpoint code
    reads and writes the arena.

    Every reader of a checkpoint gets the moments as float32. With moments in 8 bits, which DeepSpeed's code cannot read, the optimizer's
    state has NaN of the right length in their place.

    Args:
        optimizer: the user's optimizer, whose state is created here.
        flats: DeepSpeed's flat fp32 partitions, the optimizer's parameters in its order. Their values, of any type and on any device, are
            copied into the arena.
        partition: of this rank.
        arena: memory of the state from now on.

    Attributes:
        states: moments by key, and master weights (None), of the whole partition.
    """

    def __init__(self, optimizer: Optimizer, flats: Sequence[Tensor], *, partition: Partition, arena: Arena) -> None:
        self._optimizer, self._flats, self._begins = optimizer, list(flats), partition.group_begins
        self.states: dict[str | None, Moment] = {None: Moment(arena.master)}
        self.states.update(zip(MOMENTS, (arena.exp_avg, arena.exp_avg_sq), strict=True))
        for flat, begin in zip(self._flats, self._begins, strict=True):
            numel = flat.numel()
            master = arena.master.narrow(0, begin, numel)
            master.copy_(flat.detach())
            flat.data = master
            # DeepSpeed links fragments of `.grad`. Gradients are in the slots, so a single expanded zero is enough.
            flat.grad = master.new_zeros(1).expand(numel)
            optimizer.state[flat] = {name: self.states[name].stand_in(begin, numel) for name in MOMENTS}
        self.write_count(0)

    def write_count(self, count: int) -> None:
        """Writes the number of applied steps as AdamW's `step`, in the form that the user's optimizer has in checkpoints."""
        is_tensor = isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW)
        for flat in self._flats:
            self._optimizer.state[flat]["step"] = (
                torch.tensor(float(count), dtype=torch.float32, device="cpu") if is_tensor else count
            )

    def clear(self) -> None:
        """Removes weights and state from the user's optimizer, before their memory is released."""
        for flat in self._flats:
            flat.grad = None
            flat.data = flat.data.new_empty(0)
            self._optimizer.state.pop(flat, None)

    def as_saved(self, state: Mapping[str, Any], copied: Sequence[Sequence[Tensor]] | None) -> dict[str, Any]:
        """The result of the user's `Optimizer.state_dict`, as a checkpoint holds it.

        Args:
            state: the result.
            copied: for each flat partition copies, the moments last; None: the arena's memory is shared.
        """
        moments = copied or [
            [_as_float32(self.states[name].read(begin, flat.numel())) for name in MOMENTS]
            for flat, begin in zip(self._flats, self._begins, strict=True)
        ]
        of_keys = {
            key: {**before, **dict(zip(MOMENTS, of_partition[-len(MOMENTS) :], strict=True))}
            for (key, before), of_partition in zip(state["state"].items(), moments, strict=True)
        }
        return {**state, "state": of_keys}

    def load(self, partitions: Sequence[Sequence[Tensor]], *, moments: bool) -> None:
        """Copies loaded states into the arena.

        A float32 moment is rounded to nearest where the arena has another type. That happens once, so no bias can grow as with every
        window. What a run with the same blocks has saved stays as it is.

        Args:
            partitions: for each flat partition master weights, perhaps without padding, and moments, any type.
            moments: whether moments are loaded, too.
        """
        for flat, begin, (master, *of_names) in zip(self._flats, self._begins, partitions, strict=True):
            flat.data.narrow(0, 0, master.numel()).copy_(master.detach())
            for name, values in reversed([*zip(MOMENTS, of_names, strict=True)] if moments else []):
                self.states[name].write(begin, values)


_ranges: "WeakValueDictionary[tuple[int, int], UntypedStorage]" = WeakValueDictionary()
"""Of parts of buffers, by their begin and end: tensors in the same range share them, so that a file has tied weights once."""


@torch.no_grad()
def with_own_storage(part: Tensor) -> Tensor:
    """A part of a tensor, in its memory, as a tensor whose storage is that part: torch's files hold whole storages."""
    storage, itemsize, begin = part.untyped_storage(), part.element_size(), part.storage_offset()
    steps = zip(part.shape, part.stride(), strict=True)
    end = begin + 1 + sum((n - 1) * step for n, step in steps) if part.numel() else begin
    at = int(storage.data_ptr() + begin * itemsize), int(storage.data_ptr() + end * itemsize)
    if (own := _ranges.get(at)) is None:
        own = _ranges[at] = storage[begin * itemsize : end * itemsize]
    alone = torch.empty(0, dtype=part.dtype, device=part.device).set_(own, 0, part.shape, part.stride())
    return alone.requires_grad_(part.requires_grad)


def parts_on_disk(disk: DiskCopies, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors on the disk, all in one file: each file takes a descriptor."""
    sizes = [shape.numel() for shape in shapes.values()]
    parts = zip(shapes.items(), torch.split(disk.zeros(sum(sizes), dtype), sizes), strict=True)
    return {name: with_own_storage(part.view(shape)) for (name, shape), part in parts}


def _as_float32(moment: Tensor) -> Tensor:
    return moment if moment.dtype == torch.float32 else moment.as_subclass(SavedAsFloat32)


class SavedAsFloat32(Tensor):
    """A tensor that is pickled as the call of `Tensor.float` on a tensor of its own type."""

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return methodcaller("float"), (self.as_subclass(Tensor),)


class WithoutConversion(TorchFunctionMode):
    """Context in which `torch.load` leaves such tensors in the type that the file has, mapped."""

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is Tensor.float else function(*args, **(kwargs or {}))


class Checkpointing(OtherBases):  # type: ignore[misc]
    """Mixin of `ZenFlowOptimizer`: saves and loads AdamW's state, which is in the arena, and what else continues the run."""

    state_key: ClassVar[str]
    """Key of AdamW's state in DeepSpeed's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The user's, which DeepSpeed gives other parameters.
        (users,) = (argument for argument in args if isinstance(argument, Optimizer))
        self._of_groups = [list(group["params"]) for group in users.param_groups]
        super().__init__(*args, **kwargs)
        self._flats = self._exchange_params(self._of_groups)
        self._is_read = False
        # During a save its copies, if it has some.
        self._saved: list[list[Tensor]] | None = None
        self._reading = self.optimizer.register_state_dict_pre_hook(self._refuse_reading)

    def _exchange_params(self, of_groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Gives the groups of the user's optimizer other parameters, and returns those that they had."""
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        for group, params in zip(groups, of_groups, strict=True):
            group["params"] = list(params)
        return before

    def _leave_users_optimizer(self) -> None:
        """Of groups that the user has added in training DeepSpeed knows nothing."""
        self._reading.remove()
        del self.optimizer.param_groups[len(self._of_groups) :]

    def _refuse_reading(self, _: Optimizer) -> None:
        if not self._is_read:
            raise MisconfigurationException(
                "ZenFlowStrategy: state_dict of the optimizer from configure_optimizers must not be called in training, when the worker has"
                " AdamW's moments: save a checkpoint, or read them with `deepspeed.utils.safe_get_full_optimizer_state`"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's state with exact master weights and moments, and what else continues this run bit for bit."""
        self.flush()
        self._is_read = True
        # What DeepSpeed has left in the groups, flat partitions, are the keys of the state. Everywhere else the groups have the module's
        # parameters, as the user's code finds them under torch.
        self._exchange_params(self._flats)
        try:
            state: dict[str, Any] = super().state_dict()
        finally:
            self._exchange_params(self._of_groups)
            self._is_read = False
        state[self.state_key] = self._host_state.as_saved(state[self.state_key], self._saved)
        state[CHECKPOINT_KEY] = self.zenflow_step.state_dict()
        return state

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the worker has AdamW's moments."""
        raise MisconfigurationException(
            "ZenFlowStrategy: optimizer.load_state_dict must not be called in training, when the worker has AdamW's moments: continue"
            " from a checkpoint (`fit(ckpt_path=...)`, `fabric.load`), or write single states with"
            " `deepspeed.utils.safe_set_full_optimizer_state`"
        )

    def load_partitions(self, saved: Mapping[str, Any], *, optimizer_states: bool) -> None:
        """Continues from this rank's state in a folder, right after a flush; all ranks call it together.

        A checkpoint of this strategy with the same configuration and the same ranks continues the run that wrote it; after any other one
        nothing is device-owned until the first step has selected columns.

        Args:
            saved: "partitions": for each flat partition master weights and moments, [partition_numel], any type; "attributes" of
                DeepSpeed's optimizer; what else `load_full_state` has.
            optimizer_states: whether the optimizer's state is loaded, and not only weights.
        """
        attributes = saved["attributes"]
        for name, value in attributes.items():
            # One that is fixed is that of the configuration; another precision has another one.
            if "loss_scale" not in name or (attributes["loss_scaler"].dynamic and self.loss_scaler.dynamic):
                setattr(self, name, value)
        self._host_state.load(saved["partitions"], moments=optimizer_states)
        self._continue_from(saved if optimizer_states else None)

    def reset_master_from_model(self) -> None:
        """Makes the model's weights, loaded from elsewhere right after a flush, the master weights; moments stay."""
        # Private: DeepSpeed's own way to do the same with its buffers.
        self._restore_from_bit16_weights()
        self.zenflow_step.start_over(int(self.zenflow_step.count))
        self._gather_weights()
        self._written.note()

    def load_full_state(self, weights: Mapping[str, Tensor], saved: Mapping[str, Any] | None) -> None:
        """Continues from whole states, right after a flush and after the model has loaded its weights; all ranks call it together.

        Args:
            weights: master weights by name, [*shape of the parameter], any type; others stay.
            saved: "count" of applied steps, and "counts" of each parameter's own by name, the same where there is none; "groups" of
                hyperparameters; "moments" by key and name, 0 where there is none; and "zenflow", this rank's `ZenFlowStep.state_dict` or
                None. None: weights only.
        """
        for name, shape in self.full_state.shapes.items():
            if name in weights:
                self.full_state.write(name, weights[name])
            for key, of_names in sorted(({} if saved is None else saved["moments"]).items(), reverse=True):
                moment = of_names.get(name)
                zero = torch.zeros((), dtype=torch.float32, device="cpu").expand(shape)
                self.full_state.write(name, zero if moment is None else moment, key)
        self._continue_from(saved)

    def copy_for_save(self, copies: DiskCopies) -> list[list[Tensor]] | None:
        """Disk space that a save to a folder needs for `saved_as` beside DeepSpeed's files, for all states in another order or for moments
        without views; None: none. In memory the copies would take as much as the states.

        Raises:
            OSError: the disk is full.
        """
        is_reordered = self.saved_layouts != self.layouts
        if not is_reordered and not isinstance(self._host_state.states[MOMENTS[0]], CodedMoment):
            return None
        n_states = is_reordered + len(MOMENTS)
        return [[copies.zeros(layout.partition_numel) for _ in range(n_states)] for layout in self.saved_layouts]

    @contextmanager
    def saved_as(self, copy: Any) -> Iterator[None]:
        """Context in which DeepSpeed saves the exact state, entered and left by all ranks together.

        Args:
            copy: result of `copy_for_save`.
        """
        if copy is not None:
            self.flush()
            for number, (copies, *layouts) in enumerate(zip(copy, self.layouts, self.saved_layouts, strict=True)):
                self._copy_reordered(number, copies, *layouts)
        self._saved = copy
        try:
            yield
        finally:
            self._saved = None

    def _copy_reordered(self, number: int, copies: Sequence[Tensor], source: Layout, target: Layout) -> None:
        """Copies a flat partition's states, of which all ranks have parts, into another order; the moments are the last of them."""
        device, group, begin = self._rank.device, self.dp_process_group, self._rank.partition.group_begins[number]
        rank, states = dist.get_rank(group), list(self._host_state.states.values())[-len(copies) :]
        # The order is that of all ranks, so that none waits for one that waits for it.
        for run, (state, to) in product(runs(source, target), zip(states, copies, strict=True)):
            if rank == run.source_rank:
                values = state.read(begin + run.source_begin, run.numel)
                if rank != run.target_rank:
                    dist.send(values.to(device, torch.float32), group=group, group_dst=run.target_rank)
            if rank == run.target_rank:
                if rank != run.source_rank:
                    values = torch.empty(run.numel, dtype=torch.float32, device=device)
                    dist.recv(values, group=group, group_src=run.source_rank)
                to.narrow(0, run.target_begin, run.numel).copy_(values)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which a state is loaded, entered and left by all ranks together; not while weights have left the device."""
        self.refuse_asleep()
        try:
            yield
        finally:
            # What has been loaded is not the user's write.
            self._written.note()

    @property
    @abstractmethod
    def layouts(self) -> Sequence[Layout]:
        """Layout of each flat partition in training."""

    @property
    def saved_layouts(self) -> Sequence[Layout]:
        """The same in checkpoints, which have DeepSpeed's."""
        return self.layouts

    def _continue_from(self, saved: Mapping[str, Any] | None) -> None:
        """Continues the run of a checkpoint, whose weights and moments are in the arena; see `load_full_state`."""
        count, counts = int(self.zenflow_step.count), None
        if saved is not None:
            count, counts = saved["count"], saved["counts"]
            for group, values in zip(self.optimizer.param_groups, saved["groups"], strict=True):
                # Copied: a tensor may be a view of a mapped file, and would keep it open.
                group.update(deepcopy({key: value for key, value in values.items() if key != "params"}))
        self._host_state.write_count(count)
        run_state = None if saved is None else saved.get(CHECKPOINT_KEY)
        difference = self.zenflow_step.load_state_dict(run_state, count, counts)
        if difference and saved is not None:
            rank_zero_info(
                f"ZenFlow: the checkpoint has AdamW's exact state after {count} steps, but {difference}: the schedule,"
                " the selection of columns and the second moments of provisional updates start again"
            )
