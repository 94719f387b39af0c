"""Device memory that operations of the package allocate, while a training runs on the recorded device."""

from dataclasses import dataclass, field

_OTHERS = ("strategy.", "session.", "engine.", "stage_1_and_2.", "stage3.")
"""Places whose allocations are the model's and DeepSpeed's."""


@dataclass
class DeviceMemory:
    """Log of live allocations. Memory that only exists within a pass is not counted: on a GPU a pass works in place."""

    live: int = 0
    """Bytes now."""
    peak: int = 0
    """Most bytes since the last `restart`."""
    _owned: dict[int, tuple[int, str]] = field(default_factory=dict)

    def allocate(self, base: int, n_bytes: int, place: str, *, counts: bool) -> None:
        """Notes an allocation at `base`; `counts` is false within a pass."""
        if place and not place.startswith(_OTHERS):
            self._owned[base] = n_bytes, place
            self.live += n_bytes
            if counts:
                self.measure()

    def free(self, base: int) -> None:
        """Notes the end of an allocation; others than the package's are ignored."""
        self.live -= self._owned.pop(base, (0, ""))[0]

    def measure(self) -> None:
        """Compares with the peak."""
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Begins a new peak."""
        self.peak = self.live

    def by_place(self) -> dict[str, int]:
        """Live bytes of each function that allocated them."""
        found: dict[str, int] = {}
        for n_bytes, place in self._owned.values():
            found[place] = found.get(place, 0) + n_bytes
        return found
