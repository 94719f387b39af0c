"""ZeRO stage 3 with the parameters in host memory, in place: the bits of parameters on the device, whatever happens, in less memory.

All cases of a number of ranks run in the same processes, as in test_stage_3.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from test_equivalence import ACCUMULATED, BF16, FLUSHES, case_of
from test_stage_3 import FP16, NETWORK, PLAIN, Sharded, in_stage_3
from typing_extensions import override

from harness import Case, make_trainer, run_here
from lightning_zenflow import ZenFlowConfig, ZenFlowStrategy
from lightning_zenflow.core.partition import Slice
from lightning_zenflow.core.schedule import blocks_wanted
from lightning_zenflow.deepspeed.build import MemoryPlan, ZeroPartition
from rank_processes import Runs, run_each
from same_bits import assert_is_adamw, assert_same_run, assert_same_tensors
from worker_killer import KillsWorker, optimizer_of

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

NOT_CLIPPED = {
    name: in_stage_3(case)
    for name, case in {
        "fp32": case_of("fp32", 0, 1, 0, **FLUSHES),
        "bf16": case_of(BF16, 0, 1, 0, max_norm=None),
        "accumulated on the host": case_of(ACCUMULATED, 0, 1, 0, max_norm=None).with_keys(accumulate_on="host"),
        "freezing": case_of("fp32", 0, 1, 0, model_options={"frozen_in": {0: (2, 4), 3: (3, 100)}}),
    }.items()
}
SAME: dict[str, Case] = {
    **NOT_CLIPPED,
    "frozen at setup": replace(NETWORK, model_options={"frozen": (1,)}),
    "clipped, synchronous": replace(NETWORK, max_norm=0.3).with_keys(optimizer_in_backward=False),
    "moments in bf16": NETWORK.with_keys(moments_dtype="bfloat16"),
    "fp16, synchronous": FP16.with_keys(optimizer_in_backward=False),
}
"""Whose bits do not depend on how the partition is cut into blocks, as predicted factors do, and bf16 moments of unused parameters."""
CLIPPED = {"fp32": replace(NETWORK, max_norm=0.3), "bf16": in_stage_3(case_of(BF16, 0, 1, 0))}


UNWATCHED = "accumulated on the host"


def on_host(case: Case) -> Case:
    return replace(case, offload_parameters=True)


def cases(folder: Path) -> dict[str, Case]:
    """All that run on several ranks, in the order in which they run."""
    found: dict[str, Case] = {}
    for name, case in SAME.items():
        found |= {f"device: {name}": case, f"host: {name}": on_host(case)}
    found["host, not watched"] = replace(on_host(SAME[UNWATCHED]), watched=False)
    for name, case in ((name, PLAIN[name]) for name in ("tied weights", "clipped")):
        found |= {f"ours: {name}": on_host(case), f"plain: {name}": on_host(replace(case, stock=True))}
    for name, case in CLIPPED.items():
        found |= {f"clipped: {name}": on_host(case), f"exact: {name}": case}
    killed = replace(on_host(CLIPPED["fp32"]), callbacks=(KillsWorker(seed=3),))
    found["killed"] = killed.with_keys(max_worker_restarts=1000)
    saved = replace(NETWORK, save_at=5)
    clipped = on_host(replace(saved, max_norm=0.3))
    for place, case in (
        ("device", saved),
        ("host", on_host(saved)),
        ("clipped", clipped),
        ("int8", clipped.with_keys(moments_dtype="int8")),
    ):
        case = replace(case, checkpoint=str(folder / place))
        found[f"saved: {place}"] = case
        places = {
            "device": replace(case, save_at=0, offload_parameters=False),
            "host": on_host(replace(case, save_at=0)),
        }
        if place in ("clipped", "int8"):
            del places["device"]
        found |= {f"resumed: {place} to {to}": resumed for to, resumed in places.items()}
    return found


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"ranks{n}")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_each(cases(tmp_path_factory.mktemp(f"ranks{request.param}")), ranks=request.param)


@pytest.mark.parametrize("name", SAME)
def test_the_bits_of_parameters_on_the_device(name: str, runs: Runs) -> None:
    for ours, theirs in zip(runs[f"host: {name}"], runs[f"device: {name}"], strict=True):
        assert_same_run(ours, theirs)
        assert (ours.skipped > 0) == ("fp16" in name)


@pytest.mark.parametrize("name", NOT_CLIPPED)
def test_every_forward_pass_sees_adamws_weights(name: str, runs: Runs) -> None:
    assert_is_adamw(NOT_CLIPPED[name], *runs[f"host: {name}"], shown=True)


def test_nothing_but_the_model_reads_the_weights(runs: Runs) -> None:
    """So the worker's answers are awaited where the model's layers are fetched."""
    for ours, theirs in zip(runs["host, not watched"], runs[f"device: {UNWATCHED}"], strict=True):
        assert_same_run(ours, replace(theirs, shown=[]))


@pytest.mark.parametrize("name", ["tied weights", "clipped"])
def test_weights_are_those_of_plain_zero_3_with_offload_param(name: str, runs: Runs) -> None:
    for ours, plain in zip(runs[f"ours: {name}"], runs[f"plain: {name}"], strict=True):
        for a, b in zip(ours.weights, plain.weights, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
        assert torch.allclose(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=0, atol=2e-6)


def test_every_forward_pass_sees_the_true_clip_factor(runs: Runs) -> None:
    """Although blocks are submitted in backward."""
    for ours, theirs in zip(runs["clipped: fp32"], runs["device: clipped, synchronous"], strict=True):
        assert_same_run(ours, theirs)


def test_workers_that_die(runs: Runs) -> None:
    for killed, expected in zip(runs["killed"], runs["clipped: fp32"], strict=True):
        assert_same_run(killed, expected)


def test_the_state_is_exact_where_clip_factors_are_predicted(runs: Runs) -> None:
    for of_place in (runs["clipped: bf16"], runs["exact: bf16"]):
        assert_is_adamw(CLIPPED["bf16"], *of_place)


@pytest.mark.parametrize(
    ("saved", "to"),
    [
        ("device", "device"),
        ("device", "host"),
        ("host", "device"),
        ("host", "host"),
        ("clipped", "host"),
        ("int8", "host"),
    ],
)
def test_a_resumed_run_has_the_same_bits(saved: str, to: str, runs: Runs) -> None:
    for resumed, whole in zip(runs[f"resumed: {saved} to {to}"], runs[f"saved: {saved}"], strict=True):
        assert len(resumed.losses) == NETWORK.steps - 5
        assert_same_run(resumed, replace(whole, shown=whole.shown[5:], losses=whole.losses[5:]))


class InterruptsAfter(Callback):
    """Ctrl-C between backward and step, where blocks have been submitted and the worker is writing weights."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    @override
    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._steps:
            raise KeyboardInterrupt


