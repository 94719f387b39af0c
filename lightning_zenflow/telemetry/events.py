"""CUDA events, and asynchronous copies to host memory whose completion an event marks."""

import torch
from torch import Tensor


def record_event(*, timing: bool = False) -> torch.cuda.Event:
    """Records a new event on the current CUDA stream, with a timestamp for `elapsed_time` if `timing`."""
    event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
    event.record()
    return event


class AsyncHostCopy:
    """Asynchronous copy of a device tensor to host memory, in order with the current stream.

    On a CUDA device, the copy goes to page-locked memory and an event marks its completion; on a CPU device, it is complete at once.

    Args:
        values: source, on the device. It may be overwritten by work that is enqueued later on the same stream.
    """

    def __init__(self, values: Tensor) -> None:
        on_cuda = values.device.type == "cuda"
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
        self._values.copy_(values, non_blocking=True)
        self._copied = record_event() if on_cuda else None

    @property
    def arrived(self) -> bool:
        """True if `read` returns without waiting."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """Waits for the copy and returns it: a CPU tensor of the source's shape and dtype."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
