"""The modules that a gradient enters on its way to the weights: few, and the ones that docs/architecture.md names."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import lightning_zenflow
from harness import Case, run_here
from lightning_zenflow.deepspeed.stage_2 import ZenFlowZeroOptimizer

PACKAGE = Path(lightning_zenflow.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
MOST = 16
STEP = 6
"""One in the middle of the run, in which nothing happens for the first time."""


def test_a_gradients_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its reduction to the end of the step, with S = 1, d = 0 and clipping, on one rank."""
    entered: set[str] = set()
    receive, step = ZenFlowZeroOptimizer.copy_grads_in_partition, ZenFlowZeroOptimizer.step

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(path.relative_to(PACKAGE).as_posix())

    def recorded_receive(self: ZenFlowZeroOptimizer, *args: Any, **kwargs: Any) -> None:
        if self.training.steps.number + 1 == STEP:
            sys.setprofile(note)
        receive(self, *args, **kwargs)

    def recorded_step(self: ZenFlowZeroOptimizer, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        sys.setprofile(None)

    monkeypatch.setattr(ZenFlowZeroOptimizer, "copy_grads_in_partition", recorded_receive)
    monkeypatch.setattr(ZenFlowZeroOptimizer, "step", recorded_step)
    options = {"reduce_bucket_size": 200, "worker_cores": 1}
    run_here(Case(model="TiedNet", steps=8, max_norm=1.0, update_interval=1, publish_lag=0, strategy_options=options))
    section = ARCHITECTURE.read_text().partition("\n## A gradient's way\n")[2].partition("\n## ")[0]
    assert entered == set(re.findall(r"`((?:[a-z_]+/)?[a-z0-9_]+\.py)`", section))
    assert len(entered) <= MOST
