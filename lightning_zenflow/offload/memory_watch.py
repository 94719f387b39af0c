"""Device memory of the steps so far: how much resident blocks may take, and whether the next backward pass fits beside them."""

import torch

from lightning_zenflow.core.device import runtime_of


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
