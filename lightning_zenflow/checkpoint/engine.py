"""DeepSpeed's engine in saves and loads: as programs call it, Accelerate and the Trainer of transformers; and its *client state*, what a
folder has beside the engine's and the optimizer's state, as Lightning and callbacks have it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import deepspeed.runtime.engine as engine_module
import lightning.pytorch as pl
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from typing_extensions import override

from lightning_zenflow.checkpoint.loading import load_together
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import raising_together
from lightning_zenflow.core.saved_tensors import DiskCopies
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.users_module import further_names, is_in_pieces

AVERAGED = "averaged_state_dict"
"""Key of the averaged weights, which Lightning's `WeightAveraging` saves in the place of the model's."""

CURRENT = "current_model_state"
"""Key of the model's own weights, beside averaged ones."""


class ZenFlowEngine(DeepSpeedEngine):  # type: ignore[misc]  # DeepSpeed has no type information
    """DeepSpeed's engine, whose checkpoints have the exact state and continue the run bit for bit, on any number of ranks.

    Both methods are as DeepSpeed's, and all ranks call them together.
    """

    optimizer: ZenFlowOptimizer
    lr_scheduler: Any

    @override
    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: Mapping[str, Any] | None = None, **options: Any
    ) -> bool:
        """Saves to the folder `tag` in `save_dir`, in which other files may be."""
        self.optimizer.flush()
        disk = DiskCopies(Path(save_dir))
        try:
            with raising_together(OSError):
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                self.optimizer.reserve(disk)
            with self.optimizer.gathered():
                return bool(super().save_checkpoint(save_dir, tag, to_save(client_state or {}, self), **options))
        finally:
            disk.free()

    @override
    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Loads a folder of any number of ranks; returns `load_dir` and the client state.

        Raises:
            CheckpointError: the checkpoint is missing or incomplete, or of another model; nothing has been loaded.
        """
        with_states = {"strict": load_module_strict, "optimizer_states": load_optimizer_states}
        client_state = load_together(self, Path(load_dir), tag=tag, **with_states)
        scheduler = client_state.get("lr_scheduler")
        if load_optimizer_states and load_lr_scheduler_states and None not in (scheduler, self.lr_scheduler):
            self.lr_scheduler.load_state_dict(scheduler)
        return load_dir, client_state

    # Private: by which Accelerate, the Trainer and `save_16bit_model` read whole weights.
    @override
    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        self.optimizer.flush()
        return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)


def files_of_engine(
    engine: DeepSpeedEngine, folder: Any, client_state: Mapping[str, Any], **options: Any
) -> list[tuple[Any, Any, Callable[[Any, Any], None]]]:
    """What the engine's `save_checkpoint` has to write: contents, paths and functions that write one to the other; small files it writes
    itself. It runs without collectives, so that a rank whose part fails anywhere leaves no other waiting.

    The collectives are barriers, where here the directory exists before and all ranks meet after it, and a comparison of the tag, a
    constant.

    Private: the engine calls ``deepspeed.comm`` by a module-level name, and has what writes files as `checkpoint_engine`. Both are replaced
    inside this function only.
    """
    skipped = dict.fromkeys(("barrier", "all_reduce"), lambda *_, **__: None)
    comm, writer = SimpleNamespace(**{**vars(engine_module.dist), **skipped}), engine.checkpoint_engine
    is_torchs = type(writer) is TorchCheckpointEngine and writer.zipfile_serialization
    write, files = torch.save if is_torchs else writer.save, list[Any]()
    with (
        patch.object(engine_module, "dist", comm),
        patch.object(writer, "save", lambda state_dict, path: files.append((state_dict, path, write))),
    ):
        engine.save_checkpoint(folder, client_state=client_state, tag="checkpoint", **options)
    return files


def to_save(checkpoint: Mapping[str, Any], engine: DeepSpeedEngine) -> dict[str, Any]:
    """The client state to save, of a checkpoint as Lightning or, with Fabric, the user made it.

    `DeepSpeedStrategy` drops "state_dict", because the engine saves the weights. `WeightAveraging` has put the averaged weights there, and
    the model's at `CURRENT`.

    "shared_params" has further names of parameters that have several, each with the first, under which the parameter is saved. It takes the
    place of what DeepSpeed finds: that compares addresses, which all parameters without elements have in common, so that `zero_to_fp32`
    would give them one shape, and it overlooks modules that have several names.
    """
    client_state = dict(checkpoint)
    if CURRENT in client_state:
        # The model's are the engine's, and need not be saved twice.
        client_state[CURRENT] = None
        client_state[AVERAGED] = client_state["state_dict"]
    client_state["shared_params"] = further_names(engine.module)
    return client_state


class StatesInFolder(dict[str, Any]):
    """Stands for the optimizer's state, which has been loaded from a folder. Hooks that read or change it are refused."""

    def __missing__(self, key: str) -> NoReturn:
        raise MisconfigurationException(
            "ZenFlowStrategy: on_load_checkpoint must leave checkpoint['optimizer_states'] as it is where the checkpoint is a folder, got"
            ' hooks that read or change it: save one file, checkpoint_format="lightning", or change `optimizer.param_groups` in'
            " `on_train_start`"
        )


def as_lightning_saved(client_state: Mapping[str, Any], module: pl.LightningModule) -> dict[str, Any]:
    """The loaded client state with the entries that callbacks expect; the engine has loaded the model's weights.

    A model in pieces has no whole weights to show: "state_dict" is absent, as under plain `DeepSpeedStrategy`.
    """
    checkpoint = {**client_state, "optimizer_states": [StatesInFolder()]}
    if is_in_pieces(module):
        return checkpoint
    weights = module.state_dict()
    checkpoint["state_dict"] = checkpoint.pop(AVERAGED, weights)
    if CURRENT in checkpoint:
        checkpoint[CURRENT] = weights
    return checkpoint
