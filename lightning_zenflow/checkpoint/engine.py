"""DeepSpeed's engine for programs that call its `save_checkpoint` and `load_checkpoint`: Accelerate and the Trainer of transformers."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deepspeed import DeepSpeedEngine
from typing_extensions import override

from lightning_zenflow.checkpoint.collective import load_together
from lightning_zenflow.checkpoint.engine_content import to_save
from lightning_zenflow.core.distributed import raising_together
from lightning_zenflow.deepspeed.flat_buffers import DiskCopies


def in_place_of_deepspeeds() -> AbstractContextManager[Any]:
    """Context in which ``deepspeed.initialize`` makes a `ZenFlowEngine`. Private: the name of the class, which is read in every call."""
    return patch("deepspeed.DeepSpeedEngine", ZenFlowEngine)


class ZenFlowEngine(DeepSpeedEngine):  # type: ignore[misc]  # DeepSpeed has no type information
    """DeepSpeed's engine, whose checkpoints have the exact state and continue the run bit for bit, on any number of ranks.

    Both methods are as DeepSpeed's, and all ranks call them together.
    """

    @override
    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: Mapping[str, Any] | None = None, **options: Any
    ) -> bool:
        """Saves to the folder `tag` in `save_dir`, in which other files may be."""
        self.optimizer.flush()
        copies = DiskCopies(Path(save_dir))
        try:
            with raising_together(OSError):
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                copy = self.optimizer.copy_for_save(copies)
            with self.optimizer.saved_as(copy):
                return bool(super().save_checkpoint(save_dir, tag, to_save(client_state or {}, self), **options))
        finally:
            copies.free()

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
        if load_optimizer_states and load_lr_scheduler_states and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(client_state["lr_scheduler"])
        return load_dir, client_state
