"""What users do between two steps has the effect that it has under plain Lightning, or is refused by name."""

import copy
import itertools
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from between_steps import USES, WRITES, Does, StepsItself, change, drop, head, scale
from callbacks import Act, At
from docs.between_steps import DOCUMENT, with_table
from fabric_runs import set_up, train_step
from harness import PLACES, Case, fit, snapshot
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.between_steps.written_weights import WrittenWeights
from models import OneGroup, TestModule
from networks import SmallNet
from rank_processes import run_each
from side_by_side import NOTHING_LATE

HOW: dict[str, dict[str, Any]] = {
    "nothing late": NOTHING_LATE,
    "in backward": {"update_interval": 1, "publish_lag": 0, "worker_cores": 1},
    "late": {"update_interval": 4, "publish_lag": 1, "full_warm_up_rounds": 0, "worker_cores": 1},
    "stage 3": {**NOTHING_LATE, "stage": 3},
    "in host memory": {"stage": 3, "offload_parameters": True, "worker_cores": 1},
}


def compare(
    keys: dict[str, Any],
    make_callbacks: Callable[[], list[pl.Callback]],
    make_model: Callable[[], TestModule] = SmallNet,
    *,
    atol: float = 2e-6,
    precision: Any = "32-true",
    **options: Any,
) -> TestModule:
    """The same run under ZenFlow, in a precision, and under plain Lightning ends with the same weights; returns ZenFlow's model."""
    ours, theirs = make_model(), make_model()
    options = {"steps": 6, **options}
    fit(ours, ZenFlowStrategy(**keys), callbacks=make_callbacks(), precision=precision, **options)
    fit(theirs, "auto", callbacks=make_callbacks(), **options)
    assert_same([p.float() for p in snapshot(ours)], snapshot(theirs), atol=atol)
    return ours


assert_same = partial(torch.testing.assert_close, rtol=0, atol=2e-6)
AT_ONCE = [use for use in USES if use.startswith(("read, change or clip gradients", "read weights, by"))]
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
    [(name, USES[name].where) for name in AT_ONCE] + [(AT_ONCE[1], how) for how in ("late", "in host memory")],
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
    compare(NOTHING_LATE, callbacks.pop, lambda: SmallNet(length=5), steps=10)
    assert_same(turns[0].seen, turns[1].seen)


def test_documented_table_is_what_is_tested() -> None:
    text = DOCUMENT.read_text()
    assert with_table(text) == text, "docs/reliability.md is out of date: run `python -m docs.between_steps`"


class TestGradients:
    """They are not in `parameter.grad`."""

    @pytest.mark.parametrize("how", ["in backward", "late", "stage 3", "in host memory"])
    def test_dropped(self, how: str) -> None:
        """By the optimizer or the module, before the step: no update, and no decay."""
        if how != "late":
            compare(HOW[how], lambda: [At("on_before_optimizer_step", drop)])
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

    def test_removed_in_part_between_two_steps(self) -> None:
        def freeze(trainer: pl.Trainer) -> None:
            if trainer.current_epoch == 1:
                trainer.lightning_module.hidden.requires_grad_(False).zero_grad()

        compare(NOTHING_LATE, lambda: [At("on_train_epoch_start", freeze)], lambda: SmallNet(length=3), steps=9)

    @pytest.mark.parametrize("how", ["in backward", "late", "in host memory"])
    def test_left_from_a_step_before(self, how: str) -> None:
        """torch would add to them."""
        message = "optimizer.zero_grad.* must come before .*accumulate_grad_batches"
        with pytest.raises(MisconfigurationException, match=message):
            fit(LeavesGradients(), ZenFlowStrategy(**HOW[how]))
        ours, theirs = (LeavesGradients(accumulates=False) for _ in range(2))
        fit(ours, ZenFlowStrategy(**{**HOW[how], "clip_prediction": False}))
        fit(theirs, "auto")
        if how != "late":
            assert_same(snapshot(ours), snapshot(theirs))

    def test_a_module_is_compiled_and_copied_while_they_are_there(self) -> None:
        copies: list[nn.Module] = []
        model = SmallNet()

        def look(trainer: pl.Trainer) -> None:
            copies.append(copy.deepcopy(trainer.lightning_module.hidden))
            torch.compile(trainer.lightning_module.hidden, backend="eager")(torch.zeros(1, model.hidden.in_features))

        fit(model, steps=2, callbacks=[At("on_train_batch_end", look)])
        assert len(copies) == 2


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
        compare(HOW[how], lambda: [At("on_before_optimizer_step", act)], gradient_clip_val=before)

    @pytest.mark.parametrize("how", ["nothing late", "in backward"])
    def test_by_the_module(self, how: str) -> None:
        compare({**HOW[how], "clip_prediction": False}, list, ClipsItself)

    def test_deepspeeds_norm_counts_where_the_trainer_has_none(self) -> None:
        ours, theirs = SmallNet(), SmallNet()
        fit(ours, ZenFlowStrategy(**NOTHING_LATE, config={"gradient_clipping": 0.01}))
        fit(theirs, ZenFlowStrategy(**NOTHING_LATE), gradient_clip_val=0.01)
        assert all(map(torch.equal, snapshot(ours), snapshot(theirs)))


