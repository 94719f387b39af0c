"""DeepSpeed's view of the arena: its fp32 partitions and AdamW's moments are tensors there, and so its checkpoint code sees them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zenflow.core.partition import Partition
from lightning_zenflow.worker.arena import Arena


class HostState:
    """Links the user's optimizer, whose parameters are DeepSpeed's flat fp32 partitions, with the arena.

    Args:
        optimizer: the user's; its state is created here.
        flats: for each parameter group, DeepSpeed's flat fp32 partition; its values move into the arena.
        partition: the rank's partition.
        partition_sizes: elements of each flat partition, padding included.
        arena: where the state lives from now on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        flats: Sequence[Tensor],
        *,
        partition: Partition,
        partition_sizes: Sequence[int],
        arena: Arena,
    ) -> None:
        self._optimizer = optimizer
        self._flats = flats
        self._moments: list[dict[str, Tensor]] = []
        for flat, begin, numel in zip(flats, partition.group_begins, partition_sizes, strict=True):
            master = arena.master.narrow(0, begin, numel)
            master.copy_(flat.detach())
            flat.data = master
            # DeepSpeed links fragments of `.grad`; gradients live in the slots, so one zero stands for all elements.
            flat.grad = torch.zeros(1).expand(numel)
            self._moments.append(
                {
                    "exp_avg": arena.exp_avg.narrow(0, begin, numel),
                    "exp_avg_sq": arena.exp_avg_sq.narrow(0, begin, numel),
                }
            )
            optimizer.state[flat] = dict(self._moments[-1])
        self.write_count(0)

    def write_count(self, count: int) -> None:
        """AdamW's `step`, as the user's optimizer writes it into checkpoints."""
        is_tensor = isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW)
        for flat in self._flats:
            self._optimizer.state[flat]["step"] = torch.tensor(float(count)) if is_tensor else count

    def clear(self) -> None:
        """Leaves the user's optimizer without weights and state, rather than with memory that has been given back."""
        for flat in self._flats:
            flat.grad = None
            flat.data = flat.data.new_empty(0)
            self._optimizer.state.pop(flat, None)

    def take_back(self) -> int:
        """After loading, which may have replaced tensors: their values go to the arena, and its tensors to their place.

        Returns:
            The loaded step count.
        """
        count = 0
        for flat, moments in zip(self._flats, self._moments, strict=True):
            state = self._optimizer.state[flat]
            count = int(state["step"])
            for key, ours in moments.items():
                if state[key] is not ours:
                    ours.copy_(state[key])
                    state[key] = ours
        # The loaded one may be a part of a mapped file, which it would hold.
        self.write_count(count)
        return count
