"""A small transformer under `fully_shard` on two ranks, by `OffloadAdamW` or torch's AdamW: functions of a rank, for `run_functions`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_zenflow import OffloadAdamW
from lightning_zenflow.core.errors import MisconfigurationException
from plain_loops import Who, batch, close, groups_of, loss_of, make_model, make_optimizer, reading_of

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"


class Scaled(nn.Module):
    """Multiplies by one number, of which the second rank has nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))
        self.is_used = True

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight if self.is_used else 1)


def sharded(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    """The model of `plain_loops` with a `Scaled`, divided over the ranks."""
    model = make_model(dtype, layers=2)
    model.insert(1, Scaled(dtype))
    for module in model:
        fully_shard(module, **options)
    return fully_shard(model, **options)


@dataclass
class Sharded:
    """A training, which `train` goes on with."""

    model: nn.Sequential
    optimizer: Optimizer
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    steps: int = 0

    def train(
        self,
        steps: int = 6,
        *,
        micro_batches: int = 1,
        syncs: bool = True,
        max_norm: Callable[[int], float] | None = None,
        begin: Callable[["Sharded"], None] = lambda _: None,
    ) -> "Sharded":
        """Steps with other data on each rank; with `syncs` each micro-batch is reduced, otherwise the last."""
        for step in range(self.steps, self.steps + steps):
            begin(self)
            for micro in range(micro_batches):
                self.model.set_requires_gradient_sync(syncs or micro == micro_batches - 1)  # type: ignore[operator]  # FSDP2's
                loss = loss_of(self.model, 2 * (100 * step + micro) + dist.get_rank()) / micro_batches
                loss.backward()
                self.losses.append(float(loss.detach()))
            if max_norm is not None:
                norm = clip_grad_norm_(self.model.parameters(), max_norm(step))
                assert isinstance(norm, DTensor)
                self.norms.append(float(norm.full_tensor()))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
        return self


def make(
    who: Who, dtype: torch.dtype = torch.float32, *, keys: dict[str, Any] | None = None, **options: Any
) -> Sharded:
    """A training that has not begun."""
    model = sharded(dtype, **options)
    return Sharded(model, make_optimizer(who, groups_of(model), **(keys or {})))


def side_by_side(**options: Any) -> dict[str, Any]:
    """Losses and norms of both, and how much ours has hidden."""
    of_model = {key: options.pop(key) for key in ("reshard_after_forward", "mp_policy") if key in options}
    keys = options.pop("keys", None)
    ours, theirs = (make(who, keys=keys, **of_model).train(**options) for who in ("ours", "torch"))
    reading = reading_of(ours.optimizer)
    close(ours)  # type: ignore[arg-type]  # it has an optimizer
    return {
        "losses": (ours.losses, theirs.losses),
        "norms": (ours.norms, theirs.norms),
        "in_backward": reading.steps_in_backward,
        "followed": reading.followed_steps,
        "corrected": reading.corrected_steps,
    }


def limit(step: int) -> float:
    return 1.0 if step % 3 == 2 else 50.0


def plain() -> Any:
    return side_by_side(steps=24)


def clipped() -> Any:
    return side_by_side(max_norm=limit)


def predicted() -> Any:
    return side_by_side(max_norm=lambda _: 0.5, keys={"clip_prediction": True})


def accumulated() -> Any:
    return side_by_side(micro_batches=3, max_norm=limit)


def not_synchronised() -> Any:
    return side_by_side(micro_batches=3, syncs=False, max_norm=limit)


def not_resharded() -> Any:
    return side_by_side(reshard_after_forward=False)


def written() -> Any:
    """Weights that the user's code writes become master weights."""

    @torch.no_grad()
    def halve(training: Sharded) -> None:
        if training.steps == 3:
            training.model[0].weight.mul_(0.5)

    return side_by_side(begin=halve)


class Masters(Optimizer):
    """torch's AdamW over float32 copies of bfloat16 shards, clipped in float32."""

    def __init__(self, groups: list[dict[str, Any]], max_norm: float) -> None:
        self.max_norm = max_norm
        super().__init__(groups, {"weight_decay": 0.01})
        self.copies = [{**g, "params": [p.detach().float() for p in g["params"]]} for g in self.param_groups]
        self.inner = torch.optim.AdamW(self.copies, lr=1e-2)

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, copies in zip(self.param_groups, self.copies, strict=True):
            for p, copy in zip(group["params"], copies["params"], strict=True):
                copy.grad = p.grad.float()
        clip_grad_norm_([copy for copies in self.copies for copy in copies["params"]], self.max_norm)
        self.inner.step()
        for group, copies in zip(self.param_groups, self.copies, strict=True):
            for p, copy in zip(group["params"], copies["params"], strict=True):
                p.copy_(copy)


def bfloat16() -> Any:
    """Shards in bfloat16, reductions in float32."""
    policy = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    ours = make("ours", torch.bfloat16, **policy).train(1, max_norm=lambda _: 0.1)
    model = sharded(torch.bfloat16, **policy)
    optimizer = Masters(groups_of(model), 0.1)
    theirs = Sharded(model, optimizer).train(1)
    # From here on single roundings differ, which the next passes amplify.
    parts = [
        (a.detach().to_local().clone(), b.detach().to_local().clone())
        for a, b in zip(ours.model.parameters(), model.parameters(), strict=True)
    ]
    equal = torch.cat([(a == b).float().flatten() for a, b in parts]).mean()
    state = ours.optimizer.state_dict()["state"].values()
    copies = [copy.to_local().clone() for group in optimizer.copies for copy in group["params"]]
    masters = [values["master"].to_local().clone() for values in state]
    ours.train(5, max_norm=lambda _: 0.1)
    theirs.train(5)
    close(ours)  # type: ignore[arg-type]  # it has an optimizer
    return {"losses": (ours.losses, theirs.losses), "equal": float(equal), "masters": (masters, copies)}


class Language(nn.Module):
    """As a model of transformers: its layers, and a loss in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model(torch.bfloat16, layers=2)

    @override
    def forward(self, tokens: Tensor) -> SimpleNamespace:
        logits = self.layers(tokens[:, :-1]).flatten(0, 1).float()
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))


def recipe() -> Any:
    """The snippet of docs/recipes.md; its steps."""
    found = re.findall(r"```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)
    (snippet,) = (block for block in found if "fully_shard" in block)
    names: dict[str, Any] = {"model": Language(), "loader": [batch(number) for number in range(3)]}
    exec(compile(snippet, RECIPES.name, "exec"), names)
    optimizer = names["optimizer"]
    steps = reading_of(optimizer).steps
    optimizer.close()
    return steps


def gradients() -> Any:
    """What reads of gradients give, between backward and step."""
    read = []
    for who in ("ours", "torch"):
        training = make(who).train(2)
        loss_of(training.model, dist.get_rank()).backward()
        read.append([p.grad.full_tensor() for p in training.model.parameters() if p.grad is not None])
        training.optimizer.zero_grad()
        if who == "ours":
            close(training)  # type: ignore[arg-type]  # it has an optimizer
    return read


def refused() -> Any:
    """Messages of what is refused."""
    messages = {}

    def note(name: str, make_one: Callable[[], object]) -> None:
        try:
            make_one()
        except MisconfigurationException as error:
            messages[name] = str(error)

    model = make_model()
    optimizer = OffloadAdamW(model.parameters(), worker_cores=1)
    note("ddp", lambda: loss_of(nn.parallel.DistributedDataParallel(model), 0).backward())
    del optimizer
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    note("replicated", lambda: OffloadAdamW([whole], worker_cores=1))
    two = dist.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    note("hybrid", lambda: OffloadAdamW(fully_shard(nn.Linear(4, 4), mesh=two).parameters(), worker_cores=1))
    parts = [*fully_shard(nn.Linear(4, 4)).parameters(), nn.Parameter(torch.ones(2))]
    note("mixed", lambda: OffloadAdamW(parts, worker_cores=1))
    scaled = fully_shard(Scaled(torch.float32))
    note("too many ranks", lambda: OffloadAdamW(scaled.parameters(), worker_cores=1))
    training = make("ours", keys={"accumulation_steps": 1})
    loss_of(training.model, 0).backward()
    training.model[0].weight.grad = training.model[0].weight.grad * 2
    note("assigned", training.optimizer.step)
    training.optimizer.zero_grad()
    training.model[1].is_used = False
    loss_of(training.model, 0).backward()
    note("unused", training.optimizer.step)
    training.optimizer.zero_grad()
    training.model[1].is_used = True
    training.train(2)
    close(training)  # type: ignore[arg-type]  # it has an optimizer
    return messages


def save(training: Sharded, folder: str) -> None:
    """Sharded files of torch.distributed.checkpoint, and one file with all."""
    model, optimizer = (
        get_model_state_dict(training.model),
        get_optimizer_state_dict(training.model, training.optimizer),
    )
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    options = StateDictOptions(full_state_dict=True)
    whole = (
        get_model_state_dict(training.model, options=options),
        get_optimizer_state_dict(training.model, training.optimizer, options=options),
    )
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}.pt")
    dist.barrier()


def load(who: Who, folder: str, *, one_file: bool, dtype: torch.dtype = torch.float32) -> Sharded:
    """A training that continues, with the hyperparameters of the file."""
    training = make(who, dtype, keys={"lr": 1.0})
    options = StateDictOptions(full_state_dict=one_file)
    if one_file:
        model, optimizer = torch.load(f"{folder}.pt")
    else:
        model = get_model_state_dict(training.model)
        optimizer = get_optimizer_state_dict(training.model, training.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_model_state_dict(training.model, model, options=options)
    set_optimizer_state_dict(training.model, training.optimizer, optimizer, options=options)
    training.steps = 4
    return training


def go_on(
    folder: str, *, dtype: torch.dtype = torch.float32, whos: tuple[Who, ...] = ("ours", "torch")
) -> dict[str, list[float]]:
    """Losses of further steps, by who and from which files."""
    found = {}
    for who in whos:
        for one_file in (False, True):
            training = load(who, folder, one_file=one_file, dtype=dtype)
            found[f"{who}, {'one file' if one_file else 'shards'}"] = training.train(3, max_norm=limit).losses
            close(training)  # type: ignore[arg-type]  # it has an optimizer
    return found


def checkpoints() -> Any:
    """Files of either, continued by either."""
    found = {}
    for who in ("ours", "torch"):
        training = make(who).train(4, max_norm=limit)
        save(training, f"of_{who}")
        whole = training.losses
        training.losses = []
        found[f"{who}, whole"] = training.train(3, max_norm=limit).losses
        close(training)  # type: ignore[arg-type]  # it has an optimizer
        found |= {f"{who} to {second}": losses for second, losses in go_on(f"of_{who}").items()}
        assert len(whole) == 4
    return found


def checkpoints_of_bfloat16() -> Any:
    """With master weights, and moments of fewer bits."""
    training = make("ours", torch.bfloat16, keys={"moments_dtype": "bfloat16"}).train(4, max_norm=limit)
    save(training, "of_bfloat16")
    training.losses = []
    found = {"whole": training.train(3, max_norm=limit).losses}
    close(training)  # type: ignore[arg-type]  # it has an optimizer
    again = load("ours", "of_bfloat16", one_file=False, dtype=torch.bfloat16)
    state = get_optimizer_state_dict(again.model, again.optimizer)["state"]
    found["keys"] = sorted(next(iter(state.values())))
    found["types"] = sorted({str(v.dtype) for values in state.values() for v in values.values()})
    close(again)  # type: ignore[arg-type]  # it has an optimizer
    return found | go_on("of_bfloat16", dtype=torch.bfloat16, whos=("ours",))


def on_one_rank() -> Any:
    """Files of two ranks, continued."""
    return go_on("of_ours")


class Module(L.LightningModule):
    """The model, divided in Lightning's hook; keeps its losses."""

    def __init__(self, who: Who) -> None:
        super().__init__()
        self.who, self.losses = who, list[float]()
        self.model = make_model(layers=2)

    @override
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        if not isinstance(next(self.model.parameters()), DTensor):
            for module in self.model:
                fully_shard(module, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    @override
    def training_step(self, tokens: list[Tensor], _: int) -> Tensor:
        (both,) = tokens
        loss = nn.functional.cross_entropy(self.model(both[:, :-1]).flatten(0, 1), both[:, 1:].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    @override
    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.who, groups_of(self.model))


def fit(who: Who, folder: str, *, epochs: int = 2, ckpt: Path | None = None, one_file: bool = False) -> list[float]:
    data = DataLoader(TensorDataset(torch.cat([batch(number) for number in range(12)])), batch_size=4)
    module = Module(who)
    trainer = L.Trainer(
        strategy=ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=not one_file
        ),
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        default_root_dir=folder,
        accumulate_grad_batches=2,
        gradient_clip_val=0.4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, ckpt_path=ckpt)
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, OffloadAdamW):
            optimizer.close()
    return module.losses


def lightning() -> Any:
    """Clipped, accumulated, saved and resumed, by either."""
    found = {who: fit(who, f"whole {who}") for who in ("ours", "torch")}
    for one_file in (False, True):
        name = "one file" if one_file else "shards"
        fit("ours", name, epochs=1, one_file=one_file)
        (ckpt,) = Path(name).rglob("*.ckpt")
        for who in ("ours", "torch"):
            found[f"{who}, {name}"] = fit(who, f"again {who} {name}", ckpt=ckpt, one_file=one_file)
    return found
