"""What users do between two steps has the effect that it has under plain Lightning, or is refused by name."""

import itertools
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from between_steps import USES, StepsItself, change, drop, head
from callbacks import Act, At
from docs.between_steps import DOCUMENT, with_table
from fabric_runs import set_up
from harness import fit, snapshot
from lightning_zenflow import ZenFlowStrategy
from networks import SmallNet
from side_by_side import HOW, NOTHING_LATE, assert_near, compare_weights

AT_ONCE = READING, SCALING, CHANGING, BEHIND = [
    use for use in USES if use.startswith(("scale gra", "change gra", "use gra", "read weights, by"))
]
"""What is refused by these names leaves all as it is."""
REFUSED = {
    f"{use.partition(' (')[0].replace('`', '')}, {act}, {hook}": (of_use, of_use.acts[act], hook)
    for use, of_use in USES.items()
    for number, act in enumerate(of_use.acts if of_use.refused and use not in AT_ONCE else ())
    for hook in (of_use.hooks if number == 0 else of_use.hooks[:1])
}
"""Each way in one hook, and one in each hook."""


@pytest.mark.parametrize("case", REFUSED)
def test_uses_that_are_refused(case: str) -> None:
    use, act, hook = REFUSED[case]
    with pytest.raises(MisconfigurationException, match=use.refused):
        fit(SmallNet(length=3), ZenFlowStrategy(**HOW[use.where]), steps=6, callbacks=[At(hook, act)])


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, USES[name].where) for name in AT_ONCE),
        (SCALING, "late"),
        *itertools.product((CHANGING, BEHIND), ("late", "in host memory")),
    ],
)
def test_uses_that_are_refused_at_once(name: str, how: str) -> None:
    """Each way in each hook; the training goes on as without them."""
    use, refused = USES[name], set[tuple[str, str]]()

    def tries(hook: str, trainer: pl.Trainer) -> None:
        for name, act in use.acts.items():
            try:
                act(trainer)
            except MisconfigurationException as error:
                assert re.search(use.refused, str(error))
                refused.add((hook, name))

    tried, left_alone = SmallNet(), SmallNet()
    callbacks: list[pl.Callback] = [At(hook, partial(tries, hook)) for hook in use.hooks]
    fit(tried, ZenFlowStrategy(**HOW[how]), callbacks=callbacks)
    assert refused == {*itertools.product(use.hooks, use.acts)}
    fit(left_alone, ZenFlowStrategy(**HOW[how]))
    assert all(map(torch.equal, snapshot(tried), snapshot(left_alone)))


class InTurn:
    """Does something else in each step; keeps what it has seen."""

    def __init__(self, acts: Iterable[Act]) -> None:
        self._acts = itertools.cycle(acts)
        self.seen: list[Tensor] = []

    def __call__(self, trainer: pl.Trainer) -> None:
        result = next(self._acts)(trainer)
        self.seen.extend([result] if isinstance(result, Tensor) else [])


@pytest.mark.parametrize(
    ("use", "hook"), [(name, hook) for name, use in USES.items() if not use.refused for hook in use.hooks]
)
def test_uses(use: str, hook: str) -> None:
    """What `docs/reliability.md` has a table of; in two epochs, in which each step does the same."""
    turns = [InTurn(USES[use].acts.values()) for _ in range(2)]
    callbacks = [[At(hook, turn)] for turn in turns]
    compare_weights(NOTHING_LATE, callbacks.pop, lambda: SmallNet(length=5), steps=10)
    assert_near(turns[0].seen, turns[1].seen)


def test_documented_table_is_what_is_tested() -> None:
    text = DOCUMENT.read_text()
    assert with_table(text) == text, "docs/reliability.md is out of date: run `python -m docs.between_steps`"


