"""Users' modules under ZeRO stage 3, whose weights DeepSpeed gathers where a module runs: torch's AdamW, wherever the parameters are.

Some under stage 2 as well.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from test_ranks import NETWORK, on_host
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from typing_extensions import override

from callbacks import At
from fabric_runs import launch
from harness import Case, fit, make_trainer, optimizer_of, run_here, weights_of
from lightning_zenflow import ZenFlowStrategy
from models import TestModule, generator
from networks import Deep, TiedNet
from rank_processes import run_each
from same_bits import assert_same_tensors, compare_with_oracle
from side_by_side import NOTHING_LATE, Net, compare_weights


class Lora(nn.Module):
    """Adapters on a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LoraNet(TiedNet):
    """Adapters on frozen layers, reentrant; its embedding is frozen as well, as what comes before the first adapter."""

    def __init__(self, **options: Any) -> None:
        super().__init__(checkpoint="reentrant", **options)
        self.requires_grad_(False)
        self.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
        with torch.random.fork_rng():
            torch.manual_seed(6)
            for layer in self.layers:
                layer[1], layer[3] = Lora(layer[1]), Lora(layer[3])

    @override
    def optimized(self) -> list[list[nn.Parameter]]:
        trained = [p for p in self.parameters() if p.requires_grad]
        return [trained[::2], trained[1::2]]


class CompiledLlama(TestModule):
    """Its layers are compiled, in place or around them."""

    def __init__(self, *, in_place: bool = True, **options: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__(**options)
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "max_position_embeddings": 16}
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.network: Any = LlamaForCausalLM(LlamaConfig(vocab_size=31, **heads, **sizes))
        layers = self.network.model.layers
        for i, layer in enumerate(layers):
            if in_place:
                layer.compile(backend="aot_eager")
            else:
                layers[i] = torch.compile(layer, backend="aot_eager")

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        tokens = torch.randint(31, (2, 9), generator=generator(13, step, micro, rank)).to(self.device)
        loss: Tensor = self.network(input_ids=tokens, labels=tokens).loss
        return loss


class SavedOnHost(TiedNet):
    """Autograd holds its activations in host memory until backward."""

    @override
    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        with save_on_cpu():
            return super().loss(step, micro, rank)


def case_of(model: type[TestModule] | str, **options: Any) -> Case:
    return replace(NETWORK, model=model, model_options=options, steps=6)


RANKS_MATTER = {
    "experts": case_of("SparseNet"),
    "used outside": case_of("OutsideNet"),
    "LoRA, reentrant": case_of(LoraNet),
}
CASES = {
    **RANKS_MATTER,
    "saved in host memory": case_of(SavedOnHost),
    "compiled": case_of(CompiledLlama),
    "tied, head in non-reentrant": case_of("TiedNet", checkpoint="non-reentrant", head_in_checkpoint=True),
}
PLACES: dict[str, Callable[[Case], Case]] = {"device": lambda case: case, "host": on_host}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=pytest.mark.slow if name == "compiled" else ())
        for name in CASES
        for place in (*PLACES, *(["stage 2"] if name in ("saved in host memory", "compiled") else []))
    ],
)
def test_numbers_are_those_of_adamw(name: str, place: str) -> None:
    case = replace(CASES[name], stage=2) if place == "stage 2" else PLACES[place](CASES[name])
    compare_with_oracle(case, [run_here(case)])


@pytest.mark.slow
def test_numbers_on_two_ranks() -> None:
    cases = {
        f"{name}, {place}": change(case) for name, case in RANKS_MATTER.items() for place, change in PLACES.items()
    }
    for name, runs in run_each(cases).items():
        compare_with_oracle(cases[name], runs)


