"""Comparisons of runs: bit for bit with each other and with the oracle, to float32's rounding with AdamW in float64, step by step."""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from harness import Case, Run, untrained
from lightning_zenflow.core.schedule import blocks_wanted
from replay_reference import ReplayedAdamW
from zenflow_reference import AdamWState

_KINDS = ("master", "exp_avg", "exp_avg_sq")


def assert_same_tensors(ours: Sequence[Tensor], theirs: Sequence[Tensor], what: str = "") -> None:
    """Lists with one tensor a parameter have the same bits, but that all NaNs are the same."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(
            a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, i=i: f"{what} of parameter {i}: {text}"
        )


def assert_same_state(ours: Run, theirs: Run) -> None:
    """Master weights, moments and counts are the same at the end, whatever the model showed meanwhile."""
    for kind in _KINDS:
        assert_same_tensors(getattr(ours, kind), getattr(theirs, kind), kind)
    assert ours.counts == theirs.counts
    assert ours.skipped == theirs.skipped


def assert_same_run(ours: Run, theirs: Run) -> None:
    """Besides the state at the end, weights and losses are the same in every step."""
    for step, (a, b) in enumerate(zip(ours.shown, theirs.shown, strict=True)):
        assert_same_tensors(a, b, f"the weight shown in step {step}")
    assert_same_tensors(ours.weights, theirs.weights, "the weight at the end")
    assert_same_state(ours, theirs)
    for a, b in zip(ours.losses, theirs.losses, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_close_to_adamw(run: Run, state: AdamWState, *, atol: float = 1e-6) -> None:
    """The state at the end is AdamW's in float64.

    Weights are up to 4, hence rounded to 2.4e-7 at each of the steps; the moments' errors are relative to their largest term.
    """
    for i, weight in enumerate(state.weights):
        torch.testing.assert_close(run.master[i].double(), weight, rtol=1e-6, atol=atol)
        for ours, theirs, of_largest in (
            (run.exp_avg[i], state.exp_avg[i], 1e-6),
            (run.exp_avg_sq[i], state.exp_avg_sq[i], 1e-8),
        ):
            largest = float(theirs.abs().max()) if theirs.numel() else 0.0
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=of_largest * max(1.0, largest))


def assert_is_adamw(case: Case, *runs: Run, world_size: int = 0, shown: bool = False, atol: float = 2e-6) -> None:
    """A run of a case leaves AdamW on its own gradients: to rounding in float64, and with the bits of `ReplayedAdamW`.

    The gradients are computed again at the weights that the run showed. Each step is replayed with the
    run's factor, which is compared with the clip coefficient. A parameter that is frozen when a step begins has no part in it.

    Args:
        case: what was run.
        runs: of the ranks, or of the first ones.
        world_size: number of ranks; 0: as many as `runs`.
        shown: whether nothing is late: every forward pass saw the weights that AdamW had by then.
        atol: of weights in float64; infinite: what depends on them is not compared there.
    """
    run, world_size = runs[0], world_size or len(runs)
    oracle = case.make_oracle(world_size=world_size)
    parameters = oracle.parameters
    in_backward = case.publish_lag == 0 and case.strategy_options.get("overlap_step", True)
    moments_dtype = case.strategy_options.get("moments_dtype", "float32")
    rounds = moments_dtype != "float32"
    n_blocks = blocks_wanted([case.update_interval], in_backward=in_backward, numel=0) if rounds else 1
    blocks, indices, scales = oracle.places(n_blocks)
    of_scales = scales if moments_dtype == "int8" else None
    bits = ReplayedAdamW(master=parameters, elements=indices, scales=of_scales)  # type: ignore[arg-type]
    exact = AdamWState.start(parameters, torch.float64)
    frozen: list[int] = []
    for step, (weights, factor) in enumerate(zip(run.shown, run.factors, strict=True)):
        for other in runs[1:]:
            assert_same_tensors(other.shown[step], weights, f"the weight shown in step {step}")
        if shown:
            assert_same_tensors(weights, [w.to(case.dtype) for w in bits.master], f"the weight shown in step {step}")
        assert all(
            torch.isfinite(w).all() or not torch.isfinite(m).all() for w, m in zip(weights, bits.master, strict=True)
        )
        oracle.steps = step
        before, frozen = frozen, oracle.follow_freezing()
        for i in {*before} & {*frozen} if step + 1 < case.steps else ():
            # What is shown in the first frozen step is noted before it is frozen.
            assert torch.equal(run.shown[step + 1][i], weights[i])
        oracle.follow(weights)
        losses, gradients = oracle.gradients()
        # Where layers are frozen or unfrozen, weights are noted before the flush that this brings.
        for micro, of_ranks in enumerate(losses if frozen == before else ()):
            for other, loss in zip(runs, of_ranks, strict=False):
                assert other.losses[step][micro] == pytest.approx(loss, rel=1e-6, abs=1e-6, nan_ok=True)
        groups = oracle.groups(step)
        given = [None if i in frozen else g for i, g in enumerate(gradients)]
        if not sum(float(g.double().square().sum()) for g in given if g is not None) <= torch.finfo(torch.float32).max:
            given[0] = torch.full_like(gradients[0], math.nan)
        bits.step(given, groups, factor)
        clip = exact.step(given, groups, max_norm=case.max_norm or 0.0)
        assert factor == pytest.approx(clip, rel=1e-6, nan_ok=True)
        if rounds:
            bits.close_windows(_closing(case, step + 1, blocks, in_backward=in_backward), step + 1)
    for run in runs:
        assert run.schedules == runs[0].schedules
        assert (run.skipped, run.counts) == (exact.skipped, [exact.count] * len(oracle.parameter_groups))
        for kind in _KINDS:
            ours = getattr(run, kind)
            assert all(
                x.dtype == (torch.bfloat16 if moments_dtype == "bfloat16" and kind != "master" else torch.float32)
                for x in ours
            )
            assert_same_tensors([x.float() for x in ours], getattr(bits, kind), kind)
        # Some have their own types again after a training in float32.
        at_the_end = [master.to(w.dtype) for master, w in zip(run.master, run.weights, strict=True)]
        assert_same_tensors(run.weights, at_the_end, "the weight at the end")
        for name, value in run.untrained.items() if world_size == 1 else ():
            assert_same_tensors([value], [untrained(oracle.module)[name].to(value.dtype)], name)
    # Adam adds the decayed weights, and with them their errors, to the gradients.
    adds_weights = any(h.weight_decay and not h.decoupled for h in case.optimizer.groups(0))
    if not rounds and not (adds_weights and math.isinf(atol)):
        assert_close_to_adamw(runs[0], exact, atol=atol)


def _closing(case: Case, step: int, blocks: Sequence[Tensor], *, in_backward: bool) -> list[Tensor]:
    """For each parameter, which elements are in a block whose window ends with a step.

    Windows end as the schedule says, in step 1 where columns are selected in it, and with each flush. Where blocks are submitted in
    backward, a job commits the steps before its own. The step that selects, and the first one from which a clip factor can be predicted,
    submit at their ends.
    """
    s, selects = case.update_interval, case.topk_ratio > 0
    first_tentative = 1 + selects + bool(case.max_norm)
    phases = set()
    if not in_backward or step < first_tentative:
        phases.add(step % s)
    if in_backward and step + 1 >= first_tentative:
        phases.add((step + 1) % s)
    closes_all = step == case.steps or step in case.flush_after or (step == 1 and selects)
    return [torch.isin(b % s, torch.tensor(sorted(phases))) | closes_all for b in blocks]


def compare_with_oracle(
    case: Case, runs: Sequence[Run], predicted: Sequence[Mapping[int, float]] | None = None
) -> None:
    """Of each step the weights that were shown, and the losses. `runs` has one entry a rank.

    `predicted` has for each step the factors of the blocks that were submitted in backward, of one rank; None: they are the true ones.

    float32, freely: the oracle never sees the engine's weights. bf16: each step starts from the weights that the engine showed, since a
    difference in the last place of a float32 weight tips the rounding to bf16 now and then; freely running, the two would drift apart.
    """
    oracle = case.make_oracle(world_size=len(runs))
    if case.publish_lag == 0 and case.strategy_options.get("overlap_step", True):
        n_blocks = blocks_wanted([case.update_interval], in_backward=True, numel=0)
        oracle.zenflow.blocks = oracle.places(n_blocks)[0]
    if (ratio := case.strategy_options.get("offload_ratio", 1.0)) < 1:
        assert case.loop == "direct", "the first blocks are resident"
        of_parameters = oracle.zenflow.blocks
        n_blocks = 1 + max(int(b.max()) for b in of_parameters)
        oracle.zenflow.resident = [b < round((1 - ratio) * n_blocks) for b in of_parameters]
    follows, different = case.dtype != torch.float32, 0
    for step in range(case.steps):
        if follows:
            oracle.follow(runs[0].shown[step])
        factors = None
        if predicted is not None:
            of_blocks = torch.full((1 + max(int(b.max()) for b in oracle.zenflow.blocks),), runs[0].factors[step])
            for block, factor in predicted[step].items():
                of_blocks[block] = factor
            factors = [of_blocks[of_elements] for of_elements in oracle.zenflow.blocks]
        losses = oracle.step(factors)
        for micro, of_ranks in enumerate(losses):
            for run, loss in zip(runs, of_ranks, strict=True):
                assert run.losses[step][micro] == pytest.approx(
                    loss, rel=5e-7, abs=1e-6 if follows else 5e-6, nan_ok=True
                )
        if step + 1 in case.flush_after or step + 1 == case.steps:
            oracle.flush()
        for run in runs:
            shown = run.shown[step + 1] if step + 1 < case.steps else run.weights
            # float32: torch's AdamW groups its operations in another way than the kernel, which is about one unit in the last place of a
            # weight and step (weights are below 1.5, their unit is at most 1.2e-7), fed back through the gradients for up to twenty steps.
            # A weight shown one step too early or too late would differ by a learning rate, 3e-3. bf16 has 8 significant bits.
            rtol, atol = (2**-7, 1e-6) if follows else (0.0, 5e-6)
            for ours, theirs in zip(shown, oracle.parameters, strict=True):
                torch.testing.assert_close(ours.float(), theirs.detach().float(), rtol=rtol, atol=atol)
                different += follows and int((ours != theirs).sum())
    total = len(runs) * case.steps * sum(p.numel() for p in oracle.parameters)
    assert different < 2e-3 * total, f"{different} of {total} rounded differently"


def _is_predicted(case: Case) -> bool:
    """Whether what is shown may have another clip factor than the step's."""
    config, options = case.make_strategy().zenflow_config, case.model_options
    hostile = case.max_norm or options.get("not_finite") or options.get("factors")
    return config.submits_in_backward and config.predicts_clipping and bool(hostile)


