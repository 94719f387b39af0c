"""The tail step by step against the oracle of the worker's arithmetic: exact states with the same bits, whatever is killed or resumed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor
from typing_extensions import override

from harness import AUTO, EVERYTHING, Case, Run, run_here
from models import SHAPES, TestModule
from replay_reference import ReplayedAdamW
from same_bits import assert_same_tensors
from worker_killer import KillsWorker

pytestmark = pytest.mark.usefixtures("no_worker_is_left")

BEGIN, LAST = 3, (0, 1, 2)
FLUSHES = (5, 6, 10)
OF_SHAPES = {
    "prime sizes": SHAPES[:6],
    "one row, one column": ((1, 300), (211, 1), (17,)),
    "fewer elements than blocks": ((2, 3), (1,)),
    "four dimensions": ((5, 4, 3, 2), (64, 3), (7,)),
}
SCHEDULES = {
    "S=1": ((BEGIN, 1, 0, LAST),),
    "S=2": ((BEGIN, 2, 0, LAST),),
    "it grows, S changes": ((BEGIN, 1, 0, LAST[:2]), (5, 1, 0, LAST), (8, 2, 0), (11, 1, 0, (*LAST, 7))),
}


def case_of(shapes: str, schedule: str, **fields: object) -> Case:
    case = Case(
        steps=14,
        topk_ratio=0.3,
        max_norm=1.0,
        model_options={"shapes": OF_SHAPES[shapes]},
        schedules=SCHEDULES[schedule],
        strategy_options={**AUTO, "max_worker_restarts": 1000},
    )
    return replace(case, **fields)  # type: ignore[arg-type]


class ReadsState(pl.Callback):
    """Reads the exact state after some steps: {step: [kind][parameter]}."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps
        self.states: dict[int, list[list[Tensor]]] = {}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        assert isinstance(pl_module, TestModule)
        step = trainer.global_step
        if step in self.steps and step not in self.states:
            parameters = [p for group in pl_module.parameter_groups() for p in group]
            moments = [
                [safe_get_full_optimizer_state(p, kind) for p in parameters] for kind in ("exp_avg", "exp_avg_sq")
            ]
            self.states[step] = [[safe_get_full_fp32_param(p) for p in parameters], *moments]


def history(case: Case, factors: Sequence[float]) -> list[list[list[Tensor]]]:
    """[step][kind][parameter]: the oracle's states before all steps and after each.

    Args:
        case: of gradients that do not depend on weights.
        factors: of clipping, by step.
    """
    weights, gradients, groups = case.fixed_gradients()
    oracle = ReplayedAdamW(master=weights, elements=[])
    states = [[oracle.master[:], oracle.exp_avg[:], oracle.exp_avg_sq[:]]]
    for of_step, of_groups, factor in zip(gradients, groups, factors, strict=True):
        oracle.step(of_step, of_groups, factor)
        states.append([oracle.master[:], oracle.exp_avg[:], oracle.exp_avg_sq[:]])
    return states


def assert_same_states(ours: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]], when: str) -> None:
    for kind, *tensors in zip(("master", "exp_avg", "exp_avg_sq"), ours, theirs, strict=True):
        assert_same_tensors(*tensors, f"{when}: {kind}")


def state_of(run: Run) -> list[list[Tensor]]:
    return [run.master, run.exp_avg, run.exp_avg_sq]


def check(shapes: str, schedule: str, *, keys: dict[str, object], seed: int) -> None:
    """With kills in every step, and flushes, after which each state is compared."""
    case = case_of(shapes, schedule).with_keys(**keys)
    reader, killer = ReadsState(FLUSHES), KillsWorker(seed=seed)
    run = run_here(case, callbacks=[reader, killer])
    assert killer.kills >= case.steps
    states = history(case, run.factors)
    assert reader.states.keys() == set(FLUSHES)
    for step, state in reader.states.items():
        assert_same_states(state, states[step], f"after step {step}")
    assert_same_states(state_of(run), states[-1], "at the end")
    assert_same_tensors(run.weights, states[-1][0], "the weight at the end")


def test_states_after_flushes_and_kills() -> None:
    check("prime sizes", "S=1", keys={}, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, EVERYTHING], ids=["exact", "everything"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shapes", OF_SHAPES)
def test_states_after_flushes_and_kills_in_every_shape(shapes: str, schedule: str, keys: dict[str, object]) -> None:
    check(shapes, schedule, keys=keys, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["S=1", "S=2"])
@pytest.mark.parametrize("shapes", OF_SHAPES)
def test_states_of_a_resumed_run_with_kills(shapes: str, schedule: str, tmp_path: Path) -> None:
    case = case_of(shapes, schedule, save_at=8, checkpoint=str(tmp_path / "8.ckpt"))
    whole = run_here(case)
    states = history(case, whole.factors)
    assert_same_states(state_of(whole), states[-1], "at the end")
    reader, killer = ReadsState((9, 12)), KillsWorker(seed=4)
    (_, s, d, *_), *_ = case.schedules
    rest = run_here(replace(case, save_at=0, schedules=((100, s, d),)), callbacks=[reader, killer])
    assert killer.kills >= 6
    assert rest.factors == whole.factors[8:]
    for step, state in reader.states.items():
        assert_same_states(state, states[step], f"after step {step}")
    assert_same_states(state_of(rest), states[-1], "at the end of the resumed run")


@pytest.mark.slow
@pytest.mark.parametrize("shapes", OF_SHAPES)
def test_every_step_shows_the_oracles_weights(shapes: str) -> None:
    """Unclipped, and with all other columns host-owned."""
    case = case_of(shapes, "S=1", topk_ratio=0, max_norm=None)
    run = run_here(case.with_keys(weight_prediction=0, provisional_scale=0))
    states = history(case, run.factors)
    for step, shown in enumerate(run.shown):
        assert_same_tensors(shown, states[step][0], f"step {step}")
