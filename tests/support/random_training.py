"""One training of a random module under `ZenFlowStrategy`, checked bit by bit against the worker's AdamW in torch and against torch's own.

The gradients that the run computes are recorded. Whatever the configuration, the exact state after `fit` is AdamW's on these gradients.
With nothing late each step's weights are as well, and the gradients are those that the module has in plain torch at these weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn
from typing_extensions import override

from harness import FlushAfter, make_trainer, workers
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.config import ZenFlowConfig
from models import TestModule
from random_modules import ModuleOptions, RandomNet
from reference import Group, places_of_elements
from replay_reference import ReplayedAdamW

FACTORS = {
    "none": lambda step: 1.0,
    "warm-up from 0": lambda step: min(1.0, step / 2),
    "decay": lambda step: 1 / (1 + 0.25 * step),
}
"""Schedulers: factors of learning rates by step."""


@dataclass(frozen=True)
class Mistake:
    """What a training cannot be done with."""

    where: str
    """What it belongs to: "keywords" of the strategy, "deepspeed" (the configuration), "trainer", "optimizer" or "module"."""
    key: str
    value: Any
    named: str
    """What the error must say, as a regular expression."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """All but the strategy."""

    module: ModuleOptions = field(default_factory=ModuleOptions)
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
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Trainer."""
    mistake: Mistake | None = None

    def mistaken(self, where: str) -> dict[str, Any]:
        """The mistake, if it is one of these."""
        return {self.mistake.key: self.mistake.value} if self.mistake and self.mistake.where == where else {}

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if "bf16" in str(self.precision) else torch.float32


class Trained(TestModule):
    """The module of a `Training`, which records gradients, shown weights and clip factors."""

    def __init__(self, training: Training) -> None:
        super().__init__(length=training.steps * training.accumulate, accumulate=training.accumulate)
        self.training_options = training
        self.net = RandomNet(training.module)
        self.groups: list[list[nn.Parameter]] = [[] for _ in training.groups]
        for i, p in enumerate(self.net.optimized()):
            self.groups[i % len(self.groups)].append(p)
        for spoil in training.mistaken("module").values():
            spoil(self)
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
        mistake = options.mistaken("optimizer")
        if "number" in mistake:
            return [torch.optim.AdamW([p]) for p in self.trained[: mistake["number"]]] or None
        if "params" in mistake:
            groups.append({"params": mistake["params"]()})
        groups[-1].update(
            {key: value for key, value in mistake.items() if key in ("lr", "betas", "eps", "weight_decay")}
        )
        wrong = {key: value for key, value in mistake.items() if key in ("amsgrad", "maximize", "differentiable")}
        flags = wrong or ({} if mistake else options.flags)
        optimizer = mistake.get("class", getattr(torch.optim, options.kind))(groups, **flags)
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


def hyperparameters(training: Training, step: int) -> list[Group]:
    """Of each parameter group."""
    factor = FACTORS[training.schedule](step)
    return [
        Group(
            lr=h.lr * factor,
            beta1=h.beta1,
            beta2=h.beta2,
            eps=h.eps,
            weight_decay=h.weight_decay,
            decoupled=training.kind == "AdamW" or bool(training.flags.get("decoupled_weight_decay")),
        )
        for h in training.groups
    ]


def gradients_of_step(training: Training, model: Trained, step: int) -> list[Tensor]:
    """Summed over micro-batches in the model's type, zero where there is none."""
    result = []
    for p in model.trained:
        of_micro = model.gradients[step].get(p, [])
        total = of_micro[0].clone() if of_micro else torch.zeros_like(p)
        for gradient in of_micro[1:]:
            total += gradient
        result.append(total)
    return result


def in_plain_torch(training: Training, trained: Trained) -> tuple[Trained, list[nn.Parameter]]:
    """The module as DeepSpeed trains it: in its type, contiguous, and as far from a cache line, on which torch's kernels depend."""
    model = Trained(training)
    if training.precision in ("bf16-mixed", "bf16"):
        for p in model.parameters():
            p.data = p.data.to(training.dtype)
    else:
        # Buffers as well.
        model.to(training.dtype)
    for p, other in zip(model.parameters(), trained.parameters(), strict=True):
        memory = torch.empty(p.numel() + 128, dtype=p.dtype)
        first = (other.data_ptr() - memory.data_ptr()) % 64 // p.element_size()
        p.data = memory[first : first + p.numel()].view(p.shape).copy_(p.data)
    return model, model.trained


def check_gradients(training: Training, model: Trained) -> None:
    """The recorded gradients are those of the module in plain torch at the shown weights, and buffers go the same way."""
    plain, parameters = in_plain_torch(training, model)
    for step, shown in enumerate(model.shown):
        with torch.no_grad():
            for p, weights in zip(parameters, shown, strict=True):
                p.copy_(weights)
        totals: list[Tensor | None] = [None] * len(parameters)
        for micro in range(training.accumulate):
            loss = plain.loss(step, micro, 0) / training.accumulate
            for p in parameters:
                p.grad = None
            loss.backward()
            for i, p in enumerate(parameters):
                if p.grad is not None:
                    so_far = totals[i]
                    totals[i] = p.grad if so_far is None else so_far + p.grad
        recorded = gradients_of_step(training, model, step)
        for i, (ours, theirs, p) in enumerate(zip(recorded, totals, parameters, strict=True)):
            same(ours, torch.zeros_like(p) if theirs is None else theirs, f"gradient {i} in step {step}")
    for (name, ours), theirs in zip(model.net.named_buffers(), plain.net.buffers(), strict=True):
        same(ours, theirs, f"buffer {name}")
    frozen = [(name, p) for name, p in model.net.named_parameters() if not p.requires_grad]
    still = dict(plain.net.named_parameters())
    for name, p in frozen:
        same(p.detach(), still[name].detach(), f"frozen {name}")


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a configuration promises."""

    nothing_late: bool
    """The model shows AdamW's weights in every step."""
    exact: bool
    """The state after `fit` is known to the bit from gradients alone."""

    @classmethod
    def of(cls, config: ZenFlowConfig, *, clipped: bool) -> "Promise":
        in_backward = config.submits_in_backward
        nothing_late = (
            config.is_immediate
            and config.weight_prediction in ("auto", 0)
            # A forward pass then sees a predicted clip factor.
            and not (in_backward and clipped)
        )
        # Moments of 16 bits are rounded where windows end, which is each step only if there are no longer ones.
        every_step = config.update_intervals == [1] and config.publish_lags == [0] and not config.allows_tail
        return cls(nothing_late=nothing_late, exact=config.moments_dtype == "float32" or every_step)


