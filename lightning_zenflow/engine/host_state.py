"""Link between DeepSpeed's fp32 partitions, the user's optimizer state and the arena."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.engine.saved_float32 import SavedAsFloat32
from lightning_zenflow.worker.arena import Arena

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's moments in the state of a flat partition."""


class HostState:
    """Replaces DeepSpeed's flat fp32 partitions and the optimizer's moments by views of the arena, so that DeepSpeed's checkpoint code
    reads and writes the arena.

    Every reader of a checkpoint gets the moments as float32.

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
        self._moments: list[dict[str, Tensor]] = []
        for flat, begin in zip(self._flats, partition.group_begins, strict=True):
            numel = flat.numel()
            master = arena.master.narrow(0, begin, numel)
            master.copy_(flat.detach())
            flat.data = master
            # DeepSpeed links fragments of `.grad`. Gradients are in the slots, so a single expanded zero is enough.
            flat.grad = torch.zeros(1).expand(numel)
            moments = {"exp_avg": arena.exp_avg, "exp_avg_sq": arena.exp_avg_sq}
            self._moments.append({name: moment.narrow(0, begin, numel) for name, moment in moments.items()})
            optimizer.state[flat] = dict(self._moments[-1])
        self.write_count(0)

    def write_count(self, count: int) -> None:
        """Writes the number of applied steps as AdamW's `step`, in the form that the user's optimizer has in checkpoints."""
        is_tensor = isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW)
        for flat in self._flats:
            self._optimizer.state[flat]["step"] = torch.tensor(float(count)) if is_tensor else count

    def clear(self) -> None:
        """Removes weights and state from the user's optimizer, before their memory is released."""
        for flat in self._flats:
            flat.grad = None
            flat.data = flat.data.new_empty(0)
            self._optimizer.state.pop(flat, None)

    def as_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The result of the user's `Optimizer.state_dict`, as a checkpoint holds it; it shares the arena's memory."""
        states = {}
        for key, of_group in state["state"].items():
            moments = {name: of_group[name] for name in self._moments[0] if of_group[name].dtype != torch.float32}
            states[key] = {**of_group, **{name: moment.as_subclass(SavedAsFloat32) for name, moment in moments.items()}}
        return {**state, "state": states}

    def read_moments(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Copies saved moments into the arena, before `Optimizer.load_state_dict` would convert whole copies of them to float32.

        A float32 moment is rounded to nearest where the arena has bfloat16. That happens once, so no bias can grow as with every window.

        Args:
            saved: result of the user's `Optimizer.state_dict`.

        Returns:
            The same with empty moments, to be loaded.
        """
        states = dict(saved["state"])
        keys = [key for param_group in saved["param_groups"] for key in param_group["params"]]
        for key, moments in zip(keys, self._moments, strict=True):
            for name, ours in moments.items():
                ours.copy_(states[key][name])
            states[key] = {**states[key], **{name: ours.new_empty(0) for name, ours in moments.items()}}
        return {**saved, "state": states}

    def copy_loaded_state_into_arena(self) -> int:
        """Copies what loading has put in the place of the arena's tensors into the arena, and links the arena's again.

        Returns:
            Loaded number of applied steps.
        """
        count = 0
        for flat, moments in zip(self._flats, self._moments, strict=True):
            state = self._optimizer.state[flat]
            count = int(state["step"])
            for key, ours in moments.items():
                if state[key] is not ours:
                    # Empty ones have been read before.
                    if state[key].numel() > 0:
                        ours.copy_(state[key])
                    state[key] = ours
        # A loaded tensor may be a view of a mapped file, and would keep it open.
        self.write_count(count)
        return count
