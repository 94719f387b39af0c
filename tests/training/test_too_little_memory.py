"""Training on a host with too little memory for the arenas is refused before anything starts, on all ranks."""

import gc
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from typing_extensions import override

from harness import Case, fit
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.worker import memory
from lightning_zenflow.worker.memory import FreeMemory
from machine_files import write
from models import TINY, LinearLossModule
from processes import arena_mappings
from rank_processes import run_on_ranks


def test_what_an_earlier_fit_has_left_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer states live as long as its trainer, which is garbage here. There is memory for one and a half models."""

    def one_fit() -> None:
        fit(LinearLossModule(shapes=TINY), ZenFlowStrategy(update_interval=1, publish_lag=0))

    def mapped() -> int:
        return sum(end - begin for begin, end in arena_mappings())

    gc.collect()
    before = mapped()
    gc.disable()
    try:
        one_fit()
        limit = before + 1.5 * (mapped() - before)
        assert limit > before
        monkeypatch.setattr(memory, "_free_memory", lambda _: [FreeMemory(n_bytes=limit - mapped(), limit="the test")])
        one_fit()
    finally:
        gc.enable()


@dataclass
class SmallHost(pl.Callback):
    """Makes the machine look small to one rank."""

    root: Path
    rank: int

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.global_rank == self.rank:
            memory._ROOT = self.root

    @override
    def on_exception(self, *_: Any) -> None:
        memory._ROOT = Path("/")


def test_all_ranks_are_refused_and_know_why(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemAvailable: 4 kB"})
    refused = Case(model_options={"shapes": TINY}, callbacks=(SmallHost(root, rank=1),), fails=True)
    other, small = run_on_ranks({"refused": refused})["refused"]
    assert other.error is not None and small.error is not None
    assert re.search(
        "MisconfigurationException: ZenFlow needs .*4096 bytes.*update_interval=4, publish_lag=1", small.error
    )
    assert "MisconfigurationException: rank 1: ZenFlow needs" in other.error