class TestOptimizer:
    """What users do with it."""

    def test_the_closure_may_have_been_run(self) -> None:
        for accumulate in (1, 2):
            compare(NOTHING_LATE, list, lambda: StepsItself(length=12), accumulate_grad_batches=accumulate)

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


class Perturbs(SmallNet):
    """Adversarial training (FGM, AWP): moves a weight between the two backward passes of a step, and puts it back before the step."""

    automatic_optimization = False

    def __init__(self, how: str, first: int, factor: float = 1.0) -> None:
        super().__init__(length=24)
        self._how, self._first, self._factor = how, first, factor
        self.automatic_optimization = False

    def _write(self, value: Tensor) -> None:
        with torch.no_grad():
            (self.hidden.weight.data if self._how == "through data" else self.hidden.weight).copy_(value)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch_idx, 0, 0))
        if batch_idx >= self._first:
            kept = self.hidden.weight.detach().clone()
            self._write(kept + 0.1 * torch.linspace(-1, 1, kept.numel(), dtype=kept.dtype).view_as(kept))
            self.manual_backward(self._factor * self.loss(batch_idx, 0, 0))
            if self._how != "and keeps it":
                self._write(kept)
        optimizer.step()


class TestPerturbedWeights:
    """What is put back before the step is no write; what is not is one."""

    @pytest.mark.parametrize("write", ["through data", "in place", "and keeps it"])
    @pytest.mark.parametrize("first", [0, 20])
    def test_as_under_auto(self, first: int, write: str) -> None:
        compare(HOW["in backward"], list, lambda: Perturbs(write, first), steps=24, atol=1e-5)

    def test_nothing_is_left_where_weights_are_late(self) -> None:
        """Where the second pass has no gradient, the run has the bits of one without it."""
        perturbed, left_alone = Perturbs("in place", 0, factor=0.0), Perturbs("in place", 24)
        fit(perturbed, ZenFlowStrategy(**HOW["late"]), steps=8)
        fit(left_alone, ZenFlowStrategy(**HOW["late"]), steps=8)
        assert all(map(torch.equal, snapshot(perturbed), snapshot(left_alone)))

    def test_under_fabric_what_is_put_back_behind_the_last_pass_is_refused(self) -> None:
        """Its updates are under way."""
        fabric, model, *_ = set_up(SmallNet(), **HOW["in backward"])
        weight = model.module.hidden.weight
        with fabric.no_backward_sync(model):
            fabric.backward(model.loss(0, 0, 0))
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.1)
        fabric.backward(model.loss(0, 0, 0))
        with (
            pytest.raises(MisconfigurationException, match="hidden.weight must not be written between"),
            torch.no_grad(),
        ):
            weight.copy_(kept)
        fabric.strategy.teardown()


