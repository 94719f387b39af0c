"""AdamW's state in the arena, as the user's optimizer has it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.core.saved_tensors import saved_as_float32
from lightning_zenflow.worker.arena import Arena
from lightning_zenflow.worker.moments import Moment

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's moments in the state of a flat partition."""


class HostState:
    """Replaces DeepSpeed's flat fp32 partitions and the optimizer's moments by views of the arena, so that DeepSpeed's checkpoint code
    reads and writes the arena.

    Every reader of a checkpoint gets the moments as float32: with 16 bits the file has those of the arena and the call of `Tensor.float`.
    With moments in 8 bits, which DeepSpeed's code cannot read, the optimizer's state has NaN of the right length in their place.

    The state of the user's `optimizer` is created here. `flats` are DeepSpeed's flat fp32 partitions, the optimizer's parameters in its
    order; their values, of any type and on any device, are copied into the arena. `states` has the moments by key, and master weights
    (None), of the whole partition.
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
        """The result of the user's `Optimizer.state_dict`, as a checkpoint holds it. `copied` has for each flat partition copies, the
        moments last; None: the arena's memory is shared.
        """
        moments = copied or [
            [saved_as_float32(self.states[name].read(begin, flat.numel())) for name in MOMENTS]
            for flat, begin in zip(self._flats, self._begins, strict=True)
        ]
        of_keys = {
            key: {**before, **dict(zip(MOMENTS, of_partition[-len(MOMENTS) :], strict=True))}
            for (key, before), of_partition in zip(state["state"].items(), moments, strict=True)
        }
        return {**state, "state": of_keys}

    def load(self, partitions: Sequence[Sequence[Tensor]], *, moments: bool) -> None:
        """Copies for each flat partition master weights, perhaps without padding, and, with `moments`, moments of any type into the arena,
        which rounds them to nearest where it has another type than float32.
        """
        for flat, begin, (master, *of_names) in zip(self._flats, self._begins, partitions, strict=True):
            flat.data.narrow(0, 0, master.numel()).copy_(master.detach())
            for name, values in reversed([*zip(MOMENTS, of_names, strict=True)] if moments else []):
                self.states[name].write(begin, values)
