"""A small transformer under `fully_shard` on two ranks: `OffloadAdamW` is torch's AdamW under it, checkpoints included."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate
from typing_extensions import override

from lightning_loops import fit
from lightning_zenflow import OffloadAdamW
from lightning_zenflow.core.errors import MisconfigurationException
from plain_loops import Loop, Who, batch, close, loss_of, make_loop, make_model, reading_of
from rank_processes import run_functions

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
assert_close = partial(torch.testing.assert_close, rtol=3e-6, atol=0)


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


def make(who: Who, dtype: torch.dtype = torch.float32, *, keys: dict[str, Any] | None = None, **options: Any) -> Loop:
    """A training that has not begun, with other data on each rank."""
    loop, rank = make_loop(who, model=sharded(dtype, **options), scheduled=False, **(keys or {})), dist.get_rank()
    loop.batch_of = lambda number: batch(2 * number + rank)
    return loop


def limit(step: int) -> float:
    return 1.0 if step % 3 == 2 else 50.0


def assert_as_torch(
    *,
    steps: int = 6,
    syncs: bool = True,
    of_model: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    follows: bool = False,
    rtol: float = 3e-6,
    **options: Any,
) -> None:
    """The same losses and norms; all steps but the first, of which the number of backward passes is not known, are hidden."""
    ours, theirs = (make(who, keys=keys, **(of_model or {})) for who in ("ours", "torch"))
    for loop in (ours, theirs):
        loop.syncs = syncs
        loop.train(steps, **options)
    assert_close((ours.losses, ours.norms), (theirs.losses, theirs.norms), rtol=rtol)
    reading = reading_of(ours.optimizer)
    assert reading.steps_in_backward == steps - 1 and (reading.followed_steps > 0) == follows
    close(ours)


@torch.no_grad()
def halve(training: Loop) -> None:
    if training.steps == 3:
        training.model[0].weight.mul_(0.5)  # type: ignore[index]  # a Sequential


AS_TORCH: dict[str, dict[str, Any]] = {
    "plain": {"steps": 24},
    "clipped": {"max_norm": limit},
    # Every step, by a limit that is learned.
    "predicted": {"max_norm": lambda _: 0.5, "keys": {"clip_prediction": True}, "rtol": 1e-2},
    "accumulated": {"micro_batches": lambda _: 3, "max_norm": limit},
    "not synchronised": {"micro_batches": lambda _: 3, "syncs": False, "max_norm": limit},
    "not resharded": {"of_model": {"reshard_after_forward": False}},
    # Weights that the user's code writes become master weights.
    "written": {"begin": halve, "follows": True},
}


def as_torch(name: str) -> None:
    assert_as_torch(**AS_TORCH[name])


def bfloat16() -> None:
    """Shards in bfloat16, reductions in float32: the first step is that of float32 master weights; behind it single roundings differ."""
    policy = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    ours, theirs = (make(who, torch.bfloat16, **policy).train(1, max_norm=lambda _: 0.1) for who in ("ours", "torch"))
    masters = [values["master"].to_local() for values in ours.optimizer.state_dict()["state"].values()]
    torch.testing.assert_close(masters, [m.detach().to_local() for m in theirs.masters], rtol=3e-7, atol=1e-7)
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    equal = torch.cat([(a.to_local() == b.to_local()).float().flatten() for a, b in pairs])  # type: ignore[attr-defined]  # DTensors
    assert equal.mean() > 0.998
    assert_close(*(loop.train(5, max_norm=lambda _: 0.1).losses for loop in (ours, theirs)), rtol=2e-3)
    close(ours)


class Language(nn.Module):
    """As a model of transformers: its layers, and a loss in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model(torch.bfloat16, layers=2)

    @override
    def forward(self, tokens: Tensor) -> SimpleNamespace:
        logits = self.layers(tokens[:, :-1]).flatten(0, 1).float()
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))


