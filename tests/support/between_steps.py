"""What users do between two steps, in which hooks, and what happens: `USES` is tested (`test_between_steps.py`) and documented
(`docs/between_steps.py`).
"""

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.runtime.zero import GatheredParameters
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from callbacks import Act
from networks import SmallNet

WEIGHTS = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start")
BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")


@dataclass(frozen=True, kw_only=True)
class Use:
    """Something that users do."""

    acts: Mapping[str, Act]
    """Ways to do it. Tensors that they return are compared."""
    hooks: tuple[str, ...]
    """Hooks of a callback or of the module."""
    refused: str = ""
    """Pattern that the error's message has; none: the effect is that under `strategy="auto"`."""
    instead: str = ""
    """For the reader, where it is refused."""
    where: str = "nothing late"
    """Configuration under which it is refused, one of the test's; not of uses that work."""


class Does(pl.Callback):
    """Writes weights in the ways that `WRITES` has under some names, in turn, behind each batch; other processes can import it."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._n_writes = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        WRITES[self._names[self._n_writes % len(self._names)]](trainer)
        self._n_writes += 1


class Wrapper:
    """Passes all on to an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class StepsItself(SmallNet):
    """Runs the closure before the step, and leaves out one step of three."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        if batch_idx % 3 != 1:
            optimizer.step()


def scale(name: str, trainer: pl.Trainer) -> None:
    """Writes one weight."""
    parameter = trainer.lightning_module.get_parameter(name)
    with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.mul_(0.9)


def head(module: nn.Module) -> list[Tensor]:
    """Parameters of a module's last layer."""
    return list(list(module.children())[-1].parameters())


