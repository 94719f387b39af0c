"""One training of a random module under `ZenFlowStrategy`, checked bit by bit against the worker's AdamW in torch and against torch's own.

The gradients that the run computes are recorded. Whatever the configuration, the exact state after `fit` is AdamW's on these gradients.
With nothing late each step's weights are as well, and the gradients are those that the module has in plain torch at these weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn
from typing_extensions import override

from harness import FlushAfter, make_trainer
from lightning_zenflow import ZenFlowStrategy
from models import TestModule
from random_modules import Part, RandomNet
from reference import Group, places_of_elements
from replay_reference import ReplayedAdamW

FACTORS = {
    "none": lambda step: 1.0,
    "warm-up from 0": lambda step: min(1.0, step / 2),
    "decay": lambda step: 1 / (1 + 0.25 * step),
}
"""Schedulers: factors of learning rates by step."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """All but the strategy."""

    parts: tuple[Part, ...] = ()
    """Of the module."""
    seed: int = 0
    kind: str = "AdamW"
    groups: tuple[Group, ...] = (Group(lr=1e-2, weight_decay=0.0731),)
    flags: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer."""
    schedule: str = "none"
    """Key of `FACTORS`."""
    precision: Any = "32-true"
    accumulate: int = 1
    max_norm: float | None = None
    steps: int = 3
    flush_after: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if "bf16" in str(self.precision) else torch.float32

    def hyperparameters(self, step: int) -> list[Group]:
        """Of each parameter group, in a step counted from 0."""
        factor = FACTORS[self.schedule](step)
        return [replace(h, lr=h.lr * factor, decoupled=self.kind == "AdamW") for h in self.groups]


class Trained(TestModule):
    """The module of a `Training`, which records gradients, shown weights and clip factors."""

    def __init__(self, training: Training) -> None:
        super().__init__(length=training.steps * training.accumulate, accumulate=training.accumulate)
        self.training_options = training
        self.net = RandomNet(training.parts, training.seed)
        self.groups: list[list[nn.Parameter]] = [[] for _ in training.groups]
        # The base's two parameters first, so that every group trains something.
        for i, p in enumerate(self.net.optimized()):
            self.groups[i % len(self.groups)].append(p)
        self.gradients: list[dict[nn.Parameter, list[Tensor]]] = []
        """[step][parameter]: of the micro-batches."""
        self.shown: list[list[Tensor]] = []
        self.factors: list[float] = []

    @override
    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """The trained ones."""
        return [[p for p in group if p.requires_grad] for group in self.groups]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for group in self.parameter_groups() for p in group]

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        return self.net.loss(step, micro)

    def gradients_of(self, step: int) -> list[Tensor]:
        """Summed over micro-batches in the model's type, zero where there is none."""
        result = []
        for p in self.trained:
            total = torch.zeros_like(p)
            for i, gradient in enumerate(self.gradients[step].get(p, [])):
                total = gradient.clone() if i == 0 else total + gradient
            result.append(total)
        return result

    @override
    def configure_optimizers(self) -> Any:
        options = self.training_options
        groups = [
            {
                "params": parameters,
                "lr": h.lr * FACTORS[options.schedule](0),
                "initial_lr": h.lr,
                "betas": (h.beta1, h.beta2),
                "eps": h.eps,
                "weight_decay": h.weight_decay,
            }
            for parameters, h in zip(self.groups, options.groups, strict=True)
        ]
        optimizer = getattr(torch.optim, options.kind)(groups, **options.flags)
        if options.schedule == "none":
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, FACTORS[options.schedule])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def on_train_start(self) -> None:
        for p in self.trained:
            p.register_hook(
                lambda gradient, p=p: self.gradients[-1].setdefault(p, []).append(gradient.detach().clone())
            )

    @override
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx % self.accumulate == 0:
            self.gradients.append({})
            self.shown.append([p.detach().clone() for p in self.trained])

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.factors) < self.trainer.global_step:
            optimizer = self.trainer.strategy.zenflow_optimizer  # type: ignore[attr-defined]
            arena = optimizer.parts.rank.arena
            self.factors.append(float(arena.step_words.clip[optimizer.zenflow_step.number % arena.n_step_records]))


def same(ours: Tensor, theirs: Tensor, what: str) -> None:
    """The same bits, but that all NaNs are the same."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (what, ours.shape, theirs.shape, ours.dtype)
    equal = torch.isclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert equal.all(), f"{what}: {int((~equal).sum())} of {ours.numel()} elements differ"


def in_plain_torch(training: Training, trained: Trained) -> Trained:
    """The module as DeepSpeed trains it: in its type, contiguous, and as far from a cache line, on which torch's kernels depend."""
    model = Trained(training)
    if training.precision == "bf16-mixed":
        for p in model.parameters():
            p.data = p.data.to(training.dtype)
    else:
        # Buffers as well.
        model.to(training.dtype)
    for p, other in zip(model.parameters(), trained.parameters(), strict=True):
        memory = torch.empty(p.numel() + 128, dtype=p.dtype)
        first = (other.data_ptr() - memory.data_ptr()) % 64 // p.element_size()
        p.data = memory[first : first + p.numel()].view(p.shape).copy_(p.data)
    return model


