"""`moments_dtype: bfloat16`: the state has the bits of the oracle, whose moments are rounded once a window, and resumed and disturbed runs
have those of the run itself."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor
from typing_extensions import override

from harness import APPROXIMATE, EVERYTHING, Case, Run, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.schedule.staggered import blocks_wanted
from models import SHAPES, LinearLossModule
from rank_processes import run_on_ranks
from reference import places_of_elements
from replay_reference import ReplayedAdamW, noise_of, noise_seed, round_stochastically
from same_bits import assert_same_run, assert_same_state, assert_same_tensors
from worker_killer import KillsWorker

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

BF16 = {"moments_dtype": "bfloat16"}
CASE = Case(
    topk_ratio=0.0,
    steps=11,
    model_options={"shapes": SHAPES[:6]},
    # Elements; small enough that gradients arrive one after the other.
    strategy_options={**BF16, "reduce_bucket_size": 200},
)
"""The gradients do not depend on the weights. The last parameter of the model, which has none in every second step, is left out: its block
is then submitted at the end of the step, with another window."""


def case_of(s: int, d: int, **fields: object) -> Case:
    return replace(CASE, update_interval=s, publish_lag=d, **fields)  # type: ignore[arg-type]


NOT_FINITE = {"not_finite": {(4, 0): math.nan, (6, 0): math.inf}}
CASES = {
    "S=1, d=0, clipped": case_of(1, 0, max_norm=0.5),
    "S=4, d=1, accumulated": case_of(4, 1, accumulate=2),
    "S=2, d=0, columns on the device": case_of(2, 0, topk_ratio=0.3),
}
SLOW_CASES = {
    **{f"S={s}, d={d}": case_of(s, d) for s in (1, 2, 4) for d in (0, 1)},
    **{f"S={s}, d=0, clipped": case_of(s, 0, max_norm=0.5) for s in (2, 4)},
    "at the end of the step": case_of(4, 0).with_keys(optimizer_in_backward=False),
    "columns on the device": case_of(4, 1, topk_ratio=0.3, max_norm=0.5),
    "flushes": case_of(4, 1, flush_after=(3, 4, 8)),
    "flushes, one behind": case_of(2, 0, flush_after=(3, 4, 8), max_norm=0.5),
    "not finite": case_of(1, 0, model_options={**CASE.model_options, **NOT_FINITE}, max_norm=0.5),
    "not finite, S=4": case_of(4, 1, model_options={**CASE.model_options, **NOT_FINITE}),
    "bf16": case_of(4, 1, precision="bf16-true", max_norm=0.5),
    "three threads": case_of(1, 0).with_keys(worker_cores=2),
    "Adam": case_of(2, 1, optimizer=replace(CASE.optimizer, kind="Adam")),
}


def expected(case: Case, factors: list[float], *, world_size: int = 1) -> ReplayedAdamW:
    """The oracle's state at the end.

    Windows end as the schedule says, in step 1 where columns are selected in it, and with each flush. Where blocks are submitted in
    backward, a job commits the steps before its own. The step that selects, and the first one from which a clip factor can be predicted,
    submit at their ends.
    """
    s, in_backward = case.update_interval, case.publish_lag == 0
    in_backward &= case.strategy_options.get("optimizer_in_backward", True)
    weights, gradients, groups = case.fixed_gradients(world_size=world_size)
    parameters = case.make_model().parameter_groups()
    n_blocks = blocks_wanted([s], in_backward=in_backward, numel=0)
    blocks, indices = places_of_elements(parameters, n_blocks, world_size)
    state = ReplayedAdamW(master=weights, elements=indices)
    first_tentative = 1 + (case.topk_ratio > 0) + bool(case.max_norm)
    for step in range(1, case.steps + 1):
        state.step(gradients[step - 1], groups[step - 1], factors[step - 1])
        all_close = step == case.steps or step in case.flush_after or (step == 1 and case.topk_ratio > 0)
        phases = set()
        if not in_backward or step < first_tentative:
            phases.add(step % s)
        if in_backward and step + 1 >= first_tentative:
            phases.add((step + 1) % s)
        closing = [torch.full_like(block, all_close, dtype=torch.bool) for block in blocks]
        for phase in phases:
            closing = [c | (block % s == phase) for c, block in zip(closing, blocks, strict=True)]
        state.close_windows(closing, step)
    return state


def assert_has_the_oracles_bits(run: Run, case: Case, *, world_size: int = 1) -> None:
    oracle = expected(case, run.factors, world_size=world_size)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        ours: list[Tensor] = getattr(run, kind)
        assert all(x.dtype == (torch.float32 if kind == "master" else torch.bfloat16) for x in ours)
        assert_same_tensors([x.float() for x in ours], getattr(oracle, kind), kind)
    assert_same_tensors(run.weights, [w.to(case.dtype) for w in run.master], "the weight at the end")
    assert run.skipped == sum(not math.isfinite(factor) for factor in run.factors)


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_oracle(name: str) -> None:
    assert_has_the_oracles_bits(run_here(CASES[name]), CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_the_bits_of_the_oracle_in_every_mode(name: str) -> None:
    assert_has_the_oracles_bits(run_here(SLOW_CASES[name]), SLOW_CASES[name])


@pytest.mark.slow
def test_two_ranks() -> None:
    """Whose partitions cut parameters, and number their elements each from 0."""
    cases = {name: replace(case, max_norm=0.5) for name, case in CASES.items()}
    for name, runs in run_on_ranks(cases).items():
        for run in runs:
            assert_has_the_oracles_bits(run, cases[name], world_size=2)


@pytest.mark.parametrize("values", [torch.rand(10_000) * 1e-3, torch.rand(10_000).exp2().bfloat16().float()])
def test_the_noise_is_unbiased_and_leaves_bfloat16_as_it_is(values: Tensor) -> None:
    rounded = round_stochastically(values, noise_of(noise_seed(7), torch.arange(len(values))))
    error = (rounded - values) / values
    assert error.abs().max() < 2**-7
    assert error.mean().abs() < 1e-4
    assert torch.equal(rounded, values) == torch.equal(values, values.bfloat16().float())


DISTURBED = Case(topk_ratio=0.3, steps=18, max_norm=0.5, strategy_options=BF16)
"""The gradients of `SmallNet` depend on the weights that it is shown."""


def in_backward(case: Case) -> Case:
    return replace(case, update_interval=1, publish_lag=0).with_keys(reduce_bucket_size=200)


@pytest.mark.parametrize(
    "case",
    [
        replace(in_backward(DISTURBED), model="SmallNet"),
        pytest.param(DISTURBED.with_keys(**EVERYTHING), marks=pytest.mark.slow),
        pytest.param(
            replace(DISTURBED, model="SmallNet").with_keys(**APPROXIMATE, offload=True), marks=pytest.mark.slow
        ),
        pytest.param(
            replace(DISTURBED, precision="bf16-true", update_interval=2, publish_lag=0), marks=pytest.mark.slow
        ),
    ],
    ids=["in backward", "everything", "offload", "S=2, d=0"],
)
def test_a_resumed_run_continues_bit_for_bit(case: Case, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole = run_here(replace(case, save_at=7, checkpoint=path))
    rest = run_here(replace(case, checkpoint=path))
    assert len(rest.shown) == case.steps - 7
    assert_same_run(rest, replace(whole, shown=whole.shown[7:], losses=whole.losses[7:], factors=whole.factors[7:]))
    assert all(m.dtype == torch.bfloat16 for m in [*rest.exp_avg, *rest.exp_avg_sq])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"update_interval": 4, "publish_lag": 1}, {"update_interval": 1, "publish_lag": 0}]
)
def test_killed_in_every_step_and_with_other_numbers_of_threads(options: dict[str, int]) -> None:
    large = {"shapes": ((601, 499), (211, 503), (997,))}
    case = replace(DISTURBED, model_options=large, **options)  # type: ignore[arg-type]
    whole = run_here(case)
    killer = KillsWorker(seed=1)
    killed = run_here(case.with_keys(max_worker_restarts=10**6), callbacks=[killer])
    assert killer.restarts >= case.steps / 2
    assert_same_run(killed, whole)
    assert_same_run(run_here(case.with_keys(worker_cores=2)), whole)


def moments_in(path: Path) -> list[Tensor]:
    """Of all parameter groups in rank 0's file of a checkpoint."""
    (file,) = path.glob("checkpoint/*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    of_groups = torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"]
    return [of_groups[group][key] for group in sorted(of_groups) for key in ("exp_avg", "exp_avg_sq")]