def recipe() -> None:
    """The snippet of docs/recipes.md takes its steps."""
    found = re.findall(r"```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)
    (snippet,) = (block for block in found if "fully_shard" in block)
    names: dict[str, Any] = {"model": Language(), "loader": [batch(number) for number in range(3)]}
    exec(compile(snippet, RECIPES.name, "exec"), names)
    assert reading_of(names["optimizer"]).steps == 3
    names["optimizer"].close()


def gradients() -> None:
    """`full_tensor` between backward and step."""
    read = []
    for who in ("ours", "torch"):
        training = make(who).train(2)
        loss_of(training.model, dist.get_rank()).backward()
        read.append([p.grad.full_tensor() for p in training.model.parameters() if p.grad is not None])
        training.optimizer.zero_grad()
        close(training)
    assert_close(*read, rtol=1e-4, atol=1e-7)


def refused() -> None:
    """By name, on every rank."""

    def refuse(message: str, use: Callable[[], object]) -> None:
        with pytest.raises(MisconfigurationException, match=re.escape(message)):
            use()

    def optimize(*parameters: nn.Parameter) -> OffloadAdamW:
        return OffloadAdamW(parameters, worker_cores=1)

    model = make_model()
    optimizer = optimize(*model.parameters())
    refuse(
        "with several ranks parameters must be divided by `torch.distributed.fsdp.fully_shard`",
        lambda: loss_of(nn.parallel.DistributedDataParallel(model), 0).backward(),
    )
    del optimizer
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    refuse("it must be divided by `fully_shard`, got the placement", lambda: optimize(whole))
    two = dist.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    hybrid = fully_shard(nn.Linear(4, 4), mesh=two).parameters()
    refuse("divided over one mesh, of one dimension, of all 2 ranks", lambda: optimize(*hybrid))
    parts = [*fully_shard(nn.Linear(4, 4)).parameters(), nn.Parameter(torch.ones(2))]
    refuse("all parameters must be DTensors, or none", lambda: optimize(*parts))
    one = fully_shard(Scaled(torch.float32)).parameters()
    refuse("each rank must have elements of some parameter", lambda: optimize(*one))
    training = make("ours", keys={"accumulation_steps": 1})
    loss_of(training.model, 0).backward()
    weight = training.model[0].weight  # type: ignore[index]  # a Sequential
    weight.grad = weight.grad * 2
    refuse("must not be assigned between backward and step", training.optimizer.step)
    training.optimizer.zero_grad()
    scaled = training.model[1]  # type: ignore[index]  # a Sequential
    scaled.is_used = False
    loss_of(training.model, 0).backward()
    refuse("the loss of a step must depend on every trained parameter, got none of", training.optimizer.step)
    training.optimizer.zero_grad()
    scaled.is_used = True
    training.train(2)
    close(training)


def save(training: Loop, folder: str) -> None:
    """Sharded files of torch.distributed.checkpoint, and one file with all."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    whole = get_state_dict(training.model, training.optimizer, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}.pt")
    dist.barrier()


def load(who: Who, folder: str, *, one_file: bool, dtype: torch.dtype = torch.float32) -> Loop:
    """A training that continues, with the hyperparameters of the file."""
    training = make(who, dtype, keys={"lr": 1.0})
    options = StateDictOptions(full_state_dict=one_file)
    if one_file:
        model, optimizer = torch.load(f"{folder}.pt")
    else:
        model, optimizer = get_state_dict(training.model, training.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    states = {"model_state_dict": model, "optim_state_dict": optimizer}
    set_state_dict(training.model, training.optimizer, **states, options=options)
    training.steps = 4
    return training


def go_on(who: Who, folder: str, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of further steps, from shards and from one file."""
    loops = [load(who, folder, one_file=one_file, **options) for one_file in (False, True)]
    losses = [loop.train(3, max_norm=limit).losses for loop in loops]
    close(*loops)
    return losses[0], losses[1]


def checkpoints() -> None:
    """Of torch.distributed.checkpoint, sharded and one file, of either and continued by either."""
    for first in ("ours", "torch"):
        training = make(first).train(4, max_norm=limit)
        save(training, f"of_{first}")
        whole = training.train(3, max_norm=limit).losses[4:]
        close(training)
        for second in ("ours", "torch"):
            for losses in go_on(second, f"of_{first}"):
                assert losses == whole or "torch" in (first, second)
                assert_close(losses, whole)


def checkpoints_of_bfloat16() -> None:
    """With master weights; moments of fewer bits are float32 there."""
    training = make("ours", torch.bfloat16, keys={"moments_dtype": "bfloat16"}).train(4, max_norm=limit)
    save(training, "of_bfloat16")
    whole = training.train(3, max_norm=limit).losses[4:]
    again = load("ours", "of_bfloat16", one_file=False, dtype=torch.bfloat16)
    state = get_optimizer_state_dict(again.model, again.optimizer)["state"].values()
    assert all({*values} == {"exp_avg", "exp_avg_sq", "master", "step"} for values in state)
    assert {v.dtype for values in state for v in values.values()} == {torch.float32}
    close(training, again)
    for losses in go_on("ours", "of_bfloat16", dtype=torch.bfloat16):
        # Later moments are rounded by other random numbers.
        assert losses[0] == whole[0]
        assert_close(losses, whole, rtol=1e-3)


def on_one_rank() -> None:
    """Files of two ranks."""
    expected, *others = (losses for who in ("ours", "torch") for losses in go_on(who, "of_ours"))
    for losses in others:
        assert_close(losses, expected)


def fit_sharded(who: Who, folder: str, *, one_file: bool = False, **options: Any) -> list[Tensor]:
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=not one_file
    )
    clipped = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.4, "limit_val_batches": 0}
    return fit(who, folder, batches=12, strategy=strategy, devices=2, **clipped, **options)


def lightning() -> None:
    """Under `ModelParallelStrategy`: clipped, accumulated, and resumed by either from shards and one file."""
    ours, theirs = (fit_sharded(who, f"whole {who}") for who in ("ours", "torch"))
    assert_close(ours, theirs)
    for one_file in (False, True):
        first = f"one file: {one_file}"
        fit_sharded("ours", first, epochs=1, one_file=one_file)
        (ckpt,) = Path(first).rglob("*.ckpt")
        for who in ("ours", "torch"):
            rest = fit_sharded(who, f"{first}, {who}", ckpt=ckpt, one_file=one_file)
            assert len(ours) == 12 and (rest == ours[6:] or who == "torch")
            assert_close(rest, theirs[6:])


CASES: dict[str, Callable[[], None]] = {
    **{name: partial(as_torch, name) for name in AS_TORCH},
    **{
        case.__name__: case
        for case in (bfloat16, gradients, recipe, checkpoints, checkpoints_of_bfloat16, refused, lightning)
    },
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of the cases on each rank; `on_one_rank` reads files of theirs."""
    folder = tmp_path_factory.mktemp("fsdp")
    found = run_functions(CASES, folder)
    return found | run_functions({"on_one_rank": on_one_rank}, folder, ranks=1)


@pytest.mark.parametrize("name", [*CASES, "on_one_rank"])
def test_fsdp(name: str, errors: dict[str, list[str]]) -> None:
    for error in errors[name]:
        assert not error, error
