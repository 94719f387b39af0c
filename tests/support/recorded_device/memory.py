"""Device memory while a training runs on the recorded device: what the package allocates, and a limit on all allocations."""

import math
from dataclasses import dataclass, field

import torch

_OTHERS = ("strategy.", "session.", "engine.", "stage_1_and_2.", "stage3.")
"""Places whose allocations are the model's and DeepSpeed's."""


@dataclass
class DeviceMemory:
    """Log of live allocations. Memory that only exists within a pass is not counted as the package's: on a GPU a pass works in place."""

    limit: float = math.inf
    """Bytes of all live allocations, whoever made them, beyond which the next one fails as on a full GPU."""
    total: int = 0
    """Bytes of all live allocations."""
    live: int = 0
    """Bytes of the package's."""
    peak: int = 0
    """Most of these since the last `restart`."""
    _sizes: dict[int, tuple[int, bool]] = field(default_factory=dict)  # bytes, whether they are the package's

    def allocate(self, base: int, n_bytes: int, place: str, *, counts: bool) -> None:
        """Notes an allocation at `base`; `counts` is false within a pass.

        Raises:
            torch.OutOfMemoryError: it exceeds the limit.
        """
        is_own = bool(place) and not place.startswith(_OTHERS)
        self._sizes[base] = n_bytes, is_own
        self.total += n_bytes
        self.live += is_own * n_bytes
        if counts:
            self.measure()
        if self.total > self.limit:
            raise torch.OutOfMemoryError(
                f"{self.total} of {self.limit:g} bytes of the recorded device, {n_bytes} in {place}"
            )

    def free(self, base: int) -> None:
        """Notes the end of an allocation."""
        n_bytes, is_own = self._sizes.pop(base)
        self.total -= n_bytes
        self.live -= is_own * n_bytes

    def measure(self) -> None:
        """Compares with the peak."""
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Begins a new peak."""
        self.peak = self.live
