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

from gpu_cases import optimizer_of
from harness import APPROXIMATE, EVERYTHING, Case, Run, run_here
from lightning_zenflow.checkpoint.reader import SavedCheckpoint
from models import SHAPES, LinearLossModule
from rank_processes import run_on_ranks
from replay_reference import noise_of, noise_seed, round_stochastically
from same_bits import assert_is_adamw, assert_same_run, assert_same_state, assert_same_tensors
from worker_killer import KillsWorker

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

BF16 = {"moments_dtype": "bfloat16"}
CASE = Case(topk_ratio=0.0, steps=11, model_options={"shapes": SHAPES[:6]}, loop="direct").with_keys(**BF16)
"""The gradients do not depend on the weights. The last parameter of the model, which has none in every second step, is left out: its block
is then submitted at the end of the step, with another window."""


def case_of(s: int, d: int, **fields: Any) -> Case:
    return replace(CASE, update_interval=s, publish_lag=d, **fields)


NOT_FINITE = {**CASE.model_options, "not_finite": {(4, 0): math.nan, (6, 0): math.inf}}
CASES = {
    "S=4, d=1, accumulated": case_of(4, 1, accumulate=2),
    "S=2, d=0, columns on the device": case_of(2, 0, topk_ratio=0.3),
    **{f"S={s}, d={d}": case_of(s, d) for s in (1, 2, 4) for d in (0, 1)},
    **{f"S={s}, d=0, clipped": case_of(s, 0, max_norm=0.5) for s in (1, 2, 4)},
    "at the end of the step": case_of(4, 0).with_keys(optimizer_in_backward=False),
    "columns on the device": case_of(4, 1, topk_ratio=0.3, max_norm=0.5),
    "flushes": case_of(4, 1, flush_after=(3, 4, 8)),
    "flushes, one behind": case_of(2, 0, flush_after=(3, 4, 8), max_norm=0.5),
    "not finite": case_of(1, 0, model_options=NOT_FINITE, max_norm=0.5),
    "not finite, S=4": case_of(4, 1, model_options=NOT_FINITE),
    "bf16": case_of(4, 1, precision="bf16-true", max_norm=0.5),
    "two threads": case_of(1, 0).with_keys(worker_cores=2),
    "Adam": case_of(2, 1, optimizer=replace(CASE.optimizer, kind="Adam")),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_oracle(name: str) -> None:
    assert_is_adamw(CASES[name], run_here(CASES[name]))


def test_lightning_gives_the_same_bits() -> None:
    case = CASES["S=2, d=0, columns on the device"]
    assert_same_run(run_here(replace(case, loop="trainer").with_keys(reduce_bucket_size=200)), run_here(case))


@pytest.mark.parametrize("values", [torch.rand(10_000) * 1e-3, torch.rand(10_000).exp2().bfloat16().float()])
def test_the_noise_is_unbiased_and_leaves_bfloat16_as_it_is(values: Tensor) -> None:
    rounded = round_stochastically(values, noise_of(noise_seed(7), torch.arange(len(values))))
    error = (rounded - values) / values
    assert error.abs().max() < 2**-7
    assert error.mean().abs() < 1e-4
    assert torch.equal(rounded, values) == torch.equal(values, values.bfloat16().float())


DISTURBED = Case(topk_ratio=0.3, steps=18, max_norm=0.5, strategy_options=BF16)
NETWORK = replace(DISTURBED, model="SmallNet", update_interval=1, publish_lag=0).with_keys(reduce_bucket_size=200)
"""Its gradients depend on the weights that it is shown."""
RESUMED = {
    "under Lightning": NETWORK,
    "in backward": replace(NETWORK, loop="direct"),
    "everything": replace(DISTURBED, loop="direct").with_keys(**EVERYTHING),
    "S=2, d=0": replace(NETWORK, update_interval=2, precision="bf16-true", loop="direct").with_keys(**APPROXIMATE),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole = run_here(replace(RESUMED[name], save_at=7, checkpoint=path))
    rest = run_here(replace(RESUMED[name], checkpoint=path))
    assert len(rest.shown) == RESUMED[name].steps - 7
    assert_same_run(rest, replace(whole, shown=whole.shown[7:], losses=whole.losses[7:]))
    assert all(m.dtype == torch.bfloat16 for m in [*rest.exp_avg, *rest.exp_avg_sq])


@pytest.mark.slow
@pytest.mark.parametrize(("s", "d"), [(4, 1), (1, 0)])
def test_killed_in_every_step_and_with_other_numbers_of_threads(s: int, d: int) -> None:
    large = {"shapes": ((601, 499), (211, 503), (997,))}
    case = replace(DISTURBED, model_options=large, update_interval=s, publish_lag=d)
    whole, killer = run_here(case), KillsWorker(seed=1)
    killed = run_here(case.with_keys(max_worker_restarts=10**6), callbacks=[killer])
    assert killer.restarts >= case.steps / 2
    assert_same_run(killed, whole)
    assert_same_run(run_here(case.with_keys(worker_cores=2)), whole)


def saved_moments(path: Path) -> list[Tensor]:
    """Of all parameter groups in rank 0's file of a checkpoint."""
    (file,) = path.glob("checkpoint/*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    of_groups = torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"]
    return [of_groups[group][key] for group in sorted(of_groups) for key in ("exp_avg", "exp_avg_sq")]


class AsksForState(pl.Callback):
    """DeepSpeed's own way to the moments of a parameter after a flush, and where the moments are that a checkpoint would hold."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        self.are_the_arenas: list[bool] = []

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LinearLossModule)
        parameters = [p for group in pl_module.parameter_groups() for p in group]
        self.found = [safe_get_full_optimizer_state(p, "exp_avg_sq") for p in parameters]
        optimizer = optimizer_of(trainer)
        arena = optimizer.parts.rank.arena
        ours = {m.untyped_storage().data_ptr() for m in (arena.exp_avg, arena.exp_avg_sq)}
        states = optimizer.state_dict()["base_optimizer_state"]["state"].values()
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        self.are_the_arenas = [m.untyped_storage().data_ptr() in ours for m in moments]


def test_checkpoints_hold_float32_and_runs_with_either_load_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that loads the other type takes the exact state, or rounds it once to nearest.

    What is saved is the arena's memory, without a copy; loading gives the optimizer, which would convert them all at once, empty moments.
    """
    saved: dict[str, Run] = {}
    loaded: list[int] = []
    load = torch.optim.Optimizer.load_state_dict

    def watched(self: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        loaded.extend(of[key].numel() for of in state["state"].values() for key in ("exp_avg", "exp_avg_sq"))
        load(self, state)

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", watched)
    state, short = AsksForState(), replace(CASE, steps=5, loop="trainer")
    for dtype in ("float32", "bfloat16"):
        case = replace(short, save_at=5, checkpoint=str(tmp_path / dtype)).with_keys(moments_dtype=dtype)
        saved[dtype] = run_here(case, callbacks=[state])
        assert all(moments.dtype == torch.float32 for moments in saved_moments(tmp_path / dtype))
        of_rank = SavedCheckpoint(tmp_path / dtype).optimizer_state(0)["base_optimizer_state"]["state"]
        assert all(of_group["exp_avg"].dtype == getattr(torch, dtype) for of_group in of_rank.values())
        assert state.are_the_arenas and all(state.are_the_arenas)
    assert all(x.dtype == torch.float32 for x in state.found)
    assert_same_tensors(state.found, [x.float() for x in saved["bfloat16"].exp_avg_sq], "what DeepSpeed finds")
    for ours, theirs in (("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        run = run_here(replace(short, checkpoint=str(tmp_path / theirs)).with_keys(moments_dtype=ours))
        assert_same_tensors(run.master, saved[theirs].master, "master")
        for kind in ("exp_avg", "exp_avg_sq"):
            expected = [x.to(getattr(torch, ours)) for x in getattr(saved[theirs], kind)]
            assert_same_tensors(getattr(run, kind), expected, kind)
    assert loaded and not any(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_other_numbers_of_ranks_load_the_exact_state(before: int, after: int, tmp_path: Path) -> None:
    case = replace(CASE, steps=5, checkpoint=str(tmp_path / "saved.ckpt"), max_norm=0.5, loop="trainer")

    def run(case: Case, ranks: int) -> Run:
        return run_here(case) if ranks == 1 else run_on_ranks({"case": case}, ranks=ranks)["case"][0]

    saved, loaded = run(replace(case, save_at=5), before), run(case, after)
    assert_same_state(loaded, saved)
    assert_same_tensors(loaded.weights, saved.weights)


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
