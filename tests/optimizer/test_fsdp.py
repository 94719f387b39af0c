"""`OffloadAdamW` on two ranks under `torch.distributed.fsdp.fully_shard` is torch's AdamW under it, checkpoints included."""

from typing import Any

import pytest
import torch

import fsdp_runs
from rank_processes import run_functions

CASES = [
    fsdp_runs.plain,
    fsdp_runs.clipped,
    fsdp_runs.accumulated,
    fsdp_runs.not_synchronised,
    fsdp_runs.not_resharded,
    fsdp_runs.written,
    fsdp_runs.predicted,
    fsdp_runs.bfloat16,
    fsdp_runs.gradients,
    fsdp_runs.recipe,
    fsdp_runs.checkpoints,
    fsdp_runs.checkpoints_of_bfloat16,
    fsdp_runs.refused,
    fsdp_runs.lightning,
]

Results = dict[str, list[Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the cases return on each rank; `on_one_rank` reads files of theirs."""
    folder = tmp_path_factory.mktemp("fsdp")
    found = run_functions({case.__name__: case for case in CASES}, folder)
    return found | run_functions({"on_one_rank": fsdp_runs.on_one_rank}, folder, ranks=1)


def of_ranks(results: Results, name: str) -> list[Any]:
    for result in results[name]:
        assert result is not None, f"{name}: a case before has failed"
        assert not isinstance(result, str), result
    return results[name]


@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: case.__name__)
def test_as_torch(results: Results, case: Any) -> None:
    for result in of_ranks(results, case.__name__):
        for ours, theirs in (result["losses"], result["norms"]):
            torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0)
        # All steps but the first, of which the number of backward passes is not known.
        assert result["in_backward"] == (23 if case is fsdp_runs.plain else 5)
        assert (result["followed"] > 0) == (case is fsdp_runs.written)


def test_clip_prediction(results: Results) -> None:
    """Each step is clipped, and updated in backward."""
    for result in of_ranks(results, "predicted"):
        torch.testing.assert_close(*result["losses"], rtol=1e-2, atol=0)
        assert result["in_backward"] == 5


def test_bfloat16(results: Results) -> None:
    """The first step is that of float32 master weights; behind it single roundings differ."""
    for result in of_ranks(results, "bfloat16"):
        torch.testing.assert_close(*result["masters"], rtol=3e-7, atol=1e-7)
        assert result["equal"] > 0.998
        torch.testing.assert_close(*result["losses"], rtol=2e-3, atol=0)


def test_gradients(results: Results) -> None:
    """`full_tensor` between backward and step."""
    for ours, theirs in of_ranks(results, "gradients"):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_recipe(results: Results) -> None:
    """The snippet of docs/recipes.md takes its steps."""
    assert of_ranks(results, "recipe") == [3, 3]


@pytest.mark.parametrize("first", ["ours", "torch"])
def test_checkpoints(results: Results, first: str) -> None:
    """Of torch.distributed.checkpoint, sharded and one file, continued by ours and by torch's AdamW."""
    for result in of_ranks(results, "checkpoints"):
        for second in ("ours", "torch"):
            for files in ("shards", "one file"):
                losses = result[f"{first} to {second}, {files}"]
                if first == second == "ours":
                    assert losses == result["ours, whole"]
                torch.testing.assert_close(losses, result[f"{first}, whole"], rtol=3e-6, atol=0)


def test_checkpoints_of_bfloat16(results: Results) -> None:
    """With master weights; moments of fewer bits are float32 there."""
    for result in of_ranks(results, "checkpoints_of_bfloat16"):
        assert result["keys"] == ["exp_avg", "exp_avg_sq", "master", "step"]
        assert result["types"] == ["torch.float32"]
        for files in ("shards", "one file"):
            losses = result[f"ours, {files}"]
            # Later moments are rounded by other random numbers.
            assert losses[0] == result["whole"][0]
            torch.testing.assert_close(losses, result["whole"], rtol=1e-4, atol=0)


def test_on_one_rank(results: Results) -> None:
    """Files of two ranks."""
    (result,) = of_ranks(results, "on_one_rank")
    (expected, *others) = result.values()
    for losses in others:
        torch.testing.assert_close(losses, expected, rtol=3e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddp", "with several ranks parameters must be divided by `torch.distributed.fsdp.fully_shard`"),
        ("replicated", "it must be divided by `fully_shard`, got the placement"),
        ("hybrid", "divided over one mesh, of one dimension, of all 2 ranks"),
        ("mixed", "all parameters must be DTensors, or none"),
        ("too many ranks", "each rank must have elements of some parameter"),
        ("assigned", "must not be assigned between backward and step"),
        ("unused", "the loss of a step must depend on every trained parameter, got none of parameter "),
    ],
)
def test_refused(results: Results, name: str, message: str) -> None:
    for result in of_ranks(results, "refused"):
        assert message in result[name]


def test_lightning(results: Results) -> None:
    """Under `ModelParallelStrategy`: clipped, accumulated, and resumed by either from shards and one file."""
    for result in of_ranks(results, "lightning"):
        expected = result["torch"]
        for name, losses in result.items():
            assert len(losses) == (12 if name in ("ours", "torch") else 6)
            torch.testing.assert_close(losses, expected[-len(losses) :], rtol=3e-6, atol=0)
            if name.startswith("ours, "):
                assert losses == result["ours"][6:]
