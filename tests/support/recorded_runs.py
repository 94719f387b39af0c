"""Runs cases of `harness` on a recorded device."""

from dataclasses import replace
from unittest.mock import patch

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor

import harness
from harness import Case, Run
from recorded_device.watch import recorded_device


def run_case(case: Case, *, devices: int = 1) -> tuple[Run, list[list[Tensor]]]:
    """As `harness.run_case`."""
    # Private: with several ranks, Lightning makes the host wait for the device at the start of each batch, which would order everything.
    without_wait = patch.object(_TrainingEpochLoop, "_broadcast_sigterm_tensor", lambda _: None)
    with recorded_device() as device, without_wait:
        run, partitions = harness.run_case(replace(case, loop="trainer", recorded=False), devices=devices)
    run.races = dict(device.order.races)
    return run, partitions