def writes(write: Callable[[Any, pl.Trainer], object]) -> Act:
    """Calls a function with the module, which may write its weights, whatever the stage."""

    def act(trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        with GatheredParameters(list(module.parameters()), modifier_rank=0), torch.no_grad():
            write(module, trainer)

    return act


def load(module: nn.Module, *_: Any) -> None:
    """Loads other weights."""
    module.load_state_dict({name: 0.9 * w if w.is_floating_point() else w for name, w in module.state_dict().items()})


def change_hyperparameters(trainer: pl.Trainer) -> None:
    """Gives each step others."""
    step = trainer.global_step
    for group in trainer.optimizers[0].param_groups:
        group.update(lr=1e-3 * (1 + step), betas=(0.8, 0.9 + 0.01 * step), weight_decay=0.1 * step, eps=1e-6)


def change(trainer: pl.Trainer, name: str, value: Any) -> None:
    """Changes an option of the Trainer in mid-run."""
    if trainer.global_step == 3:
        setattr(trainer, name, value)


def drop(trainer: pl.Trainer) -> None:
    """Drops the gradients of two steps."""
    if trainer.global_step == 2:
        trainer.optimizers[0].zero_grad()
    if trainer.global_step == 4:
        trainer.lightning_module.zero_grad()


def optimized(trainer: pl.Trainer) -> list[Tensor]:
    """Parameters that the optimizer's groups have."""
    return [p for group in trainer.optimizers[0].param_groups for p in group["params"]]


def gradients(use: Callable[[Tensor], object]) -> Act:
    """Calls a function with each gradient that is there; returns what it returns of the last."""
    return lambda trainer: [use(p.grad) for p in trainer.lightning_module.parameters() if p.grad is not None][-1:]


def clip(max_norm: float, trainer: pl.Trainer) -> Tensor:
    """Clips by torch's function; other processes can import it."""
    return nn.utils.clip_grad_norm_(trainer.lightning_module.parameters(), max_norm)


def behind_first_step(act: Act, trainer: pl.Trainer) -> object:
    """Does something where there has been a step."""
    return trainer.global_step and act(trainer)


def given(module: nn.Module) -> list[Tensor]:
    """The gradients that are there."""
    return [p.grad for p in module.parameters() if p.grad is not None]


WRITES: dict[str, Act] = {
    "clamped": writes(lambda m, _: [p.clamp_(-0.1, 0.1) for p in head(m)]),
    "clamped through data": writes(lambda m, _: [p.data.clamp_(-0.1, 0.1) for p in head(m)]),
    "some rows zeroed": writes(lambda m, _: m.embedding.weight[::3].zero_()),
    "normalised": writes(lambda m, _: m.head.weight.copy_(nn.functional.normalize(m.head.weight, dim=1))),
    "initialised anew": writes(lambda m, _: nn.init.eye_(m.hidden.weight)),
    "reset": writes(lambda m, _: nn.init.constant_(m.head.weight.data, 0.1)),
    "halved, as the optimizer has them": writes(lambda _, t: [p.mul_(0.5) for p in optimized(t)]),
    "averaged": writes(lambda m, _: m.hidden.weight.lerp_(torch.ones((), dtype=torch.float32), 0.01)),
}


def evaluate(trainer: pl.Trainer) -> None:
    """A forward pass without gradients, in evaluation mode."""
    module = trainer.lightning_module.eval()
    try:
        with torch.no_grad():
            module.loss(0, 1, 0)
    finally:
        module.train()


READS: dict[str, Act] = {
    "copied": lambda t: [p.detach().clone() for p in t.lightning_module.parameters()],
    "norm through data": lambda t: t.lightning_module.head.weight.data.norm(),
    "one element": lambda t: t.lightning_module.head.weight[0, 0].item(),
    "a forward pass": lambda t: t.lightning_module.loss(0, 1, 0),
    "a forward pass of one layer": lambda t: t.lightning_module.hidden(
        torch.zeros(1, t.lightning_module.hidden.in_features, dtype=torch.float32)
    ),
    "evaluated": evaluate,
    "state_dict": lambda t: t.lightning_module.state_dict(),
    "deep copy": lambda t: copy.deepcopy(t.lightning_module.head),
    "pickled": lambda t: pickle.dumps(t.lightning_module.head),
    "as one vector": lambda t: nn.utils.parameters_to_vector(t.lightning_module.parameters()),
    "compiled": lambda t: torch.compile(t.lightning_module.hidden, backend="eager")(
        torch.zeros(1, t.lightning_module.hidden.in_features, dtype=torch.float32)
    ),
    "put back at once": lambda t: t.lightning_module.head.weight.data.mul_(1.0),
}

GRADIENT_READS: dict[str, Act] = {
    "copied": lambda t: torch.cat([g.clone().flatten() for g in given(t.lightning_module)]),
    "norm": lambda t: torch.stack([g.norm() for g in given(t.lightning_module)]),
    "norms of rows": lambda t: torch.cat([g.norm(dim=0).flatten() for g in given(t.lightning_module)]),
    "as lists": lambda t: torch.tensor([sum(g.flatten().tolist()) for g in given(t.lightning_module)]),
    "as arrays": lambda t: torch.cat([torch.from_numpy(g.numpy()).flatten() for g in given(t.lightning_module)]),
    "pickled": lambda t: torch.cat([pickle.loads(pickle.dumps(g)).flatten() for g in given(t.lightning_module)]),
    "added to others": lambda t: torch.stack([g.new_ones(g.shape).add_(g).norm() for g in given(t.lightning_module)]),
    "Lightning's norms": lambda t: torch.stack([*grad_norm(t.lightning_module, 2).values()][-1:]),
    "Lightning's largest": lambda t: torch.stack([*grad_norm(t.lightning_module, "inf").values()][-1:]),
}
SCALES: dict[str, Act] = {
    "clipped": partial(clip, 0.01),
    "clipped, as the optimizer has them": lambda t: nn.utils.clip_grad_norm_(optimized(t), 0.02, foreach=False),
    "doubled": gradients(lambda g: g.mul_(2.0)),
}

USES: dict[str, Use] = {
    "write weights in place (`p.clamp_()`, `p.data.clamp_()`, `p.copy_()`, `nn.init`, `reset_parameters`)": Use(
        acts=WRITES, hooks=WEIGHTS
    ),
    "`module.load_state_dict(...)`": Use(acts={"load": writes(load)}, hooks=("on_train_start", "on_train_epoch_start")),
    "write weights between backward and step": Use(
        acts={"clamped": WRITES["clamped"]},
        hooks=BEFORE_STEP,
        refused="head.weight must not be written between backward and step",
        instead="write them in `on_train_batch_start` or `on_train_batch_end`",
    ),
    "give weights other memory (`p.data = ...`, `load_state_dict(..., assign=True)`)": Use(
        acts={"data": lambda t: [setattr(p, "data", p.data.clone()) for p in head(t.lightning_module)]},
        hooks=("on_train_batch_start", "on_train_batch_end"),
        refused="head.weight must keep its memory",
        instead="write them in place",
    ),
    "move the module to its own device (`module.to(trainer.strategy.root_device)`)": Use(
        acts={"move": lambda t: t.lightning_module.to(t.strategy.root_device)}, hooks=WEIGHTS
    ),
    "read weights": Use(
        acts={"read": lambda t: t.lightning_module.head.weight.detach().clone()}, hooks=("on_train_batch_end",)
    ),
    "read weights, by a forward pass, a copy, `state_dict()` or otherwise, between backward and step": Use(
        acts=READS,
        hooks=BEFORE_STEP,
        refused="must not be (read|written) between backward and step",
        instead="read them in `on_train_batch_start` or `on_train_batch_end`; as under `auto` with `overlap_step: false`",
        where="in backward",
    ),
    "freeze parameters (`p.requires_grad_(False)`)": Use(
        acts={"frozen": lambda t: [p.requires_grad_(t.global_step < 3) for p in head(t.lightning_module)]},
        hooks=("on_train_batch_start", "on_train_batch_end"),
    ),
    "read gradients (`p.grad`), their norms (Lightning's `grad_norm`)": Use(acts=GRADIENT_READS, hooks=BEFORE_STEP),
    "clip gradients by torch's `clip_grad_norm_`, or scale all by one number": Use(acts=SCALES, hooks=BEFORE_STEP),
    "scale gradients where weights are late, or shown with a predicted factor": Use(
        acts=SCALES,
        hooks=BEFORE_STEP,
        refused="must not be scaled where weights are late .*register_hook",
        instead="use `gradient_clip_val`; or set S = 1, d = 0 and `clip_prediction: false`",
        where="in backward",
    ),
    "change gradients otherwise": Use(
        acts={
            "through data": gradients(lambda g: g.data.zero_()),
            "rows": gradients(lambda g: g[:1].mul_(0.5)),
            "noise": gradients(lambda g: g.add_(torch.ones_like(g))),
            "by elements": gradients(lambda g: g.mul_(torch.ones(2, dtype=g.dtype))),
            # torch refuses to clip none.
            "clipped by value": lambda t: (
                t.global_step and nn.utils.clip_grad_value_(t.lightning_module.parameters(), 1.0)
            ),
            "set to zero": lambda t: t.lightning_module.zero_grad(set_to_none=False),
        },
        hooks=BEFORE_STEP,
        refused="(would change it|must be multiplied by one number).*register_hook",
        instead="use `p.register_hook`",
    ),
    "use gradients behind the step": Use(
        acts={name: partial(behind_first_step, act) for name, act in (GRADIENT_READS | SCALES).items()},
        hooks=("on_train_batch_end", "on_before_zero_grad"),
        refused="must be used before `optimizer.step.*register_hook",
        instead="use them in `on_before_optimizer_step`",
    ),
    "assign gradients (`p.grad = ...`)": Use(
        acts={
            "removed": lambda t: [setattr(p, "grad", None) for p in head(t.lightning_module)],
            "replaced": lambda t: [setattr(p, "grad", torch.ones_like(p)) for p in t.lightning_module.parameters()],
        },
        hooks=BEFORE_STEP,
        refused=r"head.weight, .*head.bias must not be assigned .*requires_grad_\(False\)",
        instead="use `p.register_hook`, or `p.requires_grad_(False)` before the forward pass",
    ),
    "drop a step's gradients (`zero_grad()` of optimizer or module)": Use(acts={"drop": drop}, hooks=BEFORE_STEP),
    "write hyperparameters to `optimizer.param_groups`": Use(
        acts={"changed": change_hyperparameters},
        hooks=("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"),
    ),
    "change `trainer.gradient_clip_val`": Use(
        acts={"set": lambda t: change(t, "gradient_clip_val", 0.01)},
        hooks=("on_train_batch_start", "on_before_optimizer_step"),
    ),
    "clip by value (`trainer.gradient_clip_algorithm`)": Use(
        acts={
            "by value": lambda t: (
                setattr(t, "gradient_clip_val", 0.1),
                setattr(t, "gradient_clip_algorithm", "value"),
            )
        },
        hooks=("on_train_batch_start",),
        refused="gradient_clip_algorithm must be 'norm'",
        instead="clip by norm",
    ),
    "read or write `optimizer.state`": Use(
        acts={
            "of the Trainer": lambda t: t.optimizers[0].state.clear(),
            "of the module": lambda t: t.lightning_module.optimizers().state.clear(),
        },
        hooks=("on_train_batch_start",),
        refused="safe_set_full_optimizer_state",
        instead="use `safe_get_full_optimizer_state`, `safe_set_full_optimizer_state`",
    ),
    "`optimizer.load_state_dict(...)`": Use(
        acts={"own": lambda t: t.optimizers[0].load_state_dict(t.optimizers[0].state_dict())},
        hooks=("on_train_batch_start",),
        refused="load_state_dict must not be called in training",
        instead="use `fit(ckpt_path=...)`, `safe_set_full_optimizer_state`",
    ),
    "wrap the optimizer (`trainer.optimizers = ...`)": Use(
        acts={"wrapped": lambda t: setattr(t, "optimizers", [Wrapper(o) for o in t.optimizers])},
        hooks=("on_train_batch_start",),
        refused=r"trainer.optimizers must be the strategy's own, got between_steps.Wrapper",
        instead="use a callback",
    ),
    "`add_param_group`, `strategy.setup_optimizers`": Use(
        acts={
            "group": lambda t: t.optimizers[0].add_param_group({"params": []}),
            "group of the module's": lambda t: t.lightning_module.optimizers().add_param_group({"params": []}),
            "set-up": lambda t: t.strategy.setup_optimizers(t),
        },
        hooks=("on_train_batch_start",),
        refused="(add_param_group|setup_optimizers) must not be called",
        instead="give `configure_optimizers` all parameters",
    ),
}