class TestBetweenBackwardAndStep:
    """Uses of weights under Fabric; those under the Trainer are in `USES`."""

    def test_under_fabric(self) -> None:
        """The bits are those of a loop without them."""
        runs = [self._run(tries=tries) for tries in (True, False)]
        assert all(map(torch.equal, *runs))
        assert not _get_current_dispatch_mode_stack()

    def _run(self, *, tries: bool) -> list[Tensor]:
        fabric, model, optimizer, _ = set_up(SmallNet(), **HOW["in backward"])
        # Modes of the user's, of which one ends between backward and step and the other begins there.
        for step in range(3):
            with FlopCounterMode(display=False) as counted:
                fabric.backward(model.loss(step, 0, 0))
            assert counted.get_total_flops() > 0
            if tries:
                self._refused(partial(model.loss, step, 1, 0))
                self._refused(model.module.head.weight.clone)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            other = FlopCounterMode(display=False)
            with other:
                if tries:
                    self._refused(torch.no_grad()(partial(model.loss, step, 1, 0)))
                optimizer.step()
                model.module.head.weight.clone()
            optimizer.zero_grad()
        weights = snapshot(model.module)
        fabric.strategy.teardown()
        return weights

    def _refused(self, use: Callable[[], object]) -> None:
        with pytest.raises(MisconfigurationException, match="weight must not be read between backward and step"):
            use()

    def test_nothing_stays_on_torchs_stack(self) -> None:
        """Below a mode of the user's that is entered for all of it."""
        with FlopCounterMode(display=False):
            self._run(tries=False)
            fit(SmallNet(), ZenFlowStrategy(**HOW["in backward"]))
            assert len(_get_current_dispatch_mode_stack()) == 1
        assert not _get_current_dispatch_mode_stack()

    def test_a_step_that_is_dropped_frees_them(self) -> None:
        fabric, model, optimizer, _ = set_up(SmallNet(), **HOW["in backward"])
        before = snapshot(model.module)
        fabric.backward(model.loss(0, 0, 0))
        optimizer.zero_grad()
        assert_same(snapshot(model.module), before)
        fabric.strategy.teardown()