def check_gradients(training: Training, model: Trained) -> None:
    """The recorded gradients are those of the module in plain torch at the shown weights, and buffers go the same way."""
    plain = in_plain_torch(training, model)
    parameters = plain.trained
    for step, shown in enumerate(model.shown):
        with torch.no_grad():
            for p, weights in zip(parameters, shown, strict=True):
                p.copy_(weights)
        plain.gradients.append({})
        for micro in range(training.accumulate):
            plain.zero_grad()
            (plain.loss(step, micro, 0) / training.accumulate).backward()
            for p in parameters:
                if p.grad is not None:
                    plain.gradients[step].setdefault(p, []).append(p.grad)
        for i, (ours, theirs) in enumerate(zip(model.gradients_of(step), plain.gradients_of(step), strict=True)):
            same(ours, theirs, f"gradient {i} in step {step}")
    still = dict([*plain.net.named_parameters(), *plain.net.named_buffers()])
    frozen = [(name, p.detach()) for name, p in model.net.named_parameters() if not p.requires_grad]
    for name, ours in [*frozen, *model.net.named_buffers()]:
        same(ours, still[name].detach(), name)


def check_against_adamw(
    training: Training, model: Trained, initial: Sequence[Tensor], max_norm: float, *, nothing_late: bool, bf16: bool
) -> None:
    """Bit by bit with the oracle, and to rounding with torch's optimizer in float64."""
    groups = model.parameter_groups()
    elements = places_of_elements(groups, 1, 1)[1] if bf16 else [torch.zeros(0)] * len(model.trained)
    oracle = ReplayedAdamW(master=list(initial), elements=elements)
    torchs = [nn.Parameter(w.double()) for w in initial]
    theirs = getattr(torch.optim, training.kind)([{"params": [p]} for p in torchs])
    for step in range(training.steps):
        if nothing_late:
            for i, (shown, master) in enumerate(zip(model.shown[step], oracle.master, strict=True)):
                same(shown, master.to(training.dtype), f"parameter {i} as shown in step {step}")
        gradients, factor = model.gradients_of(step), model.factors[step]
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()
        expected = 1 / max(1.0, (norm + 1e-6) / max_norm) if max_norm else 1.0
        assert math.isclose(factor, expected, rel_tol=1e-5) if math.isfinite(factor) else not math.isfinite(norm)
        of_parameters = [h for h, ps in zip(training.hyperparameters(step), groups, strict=True) for _ in ps]
        oracle.step(gradients, of_parameters, factor)
        if bf16:
            oracle.close_windows([torch.ones_like(g, dtype=torch.bool) for g in gradients], step + 1)
        if math.isfinite(factor):
            for p, g, entry, h in zip(torchs, gradients, theirs.param_groups, of_parameters, strict=True):
                p.grad = g.double() * factor
                entry.update(lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay)
            theirs.step()
    largest = max(h.lr for step in range(training.steps) for h in training.hyperparameters(step))
    for i, p in enumerate(model.trained):
        if not p.numel():
            # DeepSpeed leaves it out.
            continue
        state = [safe_get_full_fp32_param(p), *(safe_get_full_optimizer_state(p, k) for k in ("exp_avg", "exp_avg_sq"))]
        known = [oracle.master[i], oracle.exp_avg[i], oracle.exp_avg_sq[i]]
        for ours, exact, kind in zip(state, known, ("master weights", "exp_avg", "exp_avg_sq"), strict=True):
            assert ours is not None, (i, kind, tuple(p.shape))
            same(ours, exact, f"{kind} of parameter {i}")
        same(p.detach(), oracle.master[i].to(training.dtype), f"parameter {i} at the end")
        if any(map(math.isfinite, model.factors)) and not bf16:
            torch.testing.assert_close(
                oracle.master[i].double(), torchs[i].detach(), rtol=1e-5, atol=1e-6 + 1e-4 * largest, equal_nan=True
            )


def train_and_check(training: Training, keys: dict[str, Any]) -> None:
    """Trains under a strategy with some keys, and checks what they promise."""
    strategy = ZenFlowStrategy(**keys)
    config = strategy.zenflow_config
    model = Trained(training)
    trainer = make_trainer(
        strategy,
        max_steps=training.steps,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.max_norm,
        precision=training.precision,
        callbacks=[FlushAfter(training.flush_after)],
    )
    trainer.fit(model)
    assert trainer.global_step == training.steps
    assert strategy.zenflow_optimizer is not None
    max_norm = strategy.zenflow_optimizer.clip_grad
    # A forward pass behind a step submitted in backward sees a predicted clip factor.
    predicted = config.submits_in_backward and max_norm > 0
    nothing_late = config.is_immediate and config.weight_prediction in ("auto", 0) and not predicted
    # Moments of 16 bits are rounded where windows end, which is each step only if there are no longer ones.
    bf16 = config.moments_dtype == "bfloat16"
    if bf16 and not (config.update_interval == 1 and config.publish_lag == 0):
        assert all(torch.isfinite(p).all() for p in model.trained)
        return
    # As DeepSpeed makes master weights of the model's.
    initial = [p.detach().float() for p in in_plain_torch(training, model).trained]
    check_against_adamw(training, model, initial, max_norm, nothing_late=nothing_late, bf16=bf16)
    if nothing_late:
        check_gradients(training, model)
