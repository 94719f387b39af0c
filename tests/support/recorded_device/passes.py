"""The passes of `kernels` by torch's operations, each noted as the one launch that it is on a GPU.

The operations within a pass still count for the order, as parts.
"""

from collections.abc import Callable
from typing import Any

from lightning_zenflow.kernels.base import Kernels
from recorded_device.device import RecordedDevice

_OF_PASSES = ("route", "select", "column_writer")
"""Methods that call passes and copy."""


def one_launch_a_pass(device: RecordedDevice) -> Kernels:
    """The kernels of a recorded device."""

    def whole(name: str) -> Callable[..., Any]:
        run = getattr(Kernels, name)

        def noted(self: Kernels, *args: Any, **kwargs: Any) -> Any:
            if device.is_within_pass:
                return run(self, *args, **kwargs)
            with device.one_launch(name):
                return run(self, *args, **kwargs)

        return noted

    passes = [
        name
        for name, value in vars(Kernels).items()
        if callable(value) and name not in _OF_PASSES and not name.startswith("_")
    ]
    made: type[Kernels] = type("OneLaunchKernels", (Kernels,), {name: whole(name) for name in passes})
    return made()
