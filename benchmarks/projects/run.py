"""One run of a flow of `flows.py`: the options of its Trainers, and what is noted."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

CHANGE = 1e-7
"""Of the initial weights, relative, in the control."""
STEPS = 60
"""Of each fit, or about as many."""
OBJECT = "zenflow_adamw object"
"""The method that gives the Trainers what the name "zenflow_adamw" stands for, as one strategy object."""


class Run:
    """One run of a flow.

    Args:
        method: "auto", "control", OBJECT or the name of a strategy.
        folder: for files.
        lightning: the package that the project imports, "lightning.pytorch" or "pytorch_lightning".
    """

    def __init__(self, method: str, folder: Path, lightning: str) -> None:
        self.folder, self.lightning = folder, import_module(lightning)
        self._method = method
        self._strategy: Any = "auto" if method == "control" else method
        if method.startswith("zenflow"):
            own = "lightning_zenflow"
            zenflow = import_module(own if lightning == "lightning.pytorch" else f"{own}.{lightning}")
            if method == OBJECT:
                self._strategy = zenflow.ZenFlowStrategy(update_interval=1, publish_lag=0, clip_prediction=False)
        self.losses: list[list[float]] = []
        self.predictions: list[float] = []
        self.parts: dict[str, float] = {}
        self.error = ""

    def __deepcopy__(self, memo: Any) -> "Run":
        # neuralforecast copies its models, with their callbacks.
        return self

    def options(self, *callbacks: Any, **others: Any) -> dict[str, Any]:
        """Of a Trainer."""
        record = self.lightning.callbacks.LambdaCallback(setup=self._set_up, on_train_batch_end=self._end_step)
        return {
            "strategy": self._strategy,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(self.folder),
            "callbacks": [record, *callbacks],
            **others,
        }

    def _set_up(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self.losses.append([])
        if self._method == "control" and len(self.losses) == 1:
            noise = torch.Generator().manual_seed(0)
            for p in module.parameters():
                p.data *= 1 + CHANGE * torch.randn(p.shape, generator=noise)

    def _end_step(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses[-1].append(float(outputs["loss"]))

    def seed(self) -> None:
        """Seeds all generators."""
        self.lightning.seed_everything(1, verbose=False)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the flow; an exception ends all that follow."""
        self.seed()
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.error = f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise
        self.parts[name] = time.perf_counter() - begin

    def predicted(self, values: Any) -> None:
        """Notes predictions."""
        self.predictions = np.asarray(values, dtype=float).ravel().tolist()
