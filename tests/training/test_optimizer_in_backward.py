"""Jobs that are submitted in backward: AdamW's own bits. Where gradients are clipped, factors are predicted, or speculated and verified.

Weights are copied to the device, or are in host memory, where the worker writes them.
"""

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from callbacks import At
from direct_step import DirectStep, direct_step
from eventful_training import random_tensors, train
from harness import APPROXIMATE, AUTO, RESELECTING, Case, fit, optimizer_of, run_here
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.core.device import PAGE_BYTES
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.partition import Partition, build_partition
from lightning_zenflow.offload import build
from networks import FrozenInPart
from processes import wait_for
from rank_processes import run_on_ranks
from recorded_device.tensors import DEVICE
from recorded_device.watch import recorded_device
from same_bits import assert_as_promised, assert_same_run
from side_by_side import compare_weights

TIED = Case(model="TiedNet", steps=10, topk_ratio=0.3, update_interval=1, publish_lag=0, loop="direct")
LINEAR = replace(TIED, model="LinearLossModule")
CHANGES = ((3, 2, 1), (8, 1, 0), (11, 4, 1), (12, 1, 1), (14, 1, 0), (15, 2, 0), (17, 4, 1))
PREDICTED = {
    "TiedNet": TIED,
    "no gradient": LINEAR,
    "S=4, everything": replace(TIED, update_interval=4, flush_after=(5, 6)).with_keys(**APPROXIMATE, **RESELECTING),
    "not finite": replace(LINEAR, max_norm=0.5, model_options={"not_finite": {(4, 0): math.nan, (6, 1): math.inf}}),
    "clipped, changes of schedule": replace(LINEAR, steps=20, schedules=CHANGES, max_norm=0.5).with_keys(
        **APPROXIMATE, **AUTO
    ),
}
"""With predicted clip factors; what lies between these, tests/fuzz draws."""

LIMIT = 1e3
"""Far above the norm of a step without a factor of its own."""


def clipped_in(steps: Sequence[int], **others: Any) -> dict[str, Any]:
    """Options of a `LinearLossModule` whose gradients exceed `LIMIT` in some steps, counted from 0."""
    return {"factors": dict.fromkeys(steps, 1e6) | others.pop("factors", {}), **others}


CASE = Case(steps=12, topk_ratio=0, update_interval=1, publish_lag=0, max_norm=LIMIT, loop="direct").with_keys(
    clip_prediction=False
)
HALF = replace(CASE, model_options=clipped_in((1, 2, 5, 6, 9, 11)))
NOTHING_LATE = {
    "half": HALF,
    "all": replace(CASE, model_options=clipped_in(range(12))),
    "a network": replace(CASE, model="Perceptron", model_options={"widths": [61, 67, 71, 73, 16]}, max_norm=0.7),
    "accumulated": replace(HALF, accumulate=3),
    "never finite": replace(CASE, model_options=clipped_in((2, 7), factors={4: math.nan, 6: math.inf})),
    # When all other blocks have been shown with it.
    "not finite in the end": replace(CASE, model_options=clipped_in((2, 7), not_finite={(4, 0): math.inf})),
    "frozen and unfrozen": replace(CASE, model_options=clipped_in((2, 5, 7), frozen_in={0: (4, 8), 3: (2, 100)})),
    "flushes": replace(HALF, flush_after=(3, 6, 7)),
}
"""With true factors; what lies between these, tests/fuzz draws."""
STATES = {
    **PREDICTED,
    **NOTHING_LATE,
    # In host memory, where the worker writes them.
    **{f"{name}, in place": c.with_keys(in_place=True) for name, c in NOTHING_LATE.items()},
    "true factors, int8": HALF.with_keys(moments_dtype="int8"),
}
SHORT = replace(NOTHING_LATE["a network"], precision="bf16-true", max_norm=0.5).with_keys(
    moments_dtype="bfloat16", clip_prediction=True
)


@pytest.mark.parametrize("name", STATES)
def test_state_and_shown_weights(name: str) -> None:
    """Without clipping and with S = 1, or with true factors, every forward pass sees AdamW's weights."""
    run = run_here(STATES[name])
    assert (run.in_backward_jobs > 0) == (name != "all")
    assert_as_promised(STATES[name], run)


