"""DeepSpeed's engine for programs that call its `save_checkpoint` and `load_checkpoint`: Accelerate and the Trainer of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from typing_extensions import override

from lightning_zenflow.checkpoint.collective import load_together
from lightning_zenflow.checkpoint.engine_content import to_save
from lightning_zenflow.core.distributed import raising_together
from lightning_zenflow.deepspeed.flat_buffers import DiskCopies


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
        scheduler = client_state.get("lr_scheduler")
        if load_optimizer_states and load_lr_scheduler_states and None not in (scheduler, self.lr_scheduler):
            self.lr_scheduler.load_state_dict(scheduler)
        return load_dir, client_state

    # Private: by which Accelerate, the Trainer and `save_16bit_model` read whole weights.
    @override
    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        self.optimizer.flush()
        return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