def shows_adamw(case: Case) -> bool:
    """Whether every forward pass sees AdamW's weights: what is in place is corrected where it was predicted, what is resident is exact."""
    if case.strategy_options.get("in_place") or case.offload_parameters:
        return True
    config = case.make_strategy().zenflow_config
    if config.moments_dtype != "float32" or case.schedules:
        return False
    immediate = config.is_immediate and config.weight_prediction != 1.0 and not _is_predicted(case)
    return immediate or config.offload_ratio == 0


def _knows_every_step(case: Case) -> bool:
    """Whether the oracle has all that is shown."""
    options = case.strategy_options
    is_exact = not any(options.get(key, 0) for key in ("weight_prediction", "provisional_scale"))
    is_exact = is_exact and options.get("select_interval") != "auto" and "moments_dtype" not in options
    # Adam adds the decayed weights to the gradients: where these are next to nothing, their signs are those of rounding errors.
    is_exact = is_exact and case.optimizer.kind == "AdamW"
    # Nor does it know of squares that are not in float32, which `assert_is_adamw` does; losses that are large show rounding errors.
    numbers = [*case.model_options.get("not_finite", {}).values(), *case.model_options.get("factors", {}).values()]
    is_exact = is_exact and not any(1e3 < abs(number) < math.inf for number in numbers)
    # Where nothing overlaps, the lag is none; the first blocks are resident where their gradients arrive last.
    is_exact = is_exact and (options.get("overlap_step", True) or case.publish_lag == 0)
    is_exact = is_exact and (case.loop == "direct" or "offload_ratio" not in options)
    return is_exact and not (case.schedules or options.get("in_place") or _is_predicted(case))


def assert_as_promised(case: Case, *runs: Run) -> None:
    """What holds of a case's runs, of all ranks: the state is AdamW's, and so is what is shown, or it is the oracle's in every step."""
    assert_is_adamw(case, *runs, shown=shows_adamw(case))
    if _knows_every_step(case):
        compare_with_oracle(case, runs)
