"""AdamW's state in the arena, as DeepSpeed and the user's optimizer find it and as saves have it.

Where a copy for a save would take as much memory again as the states themselves, it is in a file without a name. Moments in fewer bits get
to every reader of a checkpoint's file as float32, DeepSpeed's tools among them: with 16 bits the file has those of the arena and the call
of `Tensor.float`; this package copies such moments to its own arena, and leaves that call out. What torch has no type for is copied to disk
before, as float32.
"""

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack
from typing_extensions import override

from lightning_zenflow.core.partition import Partition
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
        self._optimizer = optimizer
        self._flats = list(flats)
        self.states: dict[str | None, Moment] = dict(
            zip((None, *MOMENTS), (Moment(arena.master), arena.exp_avg, arena.exp_avg_sq), strict=True)
        )
        self._moments = {name: self.states[name] for name in MOMENTS}
        self._bounds = [(begin, flat.numel()) for flat, begin in zip(flats, partition.group_begins, strict=True)]
        for flat, (begin, numel) in zip(self._flats, self._bounds, strict=True):
            master = arena.master.narrow(0, begin, numel)
            master.copy_(flat.detach())
            flat.data = master
            # DeepSpeed links fragments of `.grad`. Gradients are in the slots, so a single expanded zero is enough.
            flat.grad = master.new_zeros(1).expand(numel)
            optimizer.state[flat] = {name: m.stand_in(begin, numel) for name, m in self._moments.items()}
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

    @property
    def has_views(self) -> bool:
        """Whether the arena has the moments in a type of torch."""
        return not isinstance(self._moments[MOMENTS[0]], CodedMoment)

    def read(self, group: int, name: str | None, begin: int, numel: int) -> Tensor:
        """Elements [begin, begin + numel) of a moment of a flat partition, or of its master weights (None), of a floating-point type."""
        return self.states[name].read(self._bounds[group][0] + begin, numel)

    def as_saved(self, state: Mapping[str, Any], copied: Sequence[Sequence[Tensor]] | None) -> dict[str, Any]:
        """The result of the user's `Optimizer.state_dict`, as a checkpoint holds it.

        Args:
            state: the result.
            copied: for each flat partition copies, the moments last; None: the arena's memory is shared.
        """
        moments = copied or [[_as_float32(m.read(*bounds)) for m in self._moments.values()] for bounds in self._bounds]
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
        for flat, (begin, _), (master, *of_names) in zip(self._flats, self._bounds, partitions, strict=True):
            flat.data.narrow(0, 0, master.numel()).copy_(master.detach())
            for moment, values in reversed([*zip(self._moments.values(), of_names, strict=True)] if moments else []):
                moment.write(begin, values)


def _as_float32(moment: Tensor) -> Tensor:
    return moment if moment.dtype == torch.float32 else moment.as_subclass(SavedAsFloat32)


class DiskCopies:
    """Memory of one save's copies: files without a name, mapped, of which the page cache may give memory back to others.

    Args:
        folder: on the file system that is to hold the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: list[tuple[mmap.mmap, range]] = []

    def zeros(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[numel], zeros, on the disk.

        Raises:
            OSError: the disk is full.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        with tempfile.TemporaryFile(dir=self._folder) as file:
            # A write to a page that a full disk has no place for would end the process.
            os.posix_fallocate(file.fileno(), 0, dtype.itemsize * numel)
            # By the descriptor: others who may write in the folder could put another file in the place of one with a name.
            memory = mmap.mmap(file.fileno(), 0)
        copied = torch.frombuffer(memory, dtype=dtype)
        self._mapped.append((memory, range(copied.data_ptr(), copied.data_ptr() + copied.nbytes)))
        return copied

    def has(self, address: int) -> bool:
        """Whether an address is in one of the copies."""
        return any(address in addresses for _, addresses in self._mapped)

    def free(self) -> None:
        """Gives the space back to the disk; all elements are zeros from now on. May be called again.

        Who has an error of a save refers to the copies, and torch's code for files leaves a cycle that does, until a collection.
        """
        for memory, _ in self._mapped:
            # Where a file system has no holes, the collection frees it.
            with suppress(OSError):
                memory.madvise(mmap.MADV_REMOVE)
        self._mapped.clear()


def with_own_storage(part: Tensor) -> Tensor:
    """A contiguous part of a tensor, in its memory, as a tensor whose storage is that part: torch's files hold whole storages."""
    part = part.detach()
    # DLPack forgets the strides of dimensions of one element, by which torch chooses its kernels.
    return from_dlpack(part).as_strided(part.shape, part.stride())


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
