"""What an `OffloadAdamW` needs and leaves: imports, processes, memory."""

import copy
import gc
import logging
import os
import pickle
import re
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from example_runs import run_python
from lightning_zenflow import OffloadAdamW
from lightning_zenflow.core.errors import MisconfigurationException
from plain_loops import Loop, close, groups_of, loss_of, make_loop, make_model, make_optimizer
from processes import workers

ALONE = """
import sys
import torch
from lightning_zenflow import OffloadAdamW

model = torch.nn.Linear(4, 4)
optimizer = OffloadAdamW(model.parameters(), worker_cores=1)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print([name for name in ("lightning", "deepspeed", "pytorch_lightning") if name in sys.modules])
assert not torch.distributed.is_initialized()
"""


def test_alone(tmp_path: Path) -> None:
    """Neither Lightning nor DeepSpeed is imported, and the worker ends with the program."""
    ended = run_python(tmp_path, "-c", ALONE, timeout=120)
    assert ended.stdout == "[]\n" and "Warning" not in ended.stderr


def test_names_are_registered_when_lightning_is_imported(tmp_path: Path) -> None:
    code = (
        "import lightning_zenflow; from lightning.pytorch.strategies import StrategyRegistry;"
        " from lightning.fabric.strategies import STRATEGY_REGISTRY;"
        " assert {'zenflow', 'zenflow_adamw'} <= {*StrategyRegistry} & {*STRATEGY_REGISTRY}"
    )
    run_python(tmp_path, "-c", code, timeout=120)


def test_ends_with_the_object() -> None:
    loop = make_loop("ours").train(2)
    assert len(workers()) == 1
    parameter, model = loop.model[0].weight, loop.model
    loss_of(model, 3).backward()
    kept = parameter.grad
    assert isinstance(loop.optimizer, OffloadAdamW) and loop.optimizer._engine is not None
    gone = weakref.ref(loop.optimizer), weakref.ref(loop.optimizer._engine.training)
    del loop
    gc.collect()
    assert not any(reference() for reference in gone)
    assert not workers()
    with pytest.raises(ReferenceError):
        kept.norm()
    assert parameter.grad is None
    # The model is as if it had not been.
    loss_of(model, 1).backward()
    assert type(parameter.grad) is torch.Tensor


def test_forks() -> None:
    """A child that drops its copy ends neither the worker nor the training."""
    loop, other = make_loop("ours").train(2), make_loop("ours").train(4)
    child = os.fork()
    if child == 0:
        loop.optimizer.__dict__.clear()
        del loop
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert loop.train(2).losses == other.losses


def test_closed() -> None:
    """The weights stay, and a further step is refused."""
    loop = make_loop("ours").train(2)
    close(loop)
    weights = loop.weights()
    close(loop)
    assert all(map(torch.equal, loop.weights(), weights))
    with pytest.raises(
        MisconfigurationException, match=r"OffloadAdamW: a backward pass must not come behind `close\(\)`"
    ):
        loss_of(loop.model, 1).backward()


@pytest.mark.parametrize("closes", [True, False])
def test_summary(closes: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of 50 steps or more, once, at the end."""
    with caplog.at_level(logging.INFO):
        for steps in (49, 50):
            weight = nn.Parameter(torch.ones(2, 2))
            optimizer = OffloadAdamW([weight], worker_cores=1)
            assert optimizer.telemetry is None
            for _ in range(steps):
                weight.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.telemetry is not None and optimizer.telemetry.steps == steps
            if closes:
                optimizer.close()
            del optimizer
            gc.collect()
    assert re.findall(r"ZenFlow: (\d+) steps, median", caplog.text) == ["50"]
    assert not workers()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies(copied: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled or copied.*state_dict"):
        copied(OffloadAdamW(make_model().parameters(), worker_cores=1))


def test_killed_worker() -> None:
    """The worker is started again, and nothing is other than without."""
    other = make_loop("ours").train(6)
    close(other)
    loop = make_loop("ours").train(3)
    for pid in workers():
        os.kill(pid, signal.SIGKILL)
    assert loop.train(3).losses == other.losses
    close(loop)


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (lambda model: model.double(), {}, "OffloadAdamW: .*must be dense and of torch.float32"),
        (lambda model: model[0].to(torch.bfloat16), {}, "OffloadAdamW: .*must be of one type and device"),
        (lambda model: model.requires_grad_(False), {}, "OffloadAdamW: .*some parameter must require gradients"),
        (
            lambda model: setattr(model[-1].weight, "data", model[-1].weight.data.t().contiguous().t()),
            {},
            "OffloadAdamW: .*must be contiguous",
        ),
        (nn.Module.train, {"lr": -1.0}, "lr must be"),
        (nn.Module.train, {"betas": (0.9, 1.0)}, "beta2 must be"),
        (nn.Module.train, {"accumulation_steps": 0}, "accumulation_steps must be"),
        (nn.Module.train, {"moments_dtype": "float16"}, "moments_dtype must be"),
    ],
)
def test_refused_parameters_and_values(change: Any, keys: dict[str, Any], message: str) -> None:
    change(model := make_model())
    with pytest.raises((MisconfigurationException, ValueError), match=message):
        OffloadAdamW(model.parameters(), worker_cores=1, **keys).load_state_dict(
            torch.optim.AdamW(model.parameters()).state_dict()
        )


def test_further_parameters() -> None:
    """Before the first backward pass."""
    loops = []
    for who in ("ours", "torch"):
        model = make_model()
        first, *rest = groups_of(model)
        loops.append(Loop(model, make_optimizer(who, [first])))
        for group in rest:
            loops[-1].optimizer.add_param_group(group)
        loops[-1].train(3)
    torch.testing.assert_close(loops[0].losses, loops[1].losses, rtol=3e-6, atol=0)


def test_trained_later() -> None:
    """A parameter that did not require gradients when the optimizer got it."""
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = OffloadAdamW(model.parameters(), worker_cores=1)
    model[0].requires_grad_(True)
    with pytest.raises(MisconfigurationException, match=r"requires_grad must be True when the optimizer gets it"):
        loss_of(model, 1).backward()
    del optimizer


def test_refused_in_training() -> None:
    """Other memory of a parameter, further parameters, parts of the graph that are kept, parameters without a gradient."""
    loop = make_loop("ours").train(1)
    with pytest.raises(MisconfigurationException, match="add_param_group must come before"):
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(MisconfigurationException, match="create_graph"):
        loss_of(loop.model, 1).backward(create_graph=True)
    loop.optimizer.zero_grad()
    loop.model[:-1](torch.zeros((1, 2), dtype=torch.int64)).sum().backward()
    with pytest.raises(MisconfigurationException, match="must depend on every trained parameter"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    weight = loop.model[-1].weight
    weight.data = weight.data.clone()
    loss_of(loop.model, 1).backward()
    with pytest.raises(MisconfigurationException, match="must keep its memory"):
        loop.optimizer.step()


def test_assigned_gradients() -> None:
    """Before the first backward pass, and between two steps."""
    loop = make_loop("ours")
    for _ in range(2):
        weight = loop.model[-1].weight
        weight.grad = torch.ones_like(weight)
        with pytest.raises(
            MisconfigurationException, match=r"must come from `loss.backward\(\)`, got one that was assigned"
        ):
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.train(1)


def test_nothing_hides() -> None:
    """A first step with more backward passes than all others: said after some time."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = OffloadAdamW([weight], worker_cores=1)

    def step(n: int) -> None:
        for _ in range(n):
            weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(2)
    for _ in range(49):
        step(1)
    with pytest.warns(UserWarning, match="set accumulation_steps"):
        step(1)