REENTRANT = {"checkpoint": "reentrant"}
REFUSED = [
    (case_of("TiedNet", **REENTRANT, shared=True), "whose gradient is there already.* use_reentrant=False"),
    (case_of("TiedNet", **REENTRANT, head_in_checkpoint=True), "embedding.weight must have one gradient"),
    (case_of("SparseNet", layer_before=False), "a positional argument of layers.0, a leaf module .* `requires_grad_"),
    (case_of(CompiledLlama, in_place=False), "network.model.layers.0 must be compiled in place .* `module.compile"),
]


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_what_deepspeed_would_train_wrongly_is_refused(case: Case, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        run_here(on_host(case))


def assert_in_place(trainer: pl.Trainer) -> None:
    """Weights are in the arena in a fit."""
    optimizer: Any = optimizer_of(trainer)
    pieces = [p.ds_tensor for p in optimizer.module.parameters()]
    places = {t.untyped_storage().data_ptr() for t in (*pieces, *optimizer.fp16_partitioned_groups_flat)}
    assert places == {optimizer.training.parts.rank.arena.publish.untyped_storage().data_ptr()}
    assert optimizer.param_groups_fp16_flat_cpu_memory == []
    assert optimizer.training.telemetry.h2d_bytes == 0


def test_a_model_that_is_made_in_pieces(tmp_path: Path) -> None:
    """Its weights outlive the training, are saved, validated and tested; those in host memory have the same bits."""
    results, linear, file = [], torch.nn.functional.linear, tmp_path / "a.ckpt"
    make = partial(Deep, n_layers=3, width=24)
    limits = {
        "max_epochs": 2,
        "limit_train_batches": 10,
        "val_check_interval": 3,
        "limit_val_batches": 2,
        "limit_test_batches": 3,
    }
    for case in (NETWORK, on_host(NETWORK), replace(NETWORK, stock=True)):
        model = make()
        callbacks = [At("on_train_batch_end", assert_in_place)] if case.offload_parameters else []
        trainer = fit(model, case.make_strategy(), steps=-1, callbacks=callbacks, **limits)
        assert torch.nn.functional.linear is linear or case.stock
        if case is NETWORK:
            trainer.save_checkpoint(file)
        weights = weights_of(model)
        losses = trainer.test(model, verbose=False)
        assert_same_tensors(weights_of(model), weights)
        results.append((losses, weights))
    ours, in_host_memory, (_, plain) = results
    assert in_host_memory[0] == ours[0]
    assert_same_tensors(in_host_memory[1], ours[1])
    torch.testing.assert_close(ours[1], plain, rtol=0, atol=2e-6)
    evaluated, resumed = make(), make()
    make_trainer(NETWORK.make_strategy(), limit_test_batches=1).test(evaluated, ckpt_path=file, verbose=False)
    fit(resumed, NETWORK.make_strategy(), steps=-1, resume=file, **limits)
    for model in (evaluated, resumed):
        assert_same_tensors(weights_of(model), ours[1])


class GroupedByShape(Deep):
    @override
    def configure_optimizers(self) -> Any:
        groups = [[p for p in self.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
        return torch.optim.AdamW([{"params": group} for group in groups])


def test_parameter_groups_by_the_shapes_of_divided_parameters_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="group 0: params must .* choose groups by `p.ds_shape`"):
        fit(GroupedByShape(n_layers=2, width=8), NETWORK.make_strategy())


def test_a_teacher_that_fabric_makes_in_pieces() -> None:
    """Beside a student that is made so."""
    fabric = launch(stage=3, offload_parameters=True)
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        with fabric.init_module():
            made.append(nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 2)))
    teacher = fabric.setup(made[0].eval())
    student, optimizer = fabric.setup(made[1], torch.optim.AdamW(made[1].parameters()))
    x = torch.randn(4, 8, generator=generator(16))
    with torch.no_grad():
        first = teacher(x)
        assert torch.equal(student(x), first)
    fabric.backward((student(x) - first + 1).square().mean(), model=student)
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(teacher(x), first)
        assert not torch.equal(student(x), first)
    fabric.strategy.teardown()


class ReadsLate(Net):
    """Reads small parameters for the first time in a late step: the head's in manual optimization behind the step, the other's in it."""

    def __init__(self) -> None:
        super().__init__(length=10)
        self.automatic_optimization = False
        self.norms: list[float] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(int(batch), 0, 0)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if batch_idx == 6:
            self.norms.append(float(self.convolution.bias.detach().norm()))
        optimizer.step()
        if batch_idx == 3:
            self.norms.append(float(self.head.bias.detach().norm()))
        return loss


class Penalized(Net):
    """With a penalty of the gradient of an input, and a probe that a callback adds."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.randn(4, 11, generator=generator(17, batch_idx)).requires_grad_()
        (gradient,) = torch.autograd.grad(self.head(functional.gelu(self.norm(x))).sum(), x, create_graph=True)
        loss = super().training_step(batch, batch_idx) + gradient.square().sum()
        return loss + self.probe(x.detach()).square().mean() * 0


def add_probe(trainer: pl.Trainer) -> None:
    trainer.lightning_module.probe = nn.Linear(11, 3).requires_grad_(False)


@pytest.mark.parametrize("offload_parameters", [False, True])
@pytest.mark.parametrize("make", [lambda: ReadsLate(), lambda: Penalized(length=10)], ids=["late", "penalty"])
def test_what_plain_torch_trains(make: Callable[[], Any], offload_parameters: bool) -> None:
    made: list[Net] = []
    place = {"device": "cpu" if offload_parameters else "none"}
    zero = {"stage": 3, "offload_param": place, "stage3_param_persistence_threshold": 20}
    keys = {"config": {"zero_optimization": zero}, **NOTHING_LATE}
    probes = lambda: [At("on_fit_start", add_probe)]  # noqa: E731
    compare_weights(keys, probes, lambda: made.append(make()) or made[-1], steps=10)
    ours, theirs = (getattr(model, "norms", []) for model in made)
    assert ours == pytest.approx(theirs, abs=2e-6)


def test_small_parameters_are_whole_between_steps() -> None:
    """On the device, as under plain DeepSpeed."""
    sizes = list[int]()
    read = At("on_train_batch_end", lambda trainer: sizes.append(trainer.lightning_module.head.bias.numel()))
    fit(Net(), ZenFlowStrategy(**NOTHING_LATE, stage=3), steps=2, callbacks=[read])
    assert sizes == [3, 3]
