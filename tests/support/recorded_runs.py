"""Runs cases of `harness` on a recorded device."""

from dataclasses import replace

from torch import Tensor

import harness
from benchmarks.recorded_device.watch import recorded_device
from harness import Case, Run


def run_case(case: Case, *, devices: int = 1) -> tuple[Run, list[list[Tensor]]]:
    """As `harness.run_case`."""
    with recorded_device() as device:
        run, partitions = harness.run_case(replace(case, loop="trainer", recorded=False), devices=devices)
    run.races = dict(device.order.races)
    return run, partitions
