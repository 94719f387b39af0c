"""What users do with checkpoints in Lightning: weights only, a save in the middle of a step or after an evaluation. One that is a file has
what they make of weights: hooks that change entries, averaged weights that are put in for a while.
"""

import gc
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from callbacks import After, At
from harness import fit, make_trainer, weights_of
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.deepspeed.users_module import whole_shape
from models import LinearLossModule
from networks import Perceptron, SmallNet
from side_by_side import HOW, LATE

SAVED, STEPS = 4, 7
limit = partial(ZenFlowStrategy, **HOW["in backward"])


def changed(weights: Mapping[str, Tensor], *, back: bool = False) -> dict[str, Tensor]:
    """Square matrices transposed, with memory of their own or not; other matrices as they are, biases scaled."""
    return {
        name: w * (0.25 if back else 4)
        if w.ndim == 1
        else w.t().contiguous()
        if name == "layers.0.weight"
        else w.t()
        if w.shape[0] == w.shape[1]
        else w
        for name, w in weights.items()
    }


class Net(Perceptron):
    def __init__(self, **options: Any) -> None:
        super().__init__(widths=[12, 12, 12, 5], length=STEPS, **options)

    @override
    def validation_step(self, *_: Any) -> None:
        self.log("validated", self.loss(0, 0, 0))


def renamed(weights: Mapping[str, Tensor], *, back: bool = False) -> dict[str, Tensor]:
    return {k.removeprefix("net.") if back else f"net.{k}": w for k, w in weights.items()}


def renamed_and_cast(weights: Mapping[str, Tensor], *, back: bool = False) -> dict[str, Tensor]:
    return {k: w if back else w.float() for k, w in renamed(weights, back=back).items()}


def flat(weights: Mapping[str, Tensor], *, back: bool = False) -> dict[str, Tensor]:
    """Three fifths of each weight in one dimension, so that it is not restored to the bit."""
    if back:
        return {k: (weights[f"_{k}"] / 0.6).view(w.shape) for k, w in Net().state_dict().items()}
    return {f"_{k}": 0.6 * w.flatten() for k, w in weights.items()}


class InHooks(Net):
    """Changes its weights in Lightning's hooks; others in their own methods or in torch's hooks."""

    change = staticmethod(changed)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = self.change(checkpoint["state_dict"])

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = self.change(checkpoint["state_dict"], back=True)


class InStateDict(Net):
    change = staticmethod(changed)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.change(super().state_dict(*args, **kwargs))

    @override
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(self.change(state_dict, back=True), strict, assign)


