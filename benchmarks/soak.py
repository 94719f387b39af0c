"""Hours of training that is disturbed all the time, beside the same training left alone: the same bits at the end, flat memory?

    python -m benchmarks.soak --minutes 60

The disturbed run is made of legs, each resumed from the checkpoint of the last; meanwhile its worker is killed at random instants, and
more checkpoints are saved at random steps. The undisturbed run saves at the same steps, since a save closes the open windows, and does
nothing else. Both together take about the given time. The result is printed, and written as JSON.
"""

import argparse
import gc
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks import records
from lightning_zenflow import ZenFlowStrategy

LARGEST_GROWTH = 0.05
"""Of the memory between the first and the last third of the run, relative to the first."""
_SLACK = 8 << 20
"""Bytes; less growth than this is the allocator's and the page cache's, also where it is much of a small worker's memory."""
_DISTURBED_SHARE = 0.8
"""Of the time; the rest is enough for the same steps without disturbance."""


class Regression(pl.LightningModule):
    """A perceptron on data that is a function of the step, so that a resumed run sees the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / p.shape[-1] ** 0.5)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(self.trainer.global_step))
        return (self.layers(x).squeeze(1) - x.sum(1)).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(1 << 20))  # type: ignore[arg-type]


def workers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.name() == "zenflow-worker"]


class Saves(pl.Callback):
    """Saves after given steps, the last of them to a place of its own."""

    def __init__(self, steps: list[int], folder: Path) -> None:
        self._steps = steps
        self._folder = folder

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self._steps:
            trainer.save_checkpoint(self._folder / ("leg" if trainer.global_step == self._steps[-1] else "between"))


@dataclass
class Memory:
    """Resident bytes at the end of each leg; the shared memory counts in both processes."""

    trainer: list[int] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)

    def add(self) -> None:
        gc.collect()
        trainer = psutil.Process().memory_info()
        self.trainer.append(trainer.rss)
        self.shared.append(trainer.shared)
        self.worker.extend(process.memory_info().rss for process in workers())

    @staticmethod
    def growth(samples: list[int]) -> float:
        third = max(1, len(samples) // 3)
        first, last = statistics.mean(samples[:third]), statistics.mean(samples[-third:])
        return max(0.0, last - first - _SLACK) / first


class Disturbs(pl.Callback):
    """Kills the worker at random instants, and looks at the memory at the end of the leg."""

    def __init__(self, rng: random.Random, kill_every: int, memory: Memory, last_step: int) -> None:
        self._rng = rng
        self._kill_every = kill_every
        self._memory = memory
        self._last_step = last_step
        self.kills = 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._last_step:
            self._memory.add()
        elif self._rng.randrange(self._kill_every) == 0:
            time.sleep(self._rng.uniform(0, 0.003))
            for process in workers():
                process.send_signal(signal.SIGKILL)
                self.kills += 1


def fit(options: argparse.Namespace, *, last_step: int, ckpt_path: Path | None, callbacks: list[pl.Callback]) -> int:
    """Trains up to a step; returns how many workers were replaced."""
    strategy = ZenFlowStrategy(update_interval=4, publish_lag=1, max_worker_restarts=10**9)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=last_step,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Regression(options.width), ckpt_path=str(ckpt_path) if ckpt_path else None)
    assert strategy.zenflow_optimizer is not None
    return strategy.zenflow_optimizer.telemetry.stalls.worker_restarts


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    return [t for part in value for t in tensors_of(part)] if isinstance(value, list | tuple) else []


def state_of(checkpoint: Path) -> list[Tensor]:
    """Weights, master weights and moments, and whatever else is saved as a tensor."""
    return [t for file in sorted(checkpoint.rglob("*.pt")) for t in tensors_of(torch.load(file, weights_only=False))]


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng = random.Random(options.seed)
    memory = Memory()
    begin = time.monotonic()
    step = restarts = kills = legs = 0
    saves: list[int] = []
    disturbed = folder / "disturbed"
    while legs < 3 or time.monotonic() - begin < 60 * options.minutes * _DISTURBED_SHARE:
        last_step = step + options.leg_steps
        in_leg = [*sorted(rng.sample(range(step + 1, last_step), 2)), last_step]
        disturbs = Disturbs(rng, options.kill_every, memory, last_step)
        restarts += fit(
            options,
            last_step=last_step,
            ckpt_path=disturbed / "leg" if legs else None,
            callbacks=[disturbs, Saves(in_leg, disturbed)],
        )
        saves += in_leg
        kills += disturbs.kills
        step, legs = last_step, legs + 1
    disturbed_s = time.monotonic() - begin
    left_alone = folder / "left_alone"
    fit(options, last_step=step, ckpt_path=None, callbacks=[Saves(saves, left_alone)])
    ours, theirs = state_of(disturbed / "leg"), state_of(left_alone / "leg")
    growth = {name: Memory.growth(samples) for name, samples in asdict(memory).items()}
    return {
        "commit": records.commit_of_code(),
        "versions": records.versions(),
        "hardware": records.hardware(),
        "minutes": (time.monotonic() - begin) / 60,
        "seed": options.seed,
        "steps": step,
        "legs": legs,
        "saves": len(saves),
        "kills": kills,
        "restarts": restarts,
        "steps_per_s_disturbed": step / disturbed_s,
        "tensors": len(theirs),
        "same_bits": len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)),
        "memory_mib": {name: [round(n / 2**20, 1) for n in samples] for name, samples in asdict(memory).items()},
        "memory_growth": growth,
        "memory_flat": all(g < LARGEST_GROWTH for g in growth.values()),
        "workers_left": len(workers()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of both runs together, about; default 60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=512, help="of the model's layers; default 512")
    parser.add_argument("--leg-steps", type=int, default=200, help="steps from one resume to the next; default 200")
    parser.add_argument(
        "--kill-every", type=int, default=10, help="steps from one kill to the next on average; default 10"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    # One kill more or less is no news here.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        result = soak(options, Path(folder))
    text = json.dumps(result, indent=2)
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text + "\n")
    return 0 if result["same_bits"] and result["memory_flat"] and not result["workers_left"] else 1


if __name__ == "__main__":
    sys.exit(main())
