"""What users do between two steps has the effect that it has under plain Lightning, or is refused by name."""

from collections.abc import Callable
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from fabric_runs import set_up, train_step
from harness import fit, snapshot
from lightning_zenflow import ZenFlowStrategy
from models import OneGroup, TestModule
from networks import SmallNet
from side_by_side import NOTHING_LATE

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

LATE: dict[str, Any] = {"update_interval": 4, "publish_lag": 1, "full_warm_up_rounds": 0, "worker_cores": 1}
IN_BACKWARD: dict[str, Any] = {"update_interval": 1, "publish_lag": 0, "worker_cores": 1}
STAGE_3: dict[str, Any] = {**NOTHING_LATE, "stage": 3}
IN_HOST_MEMORY: dict[str, Any] = {"stage": 3, "offload_parameters": True, "worker_cores": 1}
HOW = {
    "nothing late": NOTHING_LATE,
    "in backward": IN_BACKWARD,
    "late": LATE,
    "stage 3": STAGE_3,
    "in host memory": IN_HOST_MEMORY,
}


class At(pl.Callback):
    """Calls a function with the Trainer at one of Lightning's hooks."""

    def __init__(self, hook: str, action: Callable[[pl.Trainer], object]) -> None:
        setattr(self, hook, lambda trainer, *_: action(trainer))