class OfTorch(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_state_dict_post_hook(lambda module, weights, *_: weights.update(changed(weights)))
        self.register_load_state_dict_pre_hook(lambda module, weights, *_: weights.update(changed(weights, back=True)))


def with_change(place: type[Net], change: Callable[..., dict[str, Tensor]]) -> type[Net]:
    return type(place.__name__, (place,), {"change": staticmethod(change)})


def halves(
    make: Callable[[], Any],
    first: Callable[[], Any],
    path: Path,
    second: Callable[[], Any] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Weights after the second half of a training, which continues the checkpoint of the first one with a model of its own."""
    fit(first(), make(), steps=SAVED, **options).save_checkpoint(path)
    rest = (second or first)()
    fit(rest, make(), steps=STEPS, resume=path, **options)
    return weights_of(rest)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], list[Tensor]]:
    """Weights of the resumed run without hooks."""
    return cache(lambda precision: halves(limit, Net, tmp_path_factory.mktemp("a") / "a", precision=precision))


@pytest.mark.parametrize(
    ("place", "change", "precision", "atol"),
    [
        (InHooks, changed, "32-true", 0),
        (InHooks, changed, "bf16-true", 1e-2),
        (InHooks, renamed, "bf16-true", 0),
        (InHooks, flat, "32-true", 1e-6),
        (InHooks, flat, "bf16-true", 1e-2),
        (InStateDict, changed, "bf16-true", 1e-2),
        (InStateDict, renamed_and_cast, "bf16-true", 1e-2),
        (OfTorch, changed, "32-true", 0),
    ],
)
def test_what_hooks_make_of_weights(
    place: type[Net], change: Any, precision: Any, atol: float, plain: Callable[[Any], list[Tensor]], tmp_path: Path
) -> None:
    """The file is that of `strategy="auto"`; the resumed run has the bits of one without hooks, in 16 bits where an entry is
    the parameter, in its memory."""
    model = with_change(place, change)
    rest = halves(limit, model, tmp_path / "ours", precision=precision)
    file = torch.load(tmp_path / "ours", weights_only=True)["state_dict"]
    if change in (renamed, renamed_and_cast):
        assert all(name.startswith("net.") and weight.dtype == torch.float32 for name, weight in file.items())
    torch.testing.assert_close(rest, plain(precision), rtol=0, atol=atol)
    if precision == "32-true":
        theirs = halves(lambda: "auto", model, tmp_path / "theirs")
        of_theirs = torch.load(tmp_path / "theirs", weights_only=True)["state_dict"]
        torch.testing.assert_close((dict(file), rest), (dict(of_theirs), theirs), rtol=1e-5, atol=2e-6)


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda checkpoint: None,
    "emptied": lambda checkpoint: checkpoint.update(optimizer_states=[], lr_schedulers=[]),
    "moments": lambda checkpoint: [
        of_one[key].zero_()
        for of_one in checkpoint["optimizer_states"][0]["state"].values()
        for key in ("exp_avg", "exp_avg_sq")
    ],
    "learning rate": lambda checkpoint: checkpoint["optimizer_states"][0]["param_groups"][0].update(lr=0.5),
}


@pytest.mark.parametrize(
    ("edit", "place"),
    [("nothing", "callback"), ("emptied", "module"), ("moments", "callback"), ("learning rate", "module")],
)
def test_hooks_that_edit_states(edit: str, place: str, tmp_path: Path) -> None:
    """As under torch from a file; from a folder by name."""

    edits = LambdaCallback(on_load_checkpoint=lambda trainer, module, checkpoint: EDITS[edit](checkpoint))

    def resume(make: Callable[[], Any], path: Path) -> list[Tensor]:
        model = type("Edits", (Net,), {"on_load_checkpoint": lambda _, content: EDITS[edit](content)})
        of_module = place == "module"
        return halves(make, model if of_module else Net, path, callbacks=[] if of_module else [edits])

    plain = resume(lambda: "auto", tmp_path / "plain")
    torch.testing.assert_close(resume(limit, tmp_path / "file"), plain, rtol=0, atol=2e-6)
    of_folder = partial(limit, checkpoint_format="deepspeed")
    if edit == "nothing":
        torch.testing.assert_close(resume(of_folder, tmp_path / "folder"), plain, rtol=0, atol=2e-6)
    else:
        with pytest.raises(MisconfigurationException, match=r"must leave checkpoint\['optimizer_states'\] as it is"):
            resume(of_folder, tmp_path / "folder")


class Padded(Perceptron):
    """Trains on with more classes than were saved, and new moments."""

    def __init__(self) -> None:
        super().__init__(widths=[12, 12, 7], length=STEPS)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        for name, parameter in self.named_parameters():
            padded = torch.zeros(whole_shape(parameter), dtype=torch.float32, device="cpu")
            padded[: len(weights[name])] = weights[name]
            weights[name] = padded
        EDITS["emptied"](checkpoint)


@pytest.mark.parametrize("options", [{}, {"stage": 3}, {"stage": 3, "offload_parameters": True}])
def test_a_hook_that_pads_the_head(options: dict[str, Any], tmp_path: Path) -> None:
    smaller = partial(Perceptron, widths=[12, 12, 5], length=STEPS)
    plain = halves(lambda: "auto", smaller, tmp_path / "plain", Padded)
    ours = halves(partial(limit, **options), smaller, tmp_path / "file", Padded)
    torch.testing.assert_close(ours, plain, rtol=0, atol=2e-6)


def test_hooks_that_change_pieces_are_refused(tmp_path: Path) -> None:
    saves = At("on_train_end", lambda trainer: trainer.save_checkpoint(tmp_path / "a.ckpt"))
    in_pieces = {"stage": 3, "stage3_param_persistence_threshold": 0}
    renames = with_change(InStateDict, renamed_and_cast)
    for model, name in ((InHooks, "layers.0.weight"), (renames, "net.layers.0.weight")):
        with pytest.raises(MisconfigurationException, match=f"under stage 3 the entries .* got '{name}'"):
            fit(model(), limit(config={"zero_optimization": in_pieces}), steps=1, callbacks=[saves])
    assert not list(tmp_path.iterdir())


def scale(factor: float, trainer: pl.Trainer) -> None:
    parameters = list(trainer.lightning_module.parameters())
    with torch.no_grad(), GatheredParameters(parameters, modifier_rank=0):
        for p in parameters:
            p.mul_(factor)


@pytest.mark.parametrize("options", [{}, {"stage": 3, "offload_parameters": True}], ids=str)
def test_other_weights_in_a_validation(options: dict[str, Any], tmp_path: Path) -> None:
    """As others put in an average: the file has what was validated, as under `strategy="auto"`, and training goes on with its own
    weights.
    """
    halve = At("on_validation_epoch_start", partial(scale, 0.5))
    double = At("on_train_batch_start", lambda trainer: trainer.global_step == SAVED and scale(2.0, trainer))
    results = []
    for strategy in (limit(**options), "auto"):
        files = ModelCheckpoint(dirpath=tmp_path, filename="a", enable_version_counter=False, monitor="validated")
        model = Net()
        limits = {"val_check_interval": SAVED, "limit_val_batches": 1, "num_sanity_val_steps": 0}
        fit(model, strategy, steps=STEPS, enable_checkpointing=True, callbacks=[halve, double, files], **limits)
        saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
        results.append((dict(saved["state_dict"]), dict(model.state_dict())))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("options", "weights_only"), [({}, True), ({"stage": 3}, False)], ids=str)
def test_what_hooks_see_is_what_is_written(options: dict[str, Any], weights_only: bool, tmp_path: Path) -> None:
    seen: dict[str, dict[str, Tensor]] = {}

    def look(name: str) -> None:
        with GatheredParameters(list(model.parameters())):
            seen[name] = {n: p.detach().clone() for n, p in model.named_parameters()}

    class Looks(Net):
        @override
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            look("module")
            if not options:
                seen["entries"] = {n: w.clone() for n, w in checkpoint["state_dict"].items()}

    model, sees = Looks(), At("on_save_checkpoint", lambda _: look("callback"))
    sees.state_dict = lambda: look("state_dict") or {}  # type: ignore[func-returns-value, method-assign]
    saves = After([STEPS - 1], lambda trainer: trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only))
    fit(model, ZenFlowStrategy(**LATE, **options), steps=STEPS, callbacks=[sees, saves])
    file = dict(torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"])
    assert len(seen) == (1 if weights_only else 3) + (not options)
    for weights in seen.values():
        torch.testing.assert_close(weights, file, rtol=0, atol=0)


def test_a_save_between_micro_batches_does_what_it_does_without_deepspeed(tmp_path: Path) -> None:
    """What the step has of gradients is not in the checkpoint; the step ends with the batch with which it would have ended."""
    results = []
    for name, strategy in (("ours", partial(limit, overlap_step=False)), ("theirs", lambda: "auto")):
        path = tmp_path / name
        options: dict[str, Any] = {"steps": 6, "accumulate_grad_batches": 4, "gradient_clip_val": 0.5}
        whole, rest, batches = SmallNet(length=24, accumulate=4), SmallNet(length=24, accumulate=4), count()
        # In mid-accumulation.
        save = At("on_train_batch_end", lambda t, path=path, n=batches: next(n) == 10 and t.save_checkpoint(path))
        fit(whole, strategy(), callbacks=[save], **options)
        fit(rest, strategy(), resume=path, **options)
        results.append((weights_of(whole), weights_of(rest)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def holds_no_file(_: pl.Trainer) -> None:
    """Of a checkpoint, which would take up the disk after it was deleted."""
    gc.collect()
    assert "_states.pt" not in Path("/proc/self/maps").read_text()


def test_checkpoints_of_everything_and_of_weights_only(tmp_path: Path) -> None:
    """Lightning leaves out what it would resume from, and says so; evaluation takes the weights."""
    model, path = LinearLossModule(length=3), tmp_path / "weights.ckpt"
    trainer = fit(model, ZenFlowStrategy(**LATE))
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    trainer.save_checkpoint(path, weights_only=True)
    looks = [At("on_train_start", holds_no_file)]
    fit(LinearLossModule(length=4), ZenFlowStrategy(**LATE), steps=4, resume=tmp_path / "all.ckpt", callbacks=looks)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        fit(LinearLossModule(length=5), ZenFlowStrategy(**LATE), steps=5, resume=path)
    fresh = LinearLossModule(length=3)
    make_trainer(ZenFlowStrategy(**LATE), limit_test_batches=1).test(fresh, ckpt_path=path, verbose=False)
    torch.testing.assert_close(weights_of(fresh), weights_of(model), rtol=0, atol=0)


@pytest.mark.parametrize(("format_", "stage"), [("deepspeed", 2), ("lightning", 3)])
def test_a_save_after_an_evaluation(format_: Any, stage: int, tmp_path: Path) -> None:
    """It has the optimizer's state, as without one."""
    make = partial(limit, stage=stage, checkpoint_format=format_)
    whole, rest, resumed = (LinearLossModule(length=5) for _ in range(3))
    fit(whole, make(), steps=5)
    trainer = fit(rest, make(), limit_test_batches=1, limit_val_batches=1)
    for number in range(2):
        trainer.test(rest, verbose=False)
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
    trainer = fit(resumed, make(), steps=5, resume=tmp_path / "1.ckpt")
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), rtol=0, atol=0)
    assert trainer.model.global_steps == 5  # type: ignore[union-attr]  # DeepSpeed's engine
