"""One training with saves: on the simulated accelerator, with all of AdamW's state in the arena."""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from typing_extensions import override

from benchmarks.step_time.run import StepSpec, train
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.offload.run_state import MOMENTS

KINDS = ("synchronous", "background", "dcp")
"""Our two ways, and `torch.distributed.checkpoint.async_save` of the same master weights and moments."""


@dataclass(frozen=True, kw_only=True)
class SavesSpec:
    """Identity of a run."""

    kind: str
    params: float
    compute_s: float
    """Seconds of forward and backward."""
    saves: int
    between: int
    """Steps between two saves without any, from which the time of a step is taken."""


@dataclass(kw_only=True)
class SavesResult:
    """Measurements of one run."""

    spec: SavesSpec
    call_s: list[float] = field(default_factory=list)
    """Of each save: how long the call took."""
    written_s: list[float] = field(default_factory=list)
    """From its begin until the checkpoint was complete, to the end of a step."""
    quiet_step_s: list[float] = field(default_factory=list)
    """Steps without a save."""
    busy_step_s: list[float] = field(default_factory=list)
    """Steps in the whole of which a checkpoint was written."""
    n_bytes: int = 0
    """Size of a checkpoint."""


class TimedSaves(pl.Callback):
    """Saves, times each call, and lets `between` steps pass when the checkpoint is complete.

    Args:
        result: what is filled in.
        folder: for one checkpoint at a time.
    """

    def __init__(self, result: SavesResult, folder: Path) -> None:
        self._result, self._path = result, folder / "a.ckpt"
        self._future: Any = None
        self._begin = 0.0
        self._quiet_steps = -result.spec.between
        self._last = 0.0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.perf_counter()
        step_s = now - self._last
        if self._begin:
            if self._is_complete():
                self._result.written_s.append(now - self._begin)
                self._begin, self._quiet_steps = 0.0, -1
                self._delete()
            else:
                self._result.busy_step_s.append(step_s)
        else:
            if self._quiet_steps > 0:
                self._result.quiet_step_s.append(step_s)
            self._quiet_steps += 1
            if len(self._result.call_s) == self._result.spec.saves:
                trainer.should_stop = self._quiet_steps > self._result.spec.between
            elif self._quiet_steps > self._result.spec.between:
                self._save(trainer)
        self._last = time.perf_counter()

    def _is_complete(self) -> bool:
        return self._future.done() if self._future is not None else self._path.exists()

    def _save(self, trainer: pl.Trainer) -> None:
        self._begin = time.perf_counter()
        if self._result.spec.kind == "dcp":
            assert isinstance(trainer.strategy, ZenFlowStrategy) and trainer.strategy.zenflow_optimizer is not None
            trainer.strategy.flush()
            state = trainer.strategy.zenflow_optimizer.training.full_state
            tensors = {f"{key}.{name}": state.in_memory(name, key) for name in state.shapes for key in (None, *MOMENTS)}
            self._future = async_save(tensors, storage_writer=FileSystemWriter(self._path, sync_files=True))
        else:
            trainer.save_checkpoint(self._path)
        self._result.call_s.append(time.perf_counter() - self._begin)

    def _delete(self) -> None:
        if self._future is not None:
            self._future.result()
        files = [self._path] if self._path.is_file() else [*self._path.rglob("*")]
        self._result.n_bytes = sum(file.stat().st_size for file in files)
        if self._path.is_file():
            self._path.unlink()
        else:
            shutil.rmtree(self._path)


def run(spec: SavesSpec, folder: str) -> SavesResult:
    """Trains and measures in this process."""
    result = SavesResult(spec=spec)
    strategy = ZenFlowStrategy(
        update_interval=1, publish_lag=0, stall_monitor=False, async_checkpoints=spec.kind == "background"
    )
    # As long as it takes: the callback ends the training.
    of_training = StepSpec(
        device="simulated",
        method="zenflow_exact",
        params=spec.params,
        compute_s=spec.compute_s,
        warm_up=0,
        steps=10_000,
        asynchronous=True,
    )
    train(of_training, strategy, callbacks=[TimedSaves(result, Path(folder))])
    return result
