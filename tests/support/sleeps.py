"""What happens behind batches: sleeps, in which what the device has leaves (`engine.offload_states`) and comes back; or flushes."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from harness import optimizer_of, snapshot
from same_bits import assert_same_tensors


class Behind(pl.Callback):
    """Calls `act` behind some batches, counted from 1; with accumulation there are several a step."""

    def __init__(self, batches: Sequence[int]) -> None:
        self._batches = batches

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 in self._batches:
            self.act(trainer)

    def act(self, trainer: pl.Trainer) -> None:
        """Flushes."""
        optimizer_of(trainer).training.flush()


class Sleeps(Behind):
    """Sleeps.

    Args:
        batches: see `Behind`.
        asleep: called with the Trainer.
        **options: of `offload_states`.
    """

    def __init__(
        self, batches: Sequence[int], *, asleep: Callable[[pl.Trainer], object] | None = None, **options: Any
    ) -> None:
        super().__init__(batches)
        self._asleep, self._options = asleep, options

    @override
    def act(self, trainer: pl.Trainer) -> None:
        engine, optimizer = trainer.strategy.deepspeed_engine, optimizer_of(trainer)
        # Frozen weights too; under stage 3 the rank's pieces.
        storages = [getattr(p, "ds_tensor", p).untyped_storage() for p in trainer.lightning_module.parameters()]
        engine.offload_states(**self._options)
        assert not any(storage.nbytes() for storage in storages) and optimizer.training.parts.ownership.current is None
        shown = snapshot(trainer.lightning_module)
        if self._asleep is not None:
            self._asleep(trainer)
        engine.reload_states()
        assert_same_tensors(snapshot(trainer.lightning_module), shown)
