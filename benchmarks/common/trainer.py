"""Lightning's trainer without anything that is not measured."""

import warnings
from typing import Any

import lightning.pytorch as pl

_OFF = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"]


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A trainer of one CPU process without logger, checkpoints, progress bar and summary; `options` override that."""
    # Advice about loggers and workers of data loaders; errors are raised.
    warnings.filterwarnings("ignore", module="lightning")
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, **dict.fromkeys(_OFF, False), **options})
