"""Trainings that end in several ways; run as a script, which forks a process for each of them when everything is imported.

Arguments, of each process: how its fits end, one after the other (see `Ends`), how many processes load data, and the descriptor that it
prints to. It prints its number, and the worker's once a training is under way. One that waits to be killed prints, before Python takes
itself apart, what is left. "loop" is one under Fabric that nothing tears down.
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


class Ends(LinearLossModule):
    """In its 4th step it "waits" to be killed, has an "error", or "stops" the trainer; or it trains to the "end"."""

    how = "waits"
    n_loaders = 0

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(
            range(self.length), num_workers=self.n_loaders, multiprocessing_context="fork" if self.n_loaders else None
        )

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            print(*workers(), flush=True)
            if self.how == "error":
                raise RuntimeError("the user's own mistake")
            if self.how == "stops":
                self.trainer.should_stop = True
            if self.how == "waits":
                arena = ArenaWatch(self.trainer.strategy)
                atexit.register(lambda: print(f"{len(workers())} workers, {arena.n_bytes} bytes", flush=True))
            while self.how == "waits" and not self.trainer.received_sigterm:
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


def main(ways: list[str], n_loaders: int) -> None:
    if ways == ["loop"]:
        return loop()
    model = Ends(shapes=TINY)
    model.n_loaders = n_loaders
    for how in ways:
        model.how = how
        try:
            fit(model, ZenFlowStrategy(update_interval=2, publish_lag=1), steps=10)
        except RuntimeError as error:
            assert "the user's own mistake" in str(error), error
        assert workers() == []
    print("through", flush=True)
    # Until the test has looked at what is left.
    signal.pause()


if __name__ == "__main__":
    # A shell that runs tests in the background has them ignore it, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        ways, n_loaders, output = argument.split(":")
        if os.fork() == 0:
            os.dup2(int(output), 1)
            print(os.getpid(), flush=True)
            main(ways.split(","), int(n_loaders))
            break
        os.close(int(output))
    else:
        for _ in sys.argv[1:]:
            os.wait()
