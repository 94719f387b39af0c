"""Weights that users write or read between two steps, or between backward and step: what `USES` has no row for."""

import copy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from between_steps import WRITES, Does, head, scale
from callbacks import Act, At
from fabric_runs import set_up
from harness import PLACES, Case, fit, snapshot
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.between_steps.uses import WrittenWeights
from models import OneGroup
from networks import SmallNet
from rank_processes import run_each
from side_by_side import HOW, NOTHING_LATE, assert_near, compare_weights


class Perturbs(SmallNet):
    """Adversarial training (FGM, AWP): moves a weight between the two backward passes of a step, and puts it back before the step."""

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
        compare_weights(HOW["in backward"], list, lambda: Perturbs(write, first), steps=24, atol=1e-5)

    def test_nothing_is_left_where_weights_are_late(self) -> None:
        """Where the second pass has no gradient, the run has the bits of one without it."""
        perturbed, left_alone = Perturbs("in place", 0, factor=0.0), Perturbs("in place", 24)
        fit(perturbed, ZenFlowStrategy(**HOW["late"]), steps=8)
        fit(left_alone, ZenFlowStrategy(**HOW["late"]), steps=8)
        assert all(map(torch.equal, snapshot(perturbed), snapshot(left_alone)))


class TestModesOfTorch:
    """Of the user's, beside the one that notices uses of weights between backward and step."""

    def test_under_fabric(self) -> None:
        """One ends between backward and step, and another begins there. Refused uses change nothing."""
        runs = []
        for tries in (True, False):
            fabric, model, optimizer, _ = set_up(SmallNet(), **HOW["in backward"])
            uses = [partial(model.loss, 0, 1, 0), model.module.head.weight.clone] if tries else []
            for step in range(3):
                with FlopCounterMode(display=False) as counted:
                    fabric.backward(model.loss(step, 0, 0))
                assert counted.get_total_flops() > 0
                with FlopCounterMode(display=False):
                    for use in uses:
                        with pytest.raises(MisconfigurationException, match="must not be read between backward and"):
                            use()
                    optimizer.step()
                    model.module.head.weight.clone()
                optimizer.zero_grad()
            runs.append(snapshot(model.module))
            fabric.strategy.teardown()
        assert all(map(torch.equal, *runs))
        assert not _get_current_dispatch_mode_stack()

    def test_one_around_a_fit(self) -> None:
        with FlopCounterMode(display=False):
            fit(SmallNet(), ZenFlowStrategy(**HOW["in backward"]))
            assert len(_get_current_dispatch_mode_stack()) == 1
        assert not _get_current_dispatch_mode_stack()


class TestWeights:
    """What is written in place goes on from there; `test_uses` has the hooks."""

    @pytest.mark.parametrize("how", ["in backward", "stage 3", "in host memory"])
    def test_anywhere(self, how: str) -> None:
        compare_weights(
            HOW[how], lambda: [Does(*WRITES)], lambda: SmallNet(length=20), steps=10, accumulate_grad_batches=2
        )

    @pytest.mark.parametrize(
        ("precision", "write"),
        [("bf16-true", "clamped"), ("16-true", "clamped through data"), ("bf16-true", "initialised anew")],
    )
    def test_in_16_bits(self, precision: str, write: str) -> None:
        # In 16 bits torch's AdamW has its state in them as well.
        model = compare_weights(NOTHING_LATE, lambda: [Does(write)], precision=precision, atol=0.02)
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
            assert_near([run.weights for run in runs[how]], [snapshot(plain)] * 2)

    @pytest.mark.parametrize(("how", "clip"), [("in backward", None), ("late", 0.01)])
    def test_after_a_flush_nothing_is_late(self, clip: float | None, how: str) -> None:
        """A flush behind each step, after the first write."""

        def act(trainer: pl.Trainer) -> None:
            if trainer.global_step == 1 and hasattr(trainer.strategy, "flush"):
                trainer.strategy.flush()
            WRITES["clamped"](trainer)

        # Clip factors are predicted, and provisional updates are shown.
        atol = 2e-6 if how == "in backward" and clip is None else 0.05
        model = compare_weights(HOW[how], lambda: [At("on_train_batch_end", act)], atol=atol, gradient_clip_val=clip)
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
            compare_weights(NOTHING_LATE, callbacks, lambda: SmallNet(length=6), **options)
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
        use = "must not be read" if how == "in host memory" else f"{name} must not be written"
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
