"""Checkpoints under Fabric: exact, atomic, and readable by the Trainer's strategy and DeepSpeed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.utilities.load import _move_state_into
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.checkpoint.client_state import of_fabric
from lightning_zenflow.checkpoint.collective import load_weights_together
from lightning_zenflow.session import Session
from lightning_zenflow.zero.optimizer import ZenFlowZeroOptimizer


class CheckpointHooks(Session, DeepSpeedStrategy):
    """Fabric's hooks that read and write the whole state."""

    deepspeed_strategy = DeepSpeedStrategy
    _engine: Any = None
    """DeepSpeed's, of the model that is trained."""
    _was_interrupted = False
    """Whether an error has interrupted a backward pass."""

    @override
    def flush(self) -> None:
        """Makes weights and optimizer states exact; all ranks call it together, between two steps.

        Raises:
            RuntimeError: a step has its gradients and has not been done.
        """
        step = None if self.zenflow_optimizer is None else self.zenflow_optimizer.zenflow_step
        if step is not None and step.is_complete and not (self._was_interrupted or step.was_interrupted):
            raise RuntimeError(
                "weights are read between fabric.backward and optimizer.step: call `optimizer.step()` before, or `optimizer.zero_grad()` to"
                " drop the gradients"
            )
        super().flush()

    @override
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Saves the exact state after the last step, atomically, as a folder that the Trainer's strategy and DeepSpeed read as well.

        Raises:
            OSError: the checkpoint could not be written; an existing one is unchanged, and training can go on.
        """
        self.flush()
        save = super().save_checkpoint
        self._save(path, lambda folder: save(folder, of_fabric(state), storage_options, filter))

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """State of `optimizer.state_dict()`, exact.

        Raises:
            RuntimeError: a step has its gradients and has not been done.
        """
        self.flush()
        return super().get_optimizer_state(optimizer)

    @override
    def load_checkpoint(
        self,
        path: Any,
        state: Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint of any number of ranks, saved by Fabric or the Trainer under ZenFlow or by DeepSpeed's ZeRO stage 1 or 2.

        Args:
            path: folder of the checkpoint; for `fabric.load_raw` a file with a state dict.
            state: what is loaded: the model, with its optimizer or without, and further objects by the names under which they were saved.
                For `fabric.load_raw` the model.
            strict: whether the model must have exactly the saved weights and buffers.
            weights_only: see `torch.load`; for `fabric.load_raw` only.

        Returns:
            Everything else in the checkpoint.

        Raises:
            CheckpointError: the checkpoint is incomplete, or of another model.
        """
        optimizer = self.zenflow_optimizer
        if isinstance(state, (Optimizer, ZenFlowZeroOptimizer)):
            raise MisconfigurationException(
                "fabric.load_raw: obj must be the model, got its optimizer, whose state is in parts; use `fabric.save` and `fabric.load`"
            )
        if isinstance(state, Module):
            # DeepSpeed's engine names its parameters "module.NAME".
            self.flush()
            super().load_checkpoint(path, getattr(state, "module", state), strict, weights_only)
            if optimizer is not None and state is self._engine:
                optimizer.reset_master_from_model()
            return {}
        items = list((state or {}).values())
        if not state or optimizer is None or not any(item is self._engine for item in items):
            return load_weights_together(
                Path(path), partial(super().load_checkpoint, path, state, strict, weights_only)
            )
        has_optimizer = any(item is optimizer for item in items)
        client_state = self._load(self._engine, path, strict=strict, optimizer_states=has_optimizer)
        ours = {name for name, item in state.items() if item is self._engine or item is optimizer}
        # Private: what Lightning's own strategies load further objects with.
        _move_state_into(client_state, state, keys=set(state) - ours)
        return client_state