@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_an_interrupted_fit_saves_and_goes_on(max_norm: float | None, tmp_path: Path) -> None:
    case = on_host(replace(NETWORK, max_norm=max_norm))
    model, expected = case.make_model(), run_here(case)
    saves = ModelCheckpoint(dirpath=tmp_path, filename="a", every_n_train_steps=1000, save_on_exception=True)
    trainer = make_trainer(
        case.make_strategy(),
        max_steps=case.steps,
        gradient_clip_val=max_norm,
        enable_checkpointing=True,
        callbacks=[saves, InterruptsAfter(7)],
    )
    with pytest.raises(SystemExit):
        trainer.fit(model)
    (saved,) = tmp_path.glob("*.ckpt")
    resumed = run_here(replace(case, checkpoint=str(saved)))
    with GatheredParameters(list(model.parameters())):
        assert_same_tensors([p for group in model.parameter_groups() for p in group], resumed.shown[0])
    assert len(resumed.losses) == case.steps - 7
    if max_norm is None:
        assert_same_run(resumed, replace(expected, shown=expected.shown[7:], losses=expected.losses[7:]))


class Places(Callback):
    """Where the weights are in a fit."""

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        optimizer: Any = optimizer_of(trainer)
        arena = optimizer.parts.rank.arena
        pieces = [p.ds_tensor for p in optimizer.module.parameters()]
        flats = optimizer.fp16_partitioned_groups_flat
        assert {t.untyped_storage().data_ptr() for t in (*pieces, *flats)} == {
            arena.publish.untyped_storage().data_ptr()
        }
        assert optimizer.param_groups_fp16_flat_cpu_memory == []
        assert optimizer.counters.read().h2d_bytes == 0