class Gradients(pl.Callback):
    """Reads copies of all gradients, and torch's norm of them, behind each backward pass and before each step."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        # Under stage 3 parameters themselves may have none.
        shapes = [getattr(p, "ds_shape", p.shape) for p in pl_module.parameters()]
        assert [g.shape for g in gradients] == shapes
        self.read += [*(g.clone().float() for g in gradients), nn.utils.get_total_norm(gradients).float()]

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any) -> None:
        self.on_after_backward(trainer, pl_module)


class TestGradients:
    """They are where torch has them, as copies."""

    @pytest.mark.parametrize("how", ["in backward", "late", "stage 3", "in host memory"])
    def test_dropped(self, how: str) -> None:
        """By the optimizer or the module, before the step: no update, and no decay."""
        if how != "late":
            compare_weights(HOW[how], lambda: [At("on_before_optimizer_step", drop)])
        steps: list[Tensor] = []
        model = SmallNet()
        weights = At("on_train_batch_end", lambda _: steps.append(snapshot(model)[0]))
        fit(model, ZenFlowStrategy(**HOW[how]), steps=4, callbacks=[At("on_after_backward", drop), weights])
        assert torch.equal(steps[1], steps[2]) or how == "late"

    @pytest.mark.parametrize("where", ["device", "host"])
    @pytest.mark.parametrize("how", HOW)
    def test_read(self, how: str, where: str) -> None:
        """With what a hook of a parameter makes of them; between micro-batches their sum so far."""
        reads, models = (Gradients(), Gradients()), (SmallNet(), SmallNet())
        strategies = (ZenFlowStrategy(**HOW[how], accumulate_on=where), "auto")
        for read, model, strategy in zip(reads, models, strategies, strict=True):
            model.head.weight.register_hook(lambda gradient: 0.5 * gradient)
            fit(model, strategy, steps=1 if how == "late" else 3, callbacks=[read], accumulate_grad_batches=2)
        assert_near(reads[0].read, reads[1].read)
        if how != "late":
            assert_near(*map(snapshot, models))
        assert all(p.grad is None for p in models[0].parameters())

    def test_read_in_fp16(self) -> None:
        """Without the loss scale."""
        reads = Gradients(), Gradients()
        fit(
            SmallNet(),
            ZenFlowStrategy(**NOTHING_LATE, loss_scale=256),
            steps=1,
            callbacks=[reads[0]],
            precision="16-true",
        )
        fit(SmallNet(), "auto", steps=1, callbacks=[reads[1]])
        torch.testing.assert_close(reads[0].read, reads[1].read, rtol=1e-2, atol=1e-4)

    @pytest.mark.parametrize("how", ["nothing late", "true factors", "in host memory"])
    def test_under_fabric(self, how: str) -> None:
        """Clipped by torch, and read as Fabric has clipped them."""
        keys = {**HOW, "true factors": {**HOW["in backward"], "clip_prediction": False}}[how]
        (fabric, model, optimizer, _), plain = set_up(SmallNet(), **keys), SmallNet()
        theirs = plain.optimizer_and_scheduler()[0]
        for step in range(4):
            fabric.backward(model.loss(step, 0, 0))
            plain.loss(step, 0, 0).backward()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1 if step % 2 else 1e3) for m in (model, plain)]
            assert_near(*norms)
            assert_near(*([p.grad.clone() for p in m.parameters()] for m in (model, plain)))
            optimizer.step()
            theirs.step()
            model.zero_grad()
            plain.zero_grad()
        fabric.strategy.flush()
        assert_near(snapshot(model.module), snapshot(plain))
        fabric.backward(model.loss(4, 0, 0))
        kept = [p.grad for p in model.parameters()]
        fabric.clip_gradients(model, optimizer, max_norm=1e-3)
        assert_near(nn.utils.get_total_norm(kept), torch.tensor(1e-3))
        for gradient in kept:
            gradient.mul_(1.0)
        with pytest.raises(MisconfigurationException, match="must be clipped once, got fabric.clip_gradients"):
            optimizer.step()
        kept[0].mul_(2.0)
        with pytest.raises(MisconfigurationException, match="scaled alike"):
            optimizer.step()
        for p in head(model.module):
            p.grad = None
        with pytest.raises(
            MisconfigurationException, match="head.weight, head.bias must not be assigned.*fabric.clip_grad"
        ):
            optimizer.step()
        fabric.strategy.teardown()
        with pytest.raises(MisconfigurationException, match="must be used before"):
            kept[0].norm()

    def test_removed_in_part_between_two_steps(self) -> None:
        def freeze(trainer: pl.Trainer) -> None:
            if trainer.current_epoch == 1:
                trainer.lightning_module.hidden.requires_grad_(False).zero_grad()

        compare_weights(NOTHING_LATE, lambda: [At("on_train_epoch_start", freeze)], lambda: SmallNet(length=3), steps=9)

    @pytest.mark.parametrize("how", ["in backward", "late", "in host memory"])
    def test_left_from_a_step_before(self, how: str) -> None:
        """torch would add to them."""
        message = "optimizer.zero_grad.* must come before .*accumulate_grad_batches"
        with pytest.raises(MisconfigurationException, match=message):
            fit(LeavesGradients(), ZenFlowStrategy(**HOW[how]))
        keys, atol = {**HOW[how], "clip_prediction": False}, 0.05 if how == "late" else 2e-6
        compare_weights(keys, list, lambda: LeavesGradients(accumulates=False), steps=3, atol=atol)


class LeavesGradients(SmallNet):
    """Removes gradients in every other batch only, or sets them to zero."""

    def __init__(self, *, accumulates: bool = True) -> None:
        super().__init__()
        self._accumulates = accumulates

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 or not self._accumulates:
            optimizer.zero_grad(set_to_none=False)


class ClipsItself(SmallNet):
    """Clips by another norm in each step, and not at all in every third."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        step = self.trainer.global_step
        if step % 3:
            self.clip_gradients(optimizer, gradient_clip_val=0.01 * step, gradient_clip_algorithm="norm")


