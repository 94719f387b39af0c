"""Moves of blocks between their owners, host and device, with `offload_ratio: auto`: by the device memory that steps have needed so far."""

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.offload.columns import Ownership
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.offload.resident import Residents

_log = logging.getLogger(__name__)


class MemoryWatch:
    """What a step has needed at most, and how that grows with its activations. Sizes are bytes of this process on the device.

    Room for residents keeps a reserve, and half of what a step takes and frees again: batches differ. A backward pass is expected to need
    as much above what it begins with as the largest one so far, and in proportion more where it begins with more activations.

    Attributes:
        transient: what the largest step has taken and freed again.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self._persistent = self._before = self._runtime.allocated()[0]
        self._peak = self._rise = self._activations = self.transient = 0

    def begin(self) -> None:
        """Before a backward pass."""
        self._before = self._runtime.allocated()[0]

    def follow_owners(self, n_bytes: int) -> None:
        """Behind a move of owners, which has taken `n_bytes`; a negative number of them has been given back."""
        self._persistent += n_bytes
        self._peak = self._runtime.allocated()[1]

    def end(self) -> None:
        """Behind a step."""
        now, peak = self._runtime.allocated()
        if peak > self._peak:
            self._peak, self._rise = peak, peak - self._before
            self._activations, self.transient = max(0, self._before - self._persistent), peak - now
        self._persistent = now

    def room(self, transient: int | None = None) -> float:
        """What residents may take beside what is there and the largest step, or one of `transient` bytes."""
        step = self.transient if transient is None else transient
        return self._runtime.capacity() - self._runtime.allocated()[0] - 1.5 * step

    def lack(self) -> float:
        """What a backward pass that begins now is expected to lack; not positive: it fits. Half of the reserve may be used."""
        now = self._runtime.allocated()[0]
        growth = max(1.0, (now - self._persistent) / self._activations) if self._activations else 1.0
        return now + self._rise * growth - self._runtime.capacity(reserve=0.5)


class OwnerMoves:
    """Takes blocks where all ranks have decided so (`SchedulePolicy`), behind a flush, and gives them back before a backward pass that
    would not fit beside them, on one rank alone perhaps. `moves`: `offload_ratio` is "auto".

    Attributes:
        memory: what steps need beside the blocks.
        watches: whether device memory is watched, in every step; on a CPU all memory is the host's.
        is_written: whether `take_written` has something to do: set by who changes the exact state right after a flush, in the arena, if all
            of it is there, or by owners.
    """

    def __init__(self, rank: RankState, residents: Residents, ownership: Ownership, *, moves: bool) -> None:
        self._rank, self._residents, self._ownership, self._moves = rank, residents, ownership, moves
        self.memory = MemoryWatch(rank.device)
        self.watches = moves and runtime_of(rank.device).runs_behind
        self.is_written = False

    def shares(self) -> tuple[float, float]:
        """The share of the blocks that the device owns, and the largest that it has room for."""
        n_blocks = max(1, len(self._rank.blocks))
        share = len(self._residents.blocks) / n_blocks
        return share, self._residents.n_fitting(self.memory.room()) / n_blocks if self.watches else share

    def before_backward(self, number: int, count: Tensor, *, can_give_back: bool) -> None:
        """Before a backward pass of the step behind step `number`, the `count`-th applied one."""
        self.memory.begin()
        if self._moves and can_give_back and (lack := self.memory.lack()) > 0:
            n_blocks = self._residents.n_left_without(lack)
            self.give_back(n_blocks, count)
            _log.info(
                "ZenFlow: before step %d offload_ratio=%.2f on this rank: the backward pass is expected to lack %.2f GiB",
                *(number + 1, 1 - n_blocks / len(self._rank.blocks), lack / 2**30),
            )

    @torch.no_grad()
    def take_written(self, number: int) -> None:
        """Gives the device what has been written to the state behind step `number`."""
        if self.is_written:
            self.is_written = False
            if self._residents.in_arena:
                self._residents.load(number)
            self._ownership.reload()

    def write_by_owners(self, number: int) -> None:
        """Before master weights are changed by `RankState.masters_of`: the arena no longer has the residents'."""
        self.take_written(number)
        self._residents.written()

    def take(self, n_blocks: int, number: int) -> None:
        """Makes blocks resident, up to so many in all; right behind the flush of step `number`."""
        before = self._residents.n_bytes
        self._residents.take(n_blocks, number)
        self._ownership.follow_owners()
        self.memory.follow_owners(self._residents.n_bytes - before)

    def take_share(self, share: float, number: int) -> None:
        """As `take`, a share of all blocks."""
        self.take(math.ceil(share * len(self._rank.blocks) - 1e-6), number)

    @torch.no_grad()
    def give_back(self, n_blocks: int, count: Tensor) -> None:
        """Makes the host the owner of all but `n_blocks` blocks, and frees their device memory; with 0 for good."""
        before = self._residents.n_bytes
        self._residents.give_back(n_blocks, int(count))
        self.memory.follow_owners(self._residents.n_bytes - before)

    def state_dict(self) -> dict[str, int]:
        """How many blocks are resident, and the transient bytes of a step beside them; nothing where no owner changes."""
        return {"n_blocks": len(self._residents.blocks), "transient": self.memory.transient} if self._moves else {}

    def load_state_dict(self, state: Mapping[str, int], number: int) -> None:
        """Takes as many blocks as there were, or as the device has room for; right behind the load of step `number`."""
        if self.watches and state:
            self.take(min(state["n_blocks"], self._residents.n_fitting(self.memory.room(state["transient"]))), number)