class AsksForState(pl.Callback):
    """DeepSpeed's own way to the moments of a parameter, after a flush."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LinearLossModule)
        parameters = [p for group in pl_module.parameter_groups() for p in group]
        self.found = [safe_get_full_optimizer_state(p, "exp_avg_sq") for p in parameters]


def test_runs_with_either_type_load_checkpoints_of_the_other(tmp_path: Path) -> None:
    """A run that loads the other type takes the exact state, or rounds it once to nearest."""
    saved: dict[str, Run] = {}
    state = AsksForState()
    for dtype in ("float32", "bfloat16"):
        case = replace(CASE, steps=5, save_at=5, checkpoint=str(tmp_path / dtype)).with_keys(moments_dtype=dtype)
        saved[dtype] = run_here(case, callbacks=[state])
        assert all(moments.dtype == getattr(torch, dtype) for moments in moments_in(tmp_path / dtype))
    assert all(x.dtype == torch.float32 for x in state.found)
    assert_same_tensors(state.found, [x.float() for x in saved["bfloat16"].exp_avg_sq], "what DeepSpeed finds")
    for ours, theirs in (("bfloat16", "float32"), ("float32", "bfloat16")):
        case = replace(CASE, steps=5, checkpoint=str(tmp_path / theirs)).with_keys(moments_dtype=ours)
        loaded = run_here(case)
        assert_same_tensors(loaded.master, saved[theirs].master, "master")
        dtype = getattr(torch, ours)
        for kind in ("exp_avg", "exp_avg_sq"):
            assert_same_tensors(getattr(loaded, kind), [x.to(dtype) for x in getattr(saved[theirs], kind)], kind)


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_other_numbers_of_ranks_load_the_exact_state(before: int, after: int, tmp_path: Path) -> None:
    case = replace(CASE, steps=5, checkpoint=str(tmp_path / "saved.ckpt"), max_norm=0.5)

    def run(case: Case, ranks: int) -> Run:
        return run_here(case) if ranks == 1 else run_on_ranks({"case": case}, ranks=ranks)["case"][0]

    saved, loaded = run(replace(case, save_at=5), before), run(case, after)
    assert_same_state(loaded, saved)
    assert_same_tensors(loaded.weights, saved.weights)


class SavedMoments(pl.Callback):
    """Where the moments are that a checkpoint of the run would hold."""

    def __init__(self) -> None:
        self.are_the_arenas: list[bool] = []

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        optimizer = trainer.strategy.zenflow_optimizer
        assert optimizer is not None
        arena = optimizer.parts.rank.arena
        ours = {m.untyped_storage().data_ptr() for m in (arena.exp_avg, arena.exp_avg_sq)}
        states = optimizer.state_dict()["base_optimizer_state"]["state"].values()
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        self.are_the_arenas = [m.untyped_storage().data_ptr() in ours for m in moments]


def test_neither_a_save_nor_a_load_copies_the_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is the arena's memory; loading gives the optimizer, which would convert them all at once, empty moments."""
    loaded: list[int] = []
    load = torch.optim.Optimizer.load_state_dict

    def watched(self: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        loaded.extend(of[key].numel() for of in state["state"].values() for key in ("exp_avg", "exp_avg_sq"))
        load(self, state)

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", watched)
    path, moments = tmp_path / "saved", SavedMoments()
    case = replace(CASE, steps=5, checkpoint=str(path)).with_keys(moments_dtype="bfloat16")
    run_here(replace(case, save_at=5), callbacks=[moments])
    assert moments.are_the_arenas and all(moments.are_the_arenas)
    run_here(case)
    assert loaded and not any(loaded)


def test_why_not_to_nearest() -> None:
    """Second moments of gradients that get ten times smaller: to nearest they never follow; stochastically their mean is right."""
    generator = torch.Generator().manual_seed(3)
    element = torch.arange(4096)
    exact, nearest, ours = torch.zeros(3, len(element))
    for step in range(1, 3001):
        squared = (1.0 if step <= 1000 else 0.01) * torch.randn(len(element), generator=generator).square()
        exact, nearest, ours = (0.999 * v + 0.001 * squared for v in (exact, nearest, ours))
        nearest = nearest.bfloat16().float()
        ours = round_stochastically(ours, noise_of(noise_seed(step), element))
    assert nearest.mean() > 5 * exact.mean()
    assert ours.mean() == pytest.approx(exact.mean().item(), rel=0.005)
    assert (ours / exact - 1).square().mean().sqrt() < 0.1