class Validated(Sharded):
    """Fetches its weights between two steps as well."""

    validation_step = Sharded.training_step
    val_dataloader = Sharded.train_dataloader


def test_weights_outlive_the_training(tmp_path: Path) -> None:
    """Of a model that is made in pieces: they are gathered, saved and tested."""
    runs = []
    for case in (NETWORK, on_host(NETWORK)):
        model = Validated()
        callbacks = [Places()] if case.offload_parameters else []
        limits = {"max_epochs": 1, "val_check_interval": 3, "limit_val_batches": 2, "limit_test_batches": 3}
        trainer = make_trainer(case.make_strategy(), callbacks=callbacks, **limits)
        trainer.fit(model)
        with GatheredParameters(list(model.parameters())):
            torch.save(model.state_dict(), tmp_path / "weights.pt")
        losses = trainer.test(model, verbose=False)
        saved = torch.load(tmp_path / "weights.pt", weights_only=True)
        with GatheredParameters(list(model.parameters())):
            assert_same_tensors(list(model.state_dict().values()), list(saved.values()))
        runs.append((losses, saved))
    (losses, weights), (losses_on_host, weights_on_host) = runs
    assert losses_on_host == losses
    assert_same_tensors(list(weights_on_host.values()), list(weights.values()))


def test_a_deepspeed_json_is_enough() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": True}}
    by_keyword = ZenFlowStrategy(stage=3, offload_parameters=True)
    by_config = ZenFlowStrategy({"zero_optimization": {**zero, "zenflow": {"update_interval": "auto"}}})
    for strategy in (
        by_keyword,
        by_config,
        ZenFlowStrategy({"zero_optimization": {"stage": 3, "cpu_offload_param": True}}),
    ):
        assert strategy.zenflow_config.is_immediate
        assert strategy.config["zero_optimization"]["offload_param"]["device"] == "cpu"
    given = ZenFlowConfig(worker_cores=1)
    assert ZenFlowStrategy(given, stage=3, offload_parameters=True).zenflow_config.worker_cores == 1
    with pytest.raises(ValueError, match="publish_lag must be 0 or 'auto' where parameters are in host memory, got 1"):
        ZenFlowStrategy(stage=3, offload_parameters=True, publish_lag=1)


@pytest.mark.parametrize(("moments", "largest"), [("float32", 16.7), ("bfloat16", 12.7), ("int8", 10.8)])
def test_bytes_of_host_memory(moments: Any, largest: float) -> None:
    """Of a Llama of 7B: states, weights, gradients, by formula. DeepSpeed's takes 20 a parameter."""
    shapes = [*[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008), (4096,), (4096,)] * 32
    slices: list[Slice] = []
    for number, shape in enumerate([(32000, 4096), *shapes, (4096,), (32000, 4096)]):
        begin = slices[-1].begin + slices[-1].numel if slices else 0
        numel, is_matrix = torch.Size(shape).numel(), len(shape) == 2
        columns = shape[-1] if is_matrix else 1
        slices.append(
            Slice(
                parameter=number, param_group=0, begin=begin, start=0, numel=numel, columns=columns, is_matrix=is_matrix
            )
        )
    numel = slices[-1].begin + slices[-1].numel
    config = ZenFlowConfig(moments_dtype=moments).with_weights_on_host()
    zero: Any = replace(
        ZeroPartition(
            optimizer=None,  # type: ignore[arg-type]
            masters=[torch.empty(numel, device="meta")],
            slices=slices,
            weights=[torch.empty(numel, dtype=torch.bfloat16, device="meta")],
            device=torch.device("cuda"),
            shapes=[],
            group=None,  # type: ignore[arg-type]
        ),
        in_place=True,
    )
    n_blocks = blocks_wanted([1], in_backward=True, numel=numel, awaited_singly=True)
    partition = zero.publisher.cut_partition(slices, [numel], n_blocks, torch.bfloat16)
    plan = MemoryPlan(config=config, zero=zero, partition=partition, n_threads=16)
    assert largest - 0.5 < plan.n_bytes(plan.candidates) / numel < largest