@pytest.fixture
def same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are copied have the blocks of those in place, on which predicted clip factors depend."""

    def of_pages(*args: Any, multiple: int | None) -> Partition:
        return build_partition(*args, multiple=multiple or PAGE_BYTES // 4)

    monkeypatch.setattr(build, "build_partition", of_pages)


def has_corrected(trainer: pl.Trainer) -> None:
    assert optimizer_of(trainer).training.parts.read_counters().corrected_steps > 0


CORRECTS = At("on_train_end", has_corrected)


@pytest.mark.parametrize("save_at", [2, 5, 8])
def test_a_run_continues_bit_for_bit(save_at: int, tmp_path: Path) -> None:
    """Behind a clipped step and behind another one, with the same steps in backward."""
    jobs: list[int] = []
    count = At("on_train_end", lambda t: jobs.append(optimizer_of(t).training.parts.read_counters().in_backward_jobs))
    case = replace(HALF, loop="trainer", checkpoint=str(tmp_path / "saved"), callbacks=(count,))
    case = case.with_keys(moments_dtype="int8")
    expected = run_here(replace(case, save_at=save_at))
    resumed = run_here(case)
    assert all(map(torch.equal, resumed.weights, expected.weights))
    run_here(replace(case, steps=save_at, save_at=save_at, checkpoint=str(tmp_path / "before")))
    assert 0 < jobs[1] == jobs[0] - jobs[2]


KEYS = {
    "update_interval": 1,
    "publish_lag": 0,
    "weight_prediction": 0,
    "provisional_scale": 0,
    "clip_prediction": False,
}
# For each step its largest norm, 0 for no clipping, or what else happens; and whether blocks are submitted in backward, and corrected.
STEPS: list[tuple[float | str, bool, bool]] = [
    (1e6, False, False),  # nothing is known before
    (1e6, True, False),
    (1.0, True, True),
    (1e6, True, False),
    (1.0, True, True),
    (1.0, True, True),
    (1.0, False, False),
    (1e6, False, False),
    (1e6, True, False),
    ("not finite", True, True),
    (1e6, True, False),  # the step that changed nothing does not count
    (0.0, True, False),  # no clipping: the factor is known
    ("a learning rate behind backward", True, False),
    (1.0, True, True),
    (0.0, True, False),
]


# The last one has a reciprocal that is rounded down.
@pytest.mark.parametrize("options", [{}, {"loss_scale": 1024.0}, {"loss_scale": 50.0}, {"in_place": True}], ids=str)
def test_what_is_submitted_in_backward_depends_on_the_factors_before(options: dict[str, Any]) -> None:
    """What changes behind backward is shown: blocks that were submitted without it are submitted again."""
    shown, options = [], {"topk_ratio": 0, **KEYS, **options}
    for in_backward in (True, False):
        with direct_step([random_tensors(50)], overlap_step=in_backward, **options) as direct:
            before = direct.parts.read_counters()
            for number, (event, submits, corrects) in enumerate(STEPS):
                gradients = random_tensors(number)
                if event == "not finite":
                    # The last one to arrive.
                    gradients[0][5, 5] = math.inf
                direct.training.max_norm = 1e6 if isinstance(event, str) else event
                direct.backward(gradients)
                direct.join()
                if event == "a learning rate behind backward":
                    direct.optimizer.param_groups[0]["lr"] /= 2
                direct.step.step()
                direct.fetch()
                # What has been fetched need not be waited for: DeepSpeed may fetch it ahead.
                assert not direct.in_place or all(map(direct.parts.jobs.is_written, range(len(gradients))))
                shown.append([flat.clone() for flat in direct.shown])
                now = direct.parts.read_counters()
                found = (now.steps_in_backward - before.steps_in_backward, now.corrected_steps - before.corrected_steps)
                if not direct.in_place:
                    assert found == ((submits, corrects) if in_backward else (False, False)), number
                elif isinstance(event, str):
                    # In place the worker may know the factor when it begins: then nothing is corrected.
                    assert found[0] == in_backward, number
                before = now
            assert (before.device_stall_s.get("correction", 0.0) > 0) == in_backward or direct.in_place
            direct.step.flush()
            shown.append(direct.state())
    n = len(STEPS) + 1
    torch.testing.assert_close(shown[:n], shown[n:], rtol=0, atol=0)


@pytest.mark.usefixtures("same_blocks")
@pytest.mark.parametrize(
    ("keys", "of_expected"),
    [
        ({"max_norm": 1e6}, {"overlap_step": False}),
        ({"max_norm": 1e6, "accumulate_on": "host"}, {"overlap_step": False}),
        ({"in_place": True, "max_norm": 1e6}, {"in_place": False, "overlap_step": False}),
        ({"in_place": True, "max_norm": 30.0, "overlap_step": False}, {"in_place": False}),
        ({"in_place": True, "max_norm": 30.0, "clip_prediction": True, "accumulate_on": "host"}, {"in_place": False}),
    ],
    ids=["device", "host", "in place", "in place, at the end", "in place, predicted, host"],
)
def test_steps_that_do_not_end_and_workers_that_die(keys: dict[str, Any], of_expected: dict[str, Any]) -> None:
    options = {**KEYS, "topk_ratio": 0, "loss_scale": 4.0, "max_worker_restarts": 1000, **keys}
    with direct_step([random_tensors(50)], **{**options, **of_expected}) as direct:
        expected = train(direct)
    for deaths in (0, 0.3):
        with direct_step([random_tensors(50)], **options) as direct:
            torch.testing.assert_close(train(direct, deaths), expected, rtol=0, atol=0)
            assert (direct.parts.rank.telemetry.counts.worker_restarts > 5) == (deaths > 0)
            corrects = not options["clip_prediction"] and options.get("overlap_step", True)
            assert (direct.parts.read_counters().corrected_steps > 2) or not corrects
        # The arena is freed, the weights are not.
        assert all(map(torch.equal, direct.shown, expected[-1][-len(direct.shown) :]))


@pytest.mark.usefixtures("same_blocks")
def test_weights_in_place_have_the_bits_of_copies() -> None:
    """With predicted factors, of weights and moments in 16 bits."""
    in_place = run_here(SHORT.with_keys(in_place=True))
    assert in_place.in_backward_jobs > 0
    assert_same_run(in_place, run_here(SHORT))


def are_done(direct: DirectStep) -> bool:
    """Whether the worker has done all that was submitted in backward."""
    return all(map(direct.parts.jobs.in_flight.has_answers, direct.parts.jobs.submitted_in_backward))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_bits_do_not_depend_on_when_the_worker_begins(dtype: str) -> None:
    """Before the step's factor is there, or behind it: moments that have been rounded in between would show.

    Of parameters that are smaller than a block, so that none commits early: a job in backward commits the gradient of the step before.
    """
    shapes, shown = [(41, 43)] * 9, []
    for is_late in (False, True):
        keys = {"max_norm": 1.0, "moments_dtype": dtype, "clip_prediction": False}
        with direct_step([random_tensors(50, shapes=shapes)], in_place=True, **keys) as direct:
            for step in range(4):
                gradients, pid = random_tensors(step, shapes=shapes), direct.parts.rank.worker.current.pid
                for index in reversed(range(len(gradients))):
                    # The last block only: there are slots for few more than the blocks of a step.
                    if index == 0 and is_late:
                        wait_for(lambda: are_done(direct))
                        os.kill(pid, signal.SIGSTOP)
                    direct.receive(index, gradients[index], last=True)
                direct.join()
                if not is_late:
                    wait_for(lambda: are_done(direct))
                # Or the last block's prediction would be right.
                direct.training.max_norm = 0.5
                direct.step.step()
                direct.training.max_norm = 1.0
                os.kill(pid, signal.SIGCONT)
                direct.fetch()
                shown.append([flat.clone() for flat in direct.shown])
    torch.testing.assert_close(shown[:4], shown[4:], rtol=0, atol=0)


@pytest.mark.parametrize("keys", [{}, {"overlap_step": False}], ids=["in backward", "at the end"])
def test_weights_in_place_are_written_behind_their_last_reads(keys: dict[str, Any]) -> None:
    """A stream of its own copies them to the device, forward and backward; flushes between the two publish anew. Some steps are
    interrupted: the gradients of the first parameters never come.
    """
    with recorded_device() as device:
        fetches, inputs = device.new_stream(), random_tensors(7, DEVICE)
        with direct_step([random_tensors(50, DEVICE)], max_norm=30.0, in_place=True, **keys) as direct:

            def fetch(index: int) -> Tensor:
                """One parameter's weights; the current stream is behind the copy."""
                direct.fetch(index)
                s = direct.parts.rank.partition.slices[index]
                with device.on(fetches):
                    weights = direct.shown[0].narrow(0, s.begin, s.numel).to(DEVICE, non_blocking=True)
                device.current_stream().wait_stream(fetches)
                device.order.keep_for(weights.untyped_storage().data_ptr(), device.current_stream().name)
                return weights.mul_(inputs[index].flatten())

            for event in ["", "", "flush", "interrupted", "", "flush", "interrupted", ""]:
                for index in range(len(inputs)):
                    fetch(index)
                if event == "flush":
                    direct.step.flush()
                for index in reversed(range(2 if event == "interrupted" else 0, len(inputs))):
                    direct.receive(index, fetch(index), last=True)
                direct.join()
                (direct.step.flush if event == "interrupted" else direct.step.step)()
            direct.step.flush()
            assert not any(t.isnan().any() for t in direct.state())
        assert direct.parts.rank.telemetry.h2d_bytes == 0 and not device.order.races