class TestWeights:
    """What is written in place goes on from there; `test_uses` has the hooks."""

    @pytest.mark.parametrize("how", ["in backward", "stage 3", "in host memory"])
    def test_anywhere(self, how: str) -> None:
        compare(HOW[how], lambda: [Does(*WRITES)], lambda: SmallNet(length=20), steps=10, accumulate_grad_batches=2)

    @pytest.mark.parametrize(
        ("precision", "write"),
        [("bf16-true", "clamped"), ("16-true", "clamped through data"), ("bf16-true", "initialised anew")],
    )
    def test_in_16_bits(self, precision: str, write: str) -> None:
        # In 16 bits torch's AdamW has its state in them as well.
        model = compare(NOTHING_LATE, lambda: [Does(write)], precision=precision, atol=0.02)
        assert write == "initialised anew" or all(p.float().abs().max() < 0.1001 for p in head(model))

    def test_on_two_ranks(self) -> None:
        """As under plain Lightning on one, since both see the same data."""
        cases = {
            how: Case(
                model="SmallNet",
                model_options={"ranks_differ": False},
                steps=10,
                callbacks=(Does(*(name for name in WRITES if how == "stage 2" or name != "clamped through data")),),
                topk_ratio=0,
                update_interval=1,
                publish_lag=0,
                watched=False,
                **stage,
            )
            for how, stage in PLACES.items()
        }
        runs = run_each(cases, ranks=2)
        for how, case in cases.items():
            plain = case.make_model()
            fit(plain, "auto", steps=case.steps, callbacks=[copy.deepcopy(case.callbacks[0])])
            assert_same([run.weights for run in runs[how]], [snapshot(plain)] * 2)

    @pytest.mark.parametrize(("how", "clip"), [("in backward", None), ("late", 0.01)])
    def test_after_a_flush_nothing_is_late(self, clip: float | None, how: str) -> None:
        """A flush behind each step, after the first write."""

        def act(trainer: pl.Trainer) -> None:
            if trainer.global_step == 1 and hasattr(trainer.strategy, "flush"):
                trainer.strategy.flush()
            WRITES["clamped"](trainer)

        # Clip factors are predicted, and provisional updates are shown.
        atol = 2e-6 if how == "in backward" and clip is None else 0.05
        model = compare(HOW[how], lambda: [At("on_train_batch_end", act)], atol=atol, gradient_clip_val=clip)
        assert all(p.abs().max() <= 0.1 for p in head(model))

    def test_what_was_not_written_keeps_its_precision(self) -> None:
        model = OneGroup()
        masters: list[Tensor] = []

        def keep(trainer: pl.Trainer) -> None:
            masters.append(trainer.strategy.zenflow_optimizer.training.full_state.read("weights.0").clone())

        def write(trainer: pl.Trainer) -> None:
            if trainer.global_step == 2:
                keep(trainer)
                model.weights[0].data[:3] = 0.1

        callbacks = [At("on_train_batch_end", write), At("on_before_zero_grad", keep)]
        fit(model, ZenFlowStrategy(**NOTHING_LATE), callbacks=callbacks, precision="bf16-true")
        *_, before, after = masters
        assert torch.equal(after[3:], before[3:])
        assert not torch.equal(after[3:], after[3:].bfloat16().float())
        assert torch.equal(after[:3], torch.tensor(0.1).bfloat16().float().expand_as(after[:3]))

    def test_before_a_validation(self) -> None:
        """Which makes weights exact, and sees them."""
        seen: list[Tensor] = []
        look = lambda trainer: seen.append(trainer.lightning_module.head.weight.abs().max())  # noqa: E731
        options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
        for write in ("clamped", "clamped through data"):
            callbacks = lambda write=write: [Does(write), At("on_validation_start", look)]  # noqa: E731
            compare(NOTHING_LATE, callbacks, lambda: SmallNet(length=6), **options)
        assert max(seen) <= 0.1

    @pytest.mark.parametrize("how", ["in backward", "late", "in host memory"])
    def test_nothing_is_noticed_where_nothing_is_written(self, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[bool] = []
        look = WrittenWeights.look
        monkeypatch.setattr(WrittenWeights, "look", lambda *a, **k: found.append(look(*a, **k)) or found[-1])
        options = {"limit_val_batches": 1, "val_check_interval": 5, "num_sanity_val_steps": 1}
        model = SmallNet(length=20)
        fit(model, ZenFlowStrategy(**HOW[how]), steps=20, gradient_clip_val=0.1, **options)
        assert len(found) >= 40
        assert not any(found)

    NOT_ALLOWED: ClassVar[dict[str, tuple[str, Act, str]]] = {
        "late": ("late", WRITES["clamped"], "hidden.weight|head.weight must not be written in place while updates"),
        "without the end of a gather": (
            "stage 3",
            lambda t: head(t.lightning_module)[0].detach().zero_(),
            "head.weight must not be written under stage=3 but in `deepspeed.zero.GatheredParameters",
        ),
        "seldom, through data": (
            "nothing late",
            lambda t: t.global_step < 20 or t.lightning_module.head.weight.data.mul_(0.9),
            "head.weight must not be written through `parameter.data`",
        ),
    }

    @pytest.mark.parametrize("name", ["embedding.weight", "hidden.weight", "head.bias"])
    @pytest.mark.parametrize("how", HOW)
    def test_one_behind_backward(self, how: str, name: str) -> None:
        """Alone, with its own update under way or not."""
        act = partial(scale, name)
        # A gather in host memory reads all of them before.
        use = "weight must not be read" if how == "in host memory" else f"{name} must not be written"
        with pytest.raises(MisconfigurationException, match=f"{use} between backward and step"):
            fit(SmallNet(), ZenFlowStrategy(**HOW[how]), callbacks=[At("on_after_backward", act)])

    @pytest.mark.parametrize("case", NOT_ALLOWED)
    def test_refused(self, case: str, tmp_path: Path) -> None:
        """Once: what is saved on the exception has the state."""
        how, act, message = self.NOT_ALLOWED[case]
        callbacks = {"callbacks": [At("on_train_batch_end", act), OnExceptionCheckpoint(tmp_path)]}
        with pytest.raises(MisconfigurationException, match=message):
            fit(SmallNet(length=80), ZenFlowStrategy(**HOW[how]), steps=80, enable_checkpointing=True, **callbacks)
        assert [path.name for path in tmp_path.iterdir()] == ["on_exception.ckpt"]