class TestClipping:
    """The norm is asked for in each step."""

    @pytest.mark.parametrize(
        ("how", "before", "after"),
        [("nothing late", 0.01, None), ("stage 3", None, 0.01), ("in host memory", 1e3, 0.02)],
    )
    def test_changed(self, how: str, before: float | None, after: float | None) -> None:
        act = lambda trainer: change(trainer, "gradient_clip_val", after)  # noqa: E731
        compare_weights(HOW[how], lambda: [At("on_before_optimizer_step", act)], gradient_clip_val=before)

    @pytest.mark.parametrize("how", ["nothing late", "in backward"])
    def test_by_the_module(self, how: str) -> None:
        compare_weights({**HOW[how], "clip_prediction": False}, list, ClipsItself)

    def test_deepspeeds_norm_counts_where_the_trainer_has_none(self) -> None:
        ours, theirs = SmallNet(), SmallNet()
        fit(ours, ZenFlowStrategy(**NOTHING_LATE, config={"gradient_clipping": 0.01}))
        fit(theirs, ZenFlowStrategy(**NOTHING_LATE), gradient_clip_val=0.01)
        assert all(map(torch.equal, snapshot(ours), snapshot(theirs)))


class TestOptimizer:
    """What users do with it."""

    def test_the_closure_may_have_been_run(self) -> None:
        for accumulate in (1, 2):
            compare_weights(NOTHING_LATE, list, lambda: StepsItself(length=12), accumulate_grad_batches=accumulate)

    def test_its_hooks_run(self) -> None:
        called: list[str] = []
        model = SmallNet()
        configured = model.configure_optimizers()
        configured["optimizer"].register_step_pre_hook(lambda *_: called.append("before"))
        configured["optimizer"].register_step_post_hook(lambda *_: called.append("after"))
        model.configure_optimizers = lambda: configured  # type: ignore[method-assign]
        fit(model, ZenFlowStrategy(**NOTHING_LATE), steps=2)
        assert called == ["before", "after"] * 2


class Adversarial(SmallNet):
    """Calls `backward` in its training step of one batch."""

    def __init__(self, batch_idx: int) -> None:
        super().__init__()
        self.of_batch = batch_idx

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.of_batch:
            self.loss(batch_idx, 1, 0).backward()
            self.zero_grad()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("how", "bucket", "batch_idx"),
    [("nothing late", 50, 0), ("late", 50, 1), ("in backward", 100_000, 1), ("in host memory", 50, 0)],
)
def test_a_backward_pass_of_the_users_own_is_refused(how: str, bucket: int, batch_idx: int) -> None:
    """In the first step, and behind a backward pass of Lightning's."""
    strategy = ZenFlowStrategy(**HOW[how], reduce_bucket_size=bucket)
    with pytest.raises(MisconfigurationException, match=r"torch.autograd.grad\(loss, input\)"):
        fit(Adversarial(batch_idx), strategy)