def check_against_adamw(
    training: Training, model: Trained, initial: Sequence[Tensor], promise: Promise, max_norm: float, *, bf16: bool
) -> None:
    """Bit by bit with the oracle, and to rounding with torch's optimizer in float64."""
    groups = model.parameter_groups()
    count = 0
    elements = [torch.zeros(0)] * len(model.trained)
    if bf16:
        _, elements = places_of_elements(groups, 1, 1)
    oracle = ReplayedAdamW(master=list(initial), elements=elements)
    torchs = [nn.Parameter(w.double()) for w in initial]
    theirs = getattr(torch.optim, training.kind)([{"params": [p]} for p in torchs], **{**training.flags, "fused": None})
    for step in range(training.steps):
        if promise.nothing_late:
            for i, (shown, master) in enumerate(zip(model.shown[step], oracle.master, strict=True)):
                same(shown, master.to(training.dtype), f"parameter {i} as shown in step {step}")
        gradients, factor = gradients_of_step(training, model, step), model.factors[step]
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()
        if math.isfinite(factor):
            expected = 1 / max(1.0, (norm + 1e-6) / max_norm) if max_norm else 1.0
            assert math.isclose(factor, expected, rel_tol=1e-5), (factor, expected)
            count += 1
        else:
            assert not math.isfinite(norm)
        of_groups = hyperparameters(training, step)
        of_parameters = [h for h, group in zip(of_groups, groups, strict=True) for _ in group]
        oracle.step(gradients, of_parameters, factor)
        if bf16:
            oracle.close_windows([torch.ones_like(g, dtype=torch.bool) for g in gradients], step + 1)
        if math.isfinite(factor):
            for p, g, entry, h in zip(torchs, gradients, theirs.param_groups, of_parameters, strict=True):
                p.grad = g.double() * factor
                entry.update(lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay)
            theirs.step()
    for i, p in enumerate(model.trained):
        if not p.numel():
            # DeepSpeed leaves it out.
            continue
        state = [safe_get_full_fp32_param(p), *(safe_get_full_optimizer_state(p, k) for k in ("exp_avg", "exp_avg_sq"))]
        kinds = {"master": oracle.master[i], "exp_avg": oracle.exp_avg[i], "exp_avg_sq": oracle.exp_avg_sq[i]}
        for ours, (kind, known) in zip(state, kinds.items(), strict=True):
            assert ours is not None, (i, kind, tuple(p.shape))
            same(ours, known, f"{kind} of parameter {i}")
        same(p.detach(), oracle.master[i].to(training.dtype), f"parameter {i} at the end")
        if count and not bf16:
            largest = max(h.lr for s in range(training.steps) for h in hyperparameters(training, s))
            torch.testing.assert_close(
                oracle.master[i].double(), torchs[i].detach(), rtol=1e-5, atol=1e-6 + 1e-4 * largest, equal_nan=True
            )


def train(training: Training, strategy: ZenFlowStrategy) -> str:
    """Trains and checks.

    Returns:
        What was found: "equal in every step", "exact state equal" or "finite".
    """
    config = strategy.zenflow_config
    model = Trained(training)
    options = {
        "max_steps": training.steps,
        "accumulate_grad_batches": training.accumulate,
        "gradient_clip_val": training.max_norm,
        "precision": training.precision,
        "callbacks": [FlushAfter(training.flush_after)],
        **training.trainer,
        **training.mistaken("trainer"),
    }
    if config.requires_tail:
        # Refused: the tail's length is measured.
        options.pop("deterministic", None)
    try:
        trainer = make_trainer(strategy, **options)
        trainer.fit(model)
    finally:
        torch.use_deterministic_algorithms(False)
        assert workers() == []
    assert trainer.global_step == training.steps
    assert strategy.zenflow_optimizer is not None
    _, plain = in_plain_torch(training, model)
    promise = Promise.of(config, clipped=strategy.zenflow_optimizer.max_norm > 0)
    if not promise.exact:
        for p in model.trained:
            assert torch.isfinite(p).all()
        return "finite"
    # As DeepSpeed makes master weights of the model's.
    initial = [p.detach().float() for p in plain]
    max_norm = strategy.zenflow_optimizer.max_norm
    check_against_adamw(training, model, initial, promise, max_norm, bf16=config.moments_dtype == "bfloat16")
    if not promise.nothing_late:
        return "exact state equal"
    check_gradients(training, model)
    return "equal in every step"


def must_be_refused(training: Training) -> str | None:
    """What the error must say, as a regular expression; None: it must train."""
    if training.mistake is not None:
        return training.mistake.named
    for parameters in Trained(training).groups:
        trains = any(p.requires_grad and p.numel() for p in parameters)
        # DeepSpeed leaves out groups without parameters.
        if not trains and (parameters or training.schedule != "none"):
            return "params must be a list with a"
    return None