def both(
    keys: dict[str, Any],
    make_callbacks: Callable[[], list[pl.Callback]],
    make_model: Callable[[], TestModule] = SmallNet,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights after the same run under ZenFlow and under plain Lightning."""
    ends = []
    for strategy in (ZenFlowStrategy(**keys), "auto"):
        model = make_model()
        fit(model, strategy, callbacks=make_callbacks(), **{"steps": 6, **options})
        ends.append(snapshot(model))
    return ends[0], ends[1]


def assert_same(ours: list[Tensor], theirs: list[Tensor], atol: float = 2e-6) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def head(module: nn.Module) -> list[Tensor]:
    return list(list(module.children())[-1].parameters())


class TestGradients:
    """They are not in `parameter.grad`."""

    USES: ClassVar[dict[str, Callable[[pl.LightningModule], object]]] = {
        "norm": lambda m: [p.grad.norm() for p in m.parameters() if p.grad is not None],
        "scaled": lambda m: [p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None],
        "through data": lambda m: [p.grad.data.zero_() for p in head(m) if p.grad is not None],
        "clipped": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        "clipped by value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
        "Lightning's norms": lambda m: grad_norm(m, 2),
        "set to zero": lambda m: m.zero_grad(set_to_none=False),
    }
    ASSIGNS: ClassVar[dict[str, Callable[[pl.LightningModule], object]]] = {
        "removed": lambda m: [setattr(p, "grad", None) for p in head(m)],
        "replaced": lambda m: [setattr(p, "grad", torch.ones_like(p)) for p in m.parameters()],
    }

    @pytest.mark.parametrize("use", USES)
    @pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
    def test_used(self, hook: str, use: str) -> None:
        callback = At(hook, lambda trainer: self.USES[use](trainer.lightning_module))
        with pytest.raises(MisconfigurationException, match="must not be used between backward .*register_hook"):
            fit(SmallNet(), ZenFlowStrategy(**NOTHING_LATE), callbacks=[callback], accumulate_grad_batches=2)

    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("assign", ASSIGNS)
    def test_assigned(self, assign: str, how: str) -> None:
        callback = At("on_after_backward", lambda trainer: self.ASSIGNS[assign](trainer.lightning_module))
        with pytest.raises(MisconfigurationException, match=r"head.weight, .*head.bias: .*requires_grad_\(False\)"):
            fit(SmallNet(), ZenFlowStrategy(**HOW[how]), callbacks=[callback])

    @pytest.mark.parametrize("how", HOW)
    def test_dropped(self, how: str) -> None:
        """By the optimizer or the module, after backward or before the step: no update, and no decay."""

        def drop(trainer: pl.Trainer) -> None:
            if trainer.global_step == 2:
                trainer.optimizers[0].zero_grad()
            if trainer.global_step == 4:
                trainer.lightning_module.zero_grad()

        for hook in ("on_after_backward", "on_before_optimizer_step"):
            ours, theirs = both(HOW[how], lambda hook=hook: [At(hook, drop)])
            if how != "late":
                assert_same(ours, theirs)
        steps: list[Tensor] = []
        model = SmallNet()
        weights = At("on_train_batch_end", lambda _: steps.append(snapshot(model)[0]))
        fit(model, ZenFlowStrategy(**HOW[how]), steps=4, callbacks=[At("on_after_backward", drop), weights])
        assert torch.equal(steps[1], steps[2]) or how == "late"

    def test_read(self) -> None:
        """By DeepSpeed's function, and in a hook of the parameter, that changes it as well."""
        read: list[Tensor] = []
        ours, theirs = SmallNet(), SmallNet()
        for model in (ours, theirs):
            model.head.weight.register_hook(lambda gradient: 0.5 * gradient)
        callback = At("on_before_optimizer_step", lambda _: read.append(safe_get_full_grad(ours.head.weight)))
        fit(ours, ZenFlowStrategy(**NOTHING_LATE), steps=1, callbacks=[callback])
        fit(theirs, "auto", steps=1)
        torch.testing.assert_close(read[0], theirs.head.weight.grad)
        assert_same(snapshot(ours), snapshot(theirs))
        assert all(p.grad is None for p in ours.parameters())

    def test_under_fabric(self) -> None:
        fabric, model, optimizer, _ = set_up(SmallNet(), **NOTHING_LATE)
        train_step(fabric, model, optimizer, 0)
        fabric.backward(model.loss(1, 0, 0))
        with pytest.raises(MisconfigurationException, match="must not be used between .*fabric.clip_gradients"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for p in head(model.module):
            p.grad = None
        with pytest.raises(MisconfigurationException, match="head.weight, head.bias: "):
            optimizer.step()
        fabric.strategy.teardown()

    def test_nothing_is_marked_where_no_hook_looks(self) -> None:
        seen: list[bool] = []
        model = OneGroup()
        model.register_full_backward_pre_hook(lambda *_: None)
        trainer = fit(model, steps=1)
        seen.append(trainer.strategy.zenflow_optimizer.marks_gradients)
        trainer = fit(model, steps=1, callbacks=[At("on_after_backward", lambda _: None)])
        seen.append(trainer.strategy.zenflow_optimizer.marks_gradients)
        assert seen == [False, True]


class ClipsItself(SmallNet):
    """Clips by another norm in each step, and not at all in every third."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        step = self.trainer.global_step
        if step % 3:
            self.clip_gradients(optimizer, gradient_clip_val=0.01 * step, gradient_clip_algorithm="norm")


class TestClipping:
    """The norm is asked for in each step."""

    CHANGES = ((None, 0.01), (0.01, None), (1e3, 0.02))

    @pytest.mark.parametrize(("before", "after"), CHANGES)
    @pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step"])
    @pytest.mark.parametrize("how", ["nothing late", "stage 3", "in host memory"])
    def test_changed(self, how: str, hook: str, before: float | None, after: float | None) -> None:
        def change(trainer: pl.Trainer) -> None:
            if trainer.global_step == 3:
                trainer.gradient_clip_val = after

        assert_same(*both(HOW[how], lambda: [At(hook, change)], gradient_clip_val=before))

    @pytest.mark.parametrize("how", ["nothing late", "in backward"])
    def test_by_the_module(self, how: str) -> None:
        keys = {**HOW[how], "clip_prediction": False}
        assert_same(*both(keys, list, ClipsItself))

    def test_deepspeeds_norm_counts_where_the_trainer_has_none(self) -> None:
        ends = []
        for options, clip in (({"config": {"gradient_clipping": 0.01}}, None), ({}, 0.01)):
            model = SmallNet()
            fit(model, ZenFlowStrategy(**NOTHING_LATE, **options), gradient_clip_val=clip)
            ends.append(snapshot(model))
        assert all(map(torch.equal, *ends))

    def test_by_value(self) -> None:
        def change(trainer: pl.Trainer) -> None:
            trainer.gradient_clip_algorithm = "value"

        with pytest.raises(MisconfigurationException, match="gradient_clip_algorithm must be 'norm'"):
            fit(SmallNet(), gradient_clip_val=0.1, callbacks=[At("on_train_batch_start", change)])


class Wrapper:
    """Passes all on to an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class StepsItself(SmallNet):
    """Runs the closure before the step, and leaves steps out.

    Args:
        left_out: of three steps.
    """

    left_out = 1

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        if batch_idx % 3 != self.left_out:
            optimizer.step()


class TestOptimizer:
    """What users do with it."""

    def test_the_closure_may_have_been_run(self) -> None:
        for accumulate in (1, 2):
            make = lambda: StepsItself(length=12)  # noqa: E731
            assert_same(*both(NOTHING_LATE, list, make, accumulate_grad_batches=accumulate))

    def test_changed_hyperparameters(self) -> None:
        def change(trainer: pl.Trainer) -> None:
            for group in trainer.optimizers[0].param_groups:
                step = trainer.global_step
                group.update(lr=1e-3 * (1 + step), betas=(0.8, 0.9 + 0.01 * step), weight_decay=0.1 * step, eps=1e-6)

        for hook in ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"):
            assert_same(*both(NOTHING_LATE, lambda hook=hook: [At(hook, change)]))

    def test_its_hooks_run(self) -> None:
        called: list[str] = []
        model = SmallNet()
        configured = model.configure_optimizers()
        configured["optimizer"].register_step_pre_hook(lambda *_: called.append("before"))
        configured["optimizer"].register_step_post_hook(lambda *_: called.append("after"))
        model.configure_optimizers = lambda: configured  # type: ignore[method-assign]
        fit(model, ZenFlowStrategy(**NOTHING_LATE), steps=2)
        assert called == ["before", "after"] * 2

    REFUSED = (
        (
            lambda trainer: setattr(trainer, "optimizers", [Wrapper(o) for o in trainer.optimizers]),
            r"trainer.optimizers must be the strategy's own, got test_between_steps.Wrapper",
        ),
        (lambda trainer: trainer.optimizers[0].add_param_group({"params": []}), "add_param_group must not be called"),
        (
            lambda trainer: trainer.lightning_module.optimizers().add_param_group({"params": []}),
            "add_param_group must not be called",
        ),
        (lambda trainer: trainer.strategy.setup_optimizers(trainer), "setup_optimizers must not be called in training"),
    )

    @pytest.mark.parametrize(("action", "message"), REFUSED)
    def test_refused(self, action: Callable[[pl.Trainer], object], message: str) -> None:
        with pytest.raises(MisconfigurationException, match=message):
            fit(SmallNet(), callbacks=[At("on_train_batch_start", action)])


class Adversarial(SmallNet):
    """Calls `backward` in its training step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.loss(batch_idx, 1, 0).backward()
        self.zero_grad()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bucket", [50, 100_000])
def test_a_backward_pass_of_the_users_own_is_refused(how: str, bucket: int) -> None:
    strategy = ZenFlowStrategy(**HOW[how], reduce_bucket_size=bucket)
    with pytest.raises(MisconfigurationException, match=r"torch.autograd.grad\(loss, input\)"):
        fit(Adversarial(), strategy)


def test_moments_are_not_in_the_optimizers_state() -> None:
    for of in (lambda trainer: trainer.optimizers[0], lambda trainer: trainer.lightning_module.optimizers()):
        with pytest.raises(MisconfigurationException, match="safe_set_full_optimizer_state"):
            fit(SmallNet(), callbacks=[At("on_train_batch_start", lambda t, of=of: of(t).state.clear())])
    trainer = fit(SmallNet(), steps=1)
    assert trainer.optimizers == [] or trainer.optimizers[0].state is not None
