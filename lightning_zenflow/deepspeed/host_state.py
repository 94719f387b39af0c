"""Link between DeepSpeed's fp32 partitions, the user's optimizer state and the arena."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.deepspeed.on_disk import SavedAsFloat32, on_disk
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.moments import CodedMoment, Moment

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's moments in the state of a flat partition."""

_CHUNK = 1 << 24
"""Elements that are decoded at once: 64 MB."""


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
    """

    def __init__(self, optimizer: Optimizer, flats: Sequence[Tensor], *, partition: Partition, arena: Arena) -> None:
        self._optimizer = optimizer
        self._flats = list(flats)
        self._moments: dict[str, Moment] = dict(zip(MOMENTS, (arena.exp_avg, arena.exp_avg_sq), strict=True))
        self._bounds = [(begin, flat.numel()) for flat, begin in zip(flats, partition.group_begins, strict=True)]
        self._saved: Sequence[Mapping[str, Tensor]] | None = None
        self._stand_ins = [
            {name: moment.stand_in(*bounds) for name, moment in self._moments.items()} for bounds in self._bounds
        ]
        for flat, (begin, numel), of_group in zip(self._flats, self._bounds, self._stand_ins, strict=True):
            master = arena.master.narrow(0, begin, numel)
            master.copy_(flat.detach())
            flat.data = master
            # DeepSpeed links fragments of `.grad`. Gradients are in the slots, so a single expanded zero is enough.
            flat.grad = master.new_zeros(1).expand(numel)
            optimizer.state[flat] = dict(of_group)
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
    def is_coded(self) -> bool:
        """Whether moments have no views, and a checkpoint needs a copy of them."""
        return isinstance(self._moments[MOMENTS[0]], CodedMoment)

    def read(self, group: int, name: str, begin: int, numel: int) -> Tensor:
        """Elements [begin, begin + numel) of a moment of a parameter group, of a floating-point type."""
        return self._moments[name].read(self._bounds[group][0] + begin, numel)

    def copy_on_disk(self, folder: Path) -> list[dict[str, Tensor]] | None:
        """Space for the moments of each parameter group as float32, where they have no views."""
        if not self.is_coded:
            return None
        return [{name: on_disk(folder, numel) for name in MOMENTS} for _, numel in self._bounds]

    @contextmanager
    def saved_from(self, copy: list[dict[str, Tensor]] | None) -> Iterator[None]:
        """Context in which `as_saved` has moments from a copy of `copy_on_disk`, which is filled here."""
        for of_group, (begin, numel) in zip(copy or (), self._bounds, strict=False):
            for name, target in of_group.items():
                for first in range(0, numel, _CHUNK):
                    n = min(_CHUNK, numel - first)
                    target[first : first + n] = self._moments[name].read(begin + first, n)
        self._saved = copy
        try:
            yield
        finally:
            self._saved = None

    def as_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The result of the user's `Optimizer.state_dict`, as a checkpoint holds it; it shares the arena's memory if it can."""
        saved = self._saved or [
            {name: _as_float32(moment.read(*bounds)) for name, moment in self._moments.items()}
            for bounds in self._bounds
        ]
        of_keys = zip(state["state"].items(), saved, strict=True)
        return {**state, "state": {key: {**of_group, **moments} for (key, of_group), moments in of_keys}}

    def read_moments(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Copies saved moments into the arena, before `Optimizer.load_state_dict` would convert whole copies of them to float32.

        A float32 moment is rounded to nearest where the arena has another type. That happens once, so no bias can grow as with every
        window. What a run with the same blocks has saved stays as it is.

        Args:
            saved: result of the user's `Optimizer.state_dict`.

        Returns:
            The same with empty moments, to be loaded.
        """
        states = dict(saved["state"])
        keys = [key for param_group in saved["param_groups"] for key in param_group["params"]]
        for key, (begin, _) in zip(keys, self._bounds, strict=True):
            for name, moment in reversed(self._moments.items()):
                moment.write(begin, states[key][name])
            states[key] = {**states[key], **dict.fromkeys(MOMENTS, self._flats[0].new_empty(0))}
        return {**saved, "state": states}

    def copy_loaded_state_into_arena(self) -> int:
        """Copies what loading has put in the place of the arena's tensors into the arena, and links the arena's again.

        Returns:
            Loaded number of applied steps.
        """
        count = 0
        for flat, (begin, _), of_group in zip(self._flats, self._bounds, self._stand_ins, strict=True):
            state = self._optimizer.state[flat]
            count = int(state["step"])
            for name, ours in reversed(of_group.items()):
                # Empty ones have been read before.
                if state[name] is not ours and state[name].numel() > 0:
                    self._moments[name].write(begin, state[name])
                state[name] = ours
        # A loaded tensor may be a view of a mapped file, and would keep it open.
        self.write_count(count)
        return count


def _as_float32(moment: Tensor) -> Tensor:
    return moment if moment.dtype == torch.float32 else moment.as_subclass(SavedAsFloat32)
