"""Device values that the host reads later, so that it need not wait for them."""

import torch
from torch import Tensor


class LateValues:
    """A copy of a device tensor on its way to host memory, behind the device's work so far.

    Args:
        values: on the device; may be changed afterwards.
    """

    def __init__(self, values: Tensor) -> None:
        on_cuda = values.device.type == "cuda"
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
        self._values.copy_(values, non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if on_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    @property
    def arrived(self) -> bool:
        """Whether they can be read without waiting."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """The values, on the CPU. Waits for those that have not arrived."""
        if self._arrived is not None and not self.arrived:
            self._arrived.synchronize()
        return self._values
