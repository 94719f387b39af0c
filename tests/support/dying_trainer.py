"""Trainings that wait to be killed; run as a script, which forks a process for each of them when everything is imported.

Arguments, of each process: "fit", or "loop" for one under Fabric that nothing tears down, and the descriptor that it prints to. It prints
its number, the worker's once a training is under way, and, before Python takes itself apart, what is left.
"""

import atexit
import os
import signal
import sys
import time

# The test's own folder; the models are tiny, more threads would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._inductor.compile_fx  # else imported by the first fit of every fork
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from fabric_runs import set_up, train_step
from harness import fit, workers
from lightning_zenflow import ZenFlowStrategy
from models import TINY, LinearLossModule
from processes import ArenaWatch


class Waits(LinearLossModule):
    """In its 4th step. Two processes load its data."""

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(self.length), num_workers=2, multiprocessing_context="fork")

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            print(*workers(), flush=True)
            arena = ArenaWatch(self.trainer.strategy)
            atexit.register(lambda: print(f"{len(workers())} workers, {arena.n_bytes} bytes", flush=True))
            while not self.trainer.received_sigterm:
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)


LEFT: list[object] = []
"""As global variables of a script: they are there until Python takes itself apart."""


def loop() -> None:
    os.dup2(1, 2)
    fabric, model, optimizer, _ = set_up(LinearLossModule(shapes=TINY), update_interval=4, publish_lag=1)
    LEFT.extend((fabric, model, optimizer))
    train_step(fabric, model, optimizer, 0)
    print(*workers(), flush=True)


if __name__ == "__main__":
    # A shell that runs tests in the background has them ignore it, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        how, output = argument.split(":")
        if os.fork() == 0:
            os.dup2(int(output), 1)
            print(os.getpid(), flush=True)
            if how == "loop":
                loop()
            else:
                fit(Waits(shapes=TINY), ZenFlowStrategy(update_interval=2, publish_lag=1), steps=10)
            break
        os.close(int(output))
    else:
        for _ in sys.argv[1:]:
            os.wait()
