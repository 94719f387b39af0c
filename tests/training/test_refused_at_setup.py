"""What is refused, by the name of the key, parameter or callback, and before the first step wherever that shows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from typing_extensions import override

from callbacks import At
from harness import fit, make_trainer
from lightning_zenflow import ZenFlowStrategy
from models import TINY, LinearLossModule
from side_by_side import Net


class Model(LinearLossModule):
    """May have one more module, or an optimizer of its own.

    Args:
        part: the module, by its name in error messages.
        optimizers: what `configure_optimizers` returns for the parameters.
    """

    def __init__(
        self,
        part: nn.Module | None = None,
        *,
        optimizers: Callable[[list[nn.Parameter]], Any] | None = None,
    ) -> None:
        super().__init__(shapes=TINY)
        if part is not None:
            self.part = part
        self.optimizers_of = optimizers

    @override
    def configure_optimizers(self) -> Any:
        of = self.optimizers_of
        return super().configure_optimizers() if of is None else of([*self.parameters()])


def with_weights(*weights: Tensor) -> Model:
    return Model(nn.ParameterList(nn.Parameter(w) for w in weights))


def with_a_complex_buffer() -> Model:
    part = nn.Module()
    part.register_buffer("rotations", torch.ones(3, dtype=torch.complex64))
    return Model(part)


def free_memory(trainer: pl.Trainer) -> None:
    weight = next(trainer.lightning_module.parameters())
    weight.data = torch.empty(0, dtype=torch.float32)


def with_frozen_weight_in_the_same_memory() -> Model:
    """Behind the one that is trained."""
    model = with_weights(*[torch.ones(3)] * 2)
    model.part[1].requires_grad_(False)  # type: ignore[index]
    return model


def two_schedulers(parameters: list[nn.Parameter]) -> Any:
    optimizer = torch.optim.AdamW(parameters)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, n) for n in (2, 3)]


class WithoutLoss(LinearLossModule):
    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Finetuning(BaseFinetuning):
    @override
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        """Freezes nothing."""


class Transformed(Net):
    """Calls its last layer in its own way."""

    def __init__(self, transform: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.transform = transform

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.transform(self.head, torch.ones(4, 11)).sum()


def of_other_weights(head: nn.Module, x: Tensor) -> Any:
    return functional_call(head, {name: p * 2 for name, p in head.named_parameters()}, (x,))


Refused = list[tuple[Callable[[], Any], str]]


def adamw(*groups: dict[str, Any], more: Sequence[nn.Parameter] = ()) -> Callable[[list[nn.Parameter]], Any]:
    """Makes an optimizer of the parameters and more, with further groups."""
    return lambda parameters: torch.optim.AdamW([{"params": [*parameters, *more]}, *groups])


def with_config(**config: Any) -> ZenFlowStrategy:
    return ZenFlowStrategy(config=config)


def pruned() -> None:
    """By default it makes the weights of an earlier step the present ones."""
    callback = ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.5)
    fit(Model(nn.Linear(3, 2)), steps=102, callbacks=[callback])


def unfrozen() -> None:
    """What was frozen at set-up."""
    model = LinearLossModule(length=2)
    model.weights[0].requires_grad_(False)
    fit(
        model,
        steps=5,
        callbacks=[At("on_train_epoch_start", lambda t: model.weights[0].requires_grad_(t.current_epoch == 1))],
    )


OURS: Refused = [
    (lambda: ZenFlowStrategy(stage=0), "zero_optimization.stage must be 1, 2 or 3, got 0"),
    (lambda: ZenFlowStrategy(zero_optimization=False), "zero_optimization must be True or absent"),
    (lambda: ZenFlowStrategy(remote_device="nvme"), "remote_device must be None or absent, got 'nvme'"),
    (lambda: fit(Model(), with_config(bf16={"enabled": True})), "bf16.enabled must be False or absent, got True"),
    (lambda: fit(Model(), callbacks=[LearningRateFinder()]), "find the learning rate with another strategy"),
    (lambda: Tuner(make_trainer(ZenFlowStrategy(), max_epochs=1)).lr_find(Model()), "find the learning rate with"),
    (pruned, "part.weight must keep its memory, got another one since set-up"),
    (
        lambda: make_trainer(ZenFlowStrategy(), plugins=[HalfPrecision("bf16-true")]),
        "a precision plugin must be a DeepSpeedPrecision",
    ),
    (
        lambda: fit(Model(), callbacks=[At("on_before_optimizer_step", lambda t: t.strategy.flush())]),
        "flush must be called between two steps",
    ),
    (lambda: fit(Model(), callbacks=[Finetuning()]), "Finetuning must be absent: it adds parameter groups"),
    (lambda: fit(Model(), callbacks=[StochasticWeightAveraging(swa_lrs=0.1)]), "StochasticWeightAveraging must be"),
    # Its last matrix has no gradient in every other step.
    (
        lambda: fit(LinearLossModule(), with_config(zero_optimization={"ignore_unused_parameters": False})),
        "every trained parameter, got none of weights.6: freeze them",
    ),
    (unfrozen, "weights.0.requires_grad must be False, got True"),
    (lambda: fit(WithoutLoss(shapes=TINY), accumulate_grad_batches=4), "training_step must return a loss, got None"),
    (
        lambda: fit(Model(), callbacks=[At("on_before_optimizer_step", free_memory)]),
        "weights.0 must keep its memory, got another one since",
    ),
    (lambda: fit(Model(optimizers=lambda ps: None)), "configure_optimizers must return an optimizer, got None"),
    (lambda: fit(Model(optimizers=lambda ps: [adamw()(ps)] * 2)), "must return one optimizer, got several"),
    (
        lambda: fit(Model(optimizers=two_schedulers), with_config(scheduler={"type": "WarmupLR"})),
        "got several .*, or schedulers beside a DeepSpeed config's",
    ),
    (lambda: fit(Model(optimizers=torch.optim.SGD)), "must be exactly one of torch.optim.AdamW, .*SGD"),
    (
        lambda: fit(Model(optimizers=adamw(more=[nn.Parameter(torch.ones(3, 2))]))),
        r"group 0: params must be parameters of the module, got one of shape \[3, 2\] at place 2",
    ),
    (
        lambda: fit(Model(optimizers=adamw({"params": []}))),
        "group 1: params must .* with a trainable parameter, got none",
    ),
    (lambda: fit(with_weights(torch.ones(2)).requires_grad_(False)), "group 0: params must .* got 1 frozen or empty"),
    (lambda: fit(Model(nn.Embedding(5, 3, sparse=True))), "part.sparse must be False, got True"),
    (
        lambda: fit(with_weights(torch.ones(3, dtype=torch.complex64))),
        "part.0 must be a real tensor .* torch.complex64",
    ),
    (lambda: fit(with_a_complex_buffer()), "part.rotations must be a real tensor .* torch.complex64"),
    (lambda: fit(with_weights(torch.ones(1, 3).expand(2, 3))), "part.0 must have memory .* got an expanded tensor"),
    (lambda: fit(with_weights(*[torch.ones(3)] * 2)), "part.1 must have memory .*, got that of part.0"),
    (lambda: fit(with_frozen_weight_in_the_same_memory()), "part.1 must have memory .*, got that of part.0"),
    (
        lambda: fit(Model(), ZenFlowStrategy(stage=3), callbacks=[EMAWeightAveraging()]),
        "EMAWeightAveraging must be absent",
    ),
    *(
        (partial(fit, Transformed(transform), ZenFlowStrategy(stage=3, offload_parameters=on_host)), message)
        for on_host in (False, True)
        for transform, message in (
            (lambda head, x: vmap(head)(x), "Linear must not run in a transform of `torch.func`"),
            (lambda head, x: jacrev(head)(x), "Linear must not run in a transform of `torch.func`"),
            (of_other_weights, "Linear must run with its own parameters"),
        )
    ),
    (
        lambda: fit(Model(), with_config(data_types={"grad_accum_dtype": "bf16"})),
        "does not support data_types.grad_accum",
    ),
    (lambda: fit(Model(nn.Linear(3, 2).double())), "part.weight must .* at most 32 bits, got torch.float64"),
]


@pytest.mark.parametrize(("refused", "message"), OURS)
def test_refused(refused: Callable[[], Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        refused()


OTHERS: Refused = [
    (lambda: fit(Model(), callbacks=[GradientAccumulationScheduler({0: 2})]), "`accumulate_grad_batches` changing"),
    (lambda: Tuner(make_trainer(ZenFlowStrategy(), max_epochs=1)).scale_batch_size(Model()), "not supported with dis"),
    (lambda: fit(Model(), gradient_clip_val=1.0, gradient_clip_algorithm="value"), "clipping gradients by value"),
    (lambda: fit(Model(), ZenFlowStrategy(worker_cores=[4000])), r"worker_cores must be distinct .*, got \[4000\]"),
]


@pytest.mark.parametrize(("refused", "message"), OTHERS)
def test_refused_by_lightning_deepspeed_or_the_machine(refused: Callable[[], Any], message: str) -> None:
    with pytest.raises((MisconfigurationException, NotImplementedError, RuntimeError, ValueError), match=message):
        refused()
