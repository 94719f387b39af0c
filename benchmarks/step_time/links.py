"""The link of the simulated accelerator under stage 3: as on a GPU, a fetch takes time of the link and none of the host's cores."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from deepspeed.runtime.zero import partition_parameters
from torch import Tensor


class HostLink:
    """The link over which a device fetches parameters from host memory: one copy after the other, on a stream of DeepSpeed's, which starts
    them ahead of the layers that need them.

    As on a GPU, the host waits before a layer runs until the stream has done all that was started before, also for layers that come later;
    the device computes meanwhile, if it is asynchronous.

    Args:
        bytes_per_s: of the link.

    Attributes:
        n_bytes: fetched so far.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.n_bytes = 0
        self._bytes_per_s = bytes_per_s
        self._idle_at = 0.0

    def installed(self) -> AbstractContextManager[object]:
        """Context in which fetches take the link's time."""
        # Private: starts the fetch of parameters of which the rank has all.
        start = partition_parameters._no_gather_coalesced

        def started(parameters: Iterable[Any]) -> "_Fetch":
            parameters = list(parameters)
            n_bytes = sum(p.ds_tensor.nbytes for p in parameters)
            self.n_bytes += n_bytes
            self._idle_at = max(self._idle_at, time.perf_counter()) + n_bytes / self._bytes_per_s
            return _Fetch(start(parameters), self._wait)

        return mock.patch.object(partition_parameters, "_no_gather_coalesced", started)

    def _wait(self) -> None:
        time.sleep(max(0.0, self._idle_at - time.perf_counter()))


class _Fetch:
    """DeepSpeed's handle of a fetch."""

    def __init__(self, handle: Any, wait_for_link: Callable[[], None]) -> None:
        self._handle, self._wait_for_link = handle, wait_for_link

    def wait(self, **options: Any) -> None:
        """The host waits; `options` are DeepSpeed's."""
        self._wait_for_link()
        self._handle.wait(**options)


def own_gradients(tensors: Iterable[Tensor], *_: Any) -> list[Tensor]:
    """DeepSpeed's reduction of stage 3 on one rank, which would divide them by one and copy them."""
    return [t.detach().view(-1) for t in tensors]
