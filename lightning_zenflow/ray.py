"""The strategy for Ray Train, whose `prepare_trainer` takes subclasses of its own strategies only."""

from typing import Any

from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.strategy import ZenFlowStrategy

try:
    import ray.train
    from ray.train.lightning import RayDeepSpeedStrategy
except ImportError as error:
    raise ImportError("lightning_zenflow.ray needs Ray Train: pip install 'lightning-zenflow[ray]'") from error

__all__ = ["RayZenFlowStrategy"]


class RayZenFlowStrategy(ZenFlowStrategy, RayDeepSpeedStrategy):  # type: ignore[misc]  # Ray is not where types are checked
    """`ZenFlowStrategy`, with its arguments, for the Trainer in each worker of Ray Train's `TorchTrainer`.

    Rank, device and number of workers are Ray's. ``checkpoint_format="auto"`` is one file on any number of ranks: Ray's
    `RayTrainReportCallback` saves to temporary folders, and a folder of DeepSpeed's would be complete only if all hosts shared them.
    """

    @property
    @override
    def num_processes(self) -> int:
        """Ray's workers on this host; the Trainer knows only the devices that one of them sees."""
        return int(ray.train.get_context().get_local_world_size())

    @property
    @override
    def is_alone(self) -> bool:
        """Whether there is one worker. The Trainer's `num_nodes` is not Ray's."""
        return bool(self.world_size == 1)

    @override
    def setup(self, trainer: Any) -> None:
        if self.zenflow_config.async_checkpoints:
            raise MisconfigurationException(
                "RayZenFlowStrategy: async_checkpoints must be false, got True: Ray's callback reports a checkpoint right after the save"
            )
        super().setup(trainer)

    @override
    def _saves_file(self, *, weights_only: bool = False) -> bool:
        return weights_only or self.zenflow_config.checkpoint_format != "deepspeed"
