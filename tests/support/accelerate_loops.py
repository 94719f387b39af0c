"""A loop under Accelerate, on its own AdamW or on ours, in this process or as a rank of torchrun."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, GradScalerKwargs
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zenflow.accelerate import ZenFlowAccelerator
from lightning_zenflow.deepspeed.environment import use_cpu_accelerator

EXACT = {"update_interval": 1, "publish_lag": 0, "clip_prediction": False, "worker_cores": 1}
LIMIT = timedelta(seconds=77)
LATE = {"update_interval": 4, "publish_lag": 1, "topk_ratio": 0.3, "worker_cores": 1}


@contextmanager
def new_process() -> Iterator[None]:
    """Context in which Accelerate, whose state is that of a process, has none from before."""
    with mock.patch.dict("os.environ", ACCELERATE_USE_DEEPSPEED="false"):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Net(nn.Module):
    """Weights of several shapes, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x) * self.scale
        return result


@dataclass
class Loop:
    """What a script has after `accelerator.prepare`, and what it saw."""

    accelerator: Accelerator
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = Net()
        first, rest = model.layers[0].parameters(), model.layers[1:].parameters()
        optimizer = torch.optim.AdamW([{"params": first, "weight_decay": 0.1}, {"params": rest}], lr=1e-2)
        # Accelerate counts a step once for each rank.
        ranks = self.accelerator.num_processes
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97 ** (step / ranks))
        random = torch.Generator().manual_seed(1)
        x, y = torch.randn(96, 16, generator=random, dtype=torch.float32), torch.randint(0, 4, (96,), generator=random)
        # The last step of an epoch has a micro-batch less if two are accumulated.
        loader = DataLoader(TensorDataset(x[:88], y[:88]), batch_size=8 // ranks)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), y)

    def train(
        self, *, epochs: int = 1, max_norm: float | None = None, after: Callable[[int], object] | None = None
    ) -> "Loop":
        """Trains as Accelerate's documentation does."""
        accelerator = self.accelerator
        for _ in range(epochs):
            for x, y in self.loader:
                with accelerator.accumulate(self.model):
                    loss = self.loss(x, y)
                    accelerator.backward(loss)
                    if max_norm is not None and accelerator.sync_gradients:
                        self.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), max_norm)))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                if after is not None:
                    after(len(self.losses))
        return self

    def weights(self) -> dict[str, Tensor]:
        """Exact ones, in memory of their own; under stage 3 on rank 0 only."""
        whole = self.accelerator.get_state_dict(self.model) or {}
        return {name: value.clone() for name, value in whole.items()}


def train_plain(*, accumulate: int = 1, **options: Any) -> tuple[Loop, dict[str, Tensor]]:
    """The loop under Accelerate alone, on the CPU: its record and its weights."""
    with new_process():
        loop = Loop(Accelerator(cpu=True, gradient_accumulation_steps=accumulate))
        loop.train(**options)
        return loop, loop.weights()


def train_rank(folder: Path, stage: int) -> None:
    """Trains, saves halfway, and writes what rank 0 saw."""
    plugin, handler = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0), GradScalerKwargs()
    accelerator = ZenFlowAccelerator(plugin, **EXACT, kwargs_handlers=[handler])
    assert accelerator.scaler_handler is handler
    loop, state, saved = Loop(accelerator), str(folder / f"state{stage}"), dict[str, Tensor]()
    loop.train(
        max_norm=0.5, after=lambda step: step == 5 and (accelerator.save_state(state), saved.update(loop.weights()))
    )
    weights = loop.weights()
    accelerator.load_state(state)
    torch.testing.assert_close(loop.weights(), saved, rtol=0, atol=0)
    # The group of ZeRO's collectives has the limit of the ranks' own.
    assert groups._clone_world_group()._get_backend(torch.device("cpu")).options._timeout == LIMIT
    if accelerator.is_main_process:
        torch.save((loop.losses, loop.norms, weights), folder / f"{stage}.pt")
    accelerator.free_memory()


def main(folder: Path) -> None:
    """A rank of torchrun, whose collectives have a limit."""
    use_cpu_accelerator()
    for stage in (2, 3):
        with new_process():
            with mock.patch.dict("os.environ", ACCELERATE_USE_DEEPSPEED="true"):
                PartialState(backend="gloo", timeout=LIMIT)
            train_rank(folder, stage)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
