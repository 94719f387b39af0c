"""DeepSpeed's engine of a model that is not trained."""

import argparse
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch.nn import Module

from lightning_zenflow.engine.pieces import is_in_pieces
from lightning_zenflow.engine.release import note_users_flags, remove_hooks


def inference_engine(module: Module, config: Mapping[str, Any], device: torch.device, *, divides: bool = False) -> Any:
    """DeepSpeed's engine of a model without optimizer, which converts its weights to the precision of the training's configuration.

    Whole weights stay whole, unless it `divides` them. Those that stage 3 has divided, as `fabric.init_module` makes them, are gathered
    where they are used. Hooks of an engine before are removed; the user's stay.
    """
    remove_hooks(module)
    note_users_flags(module)
    keys = ("fp16", "bf16", *(["zero_optimization"] if divides or is_in_pieces(module) else []))
    settings = {"train_micro_batch_size_per_gpu": 1, **{key: config[key] for key in keys if key in config}}
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=device.index or 0),
        config=settings,
        model=module,
        model_parameters=[],
        dist_init_required=False,
    )
    return engine
