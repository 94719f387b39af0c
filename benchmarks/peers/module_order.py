"""This package without its order of the flat buffers."""

from typing import Any
from unittest import mock

from torch.nn import Module
from typing_extensions import override

from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deepspeed import stage_2


class ModuleOrder(ZenFlowStrategy):
    """`ZenFlowStrategy` whose ranks have consecutive parts of the model, as under plain ZeRO-2."""

    @override
    def _setup_model_and_optimizer(self, model: Module, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(stage_2, "balanced_order", lambda numels, n_ranks: list(range(len(numels)))):
            return super()._setup_model_and_optimizer(model, *args, **kwargs)