@pytest.mark.parametrize(
    ("keys", "stage"),
    [({}, 2), ({}, 3), ({"update_interval": 4, "publish_lag": 1}, 2), ({"offload_parameters": True}, 3)],
    ids=["stage 2", "stage 3", "late", "in host memory"],
)
def test_a_weight_that_backward_uses_behind_its_gradient(keys: dict[str, Any], stage: int) -> None:
    options = {"stage": stage, "reduce_bucket_size": 50, "worker_cores": 1}
    with pytest.raises(MisconfigurationException, match=r"`weight.detach\(\)`.* overlap_step=False"):
        fit(FrozenInPart(), ZenFlowStrategy(**keys, **options))
    if not keys:
        compare_weights({"update_interval": 1, "overlap_step": False, **options}, list, FrozenInPart, steps=3)


def test_a_weight_that_is_gathered_again_behind_its_gradient() -> None:
    """By then its pieces are updated, or not yet."""
    again = {"reduce_bucket_size": 50, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    case = Case(model="FrozenInPart", stage=3, update_interval=1, publish_lag=0, topk_ratio=0, fails=True)
    config = {"zero_optimization": {**case.zero_3(), **again}}
    for run in run_on_ranks({"case": case.with_keys(config=config)})["case"]:
        assert run.error is not None and "overlap_step=False" in run.error
