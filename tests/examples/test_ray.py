"""The recipe for Ray Train: `docs/recipes.md` with two workers on a local Ray, which is installed in a folder of its own."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_readme import RAY

from example_runs import ROOT, blocks, run_python
from processes import is_alive
from ray_module import SAMPLES, STEPS, MyModule

EPOCHS = 3
TAIL = "\nprint('RESULT:', json.dumps([result.metrics, result.checkpoint.path]))\n"
Records = list[dict[str, Any]]


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "lightning_zenflow.ray", raising=False)
    with pytest.raises(ImportError, match=re.escape("pip install 'lightning-zenflow[ray]'")):
        importlib.import_module("lightning_zenflow.ray")


@pytest.fixture(scope="module")
def ray_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ray and what it requires, which other tests do not see."""
    folder = tmp_path_factory.mktemp("ray")
    (requirement,) = re.findall(r'^ray = \["(.+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    install = f"{sys.executable} -m pip install --quiet --target {folder} --constraint {ROOT / 'constraints.txt'}"
    subprocess.run([*install.split(), requirement], check=True)
    return folder


class Recipe:
    """The recipe's program in a folder, on the CPU.

    Args:
        folder: of the program, its records and Ray's runs.
        ray_folder: where Ray is.
        options: arguments of the strategy.
    """

    def __init__(self, folder: Path, ray_folder: Path, options: str = "") -> None:
        (snippet,) = (block for block in blocks(ROOT / "docs" / "recipes.md", "python") if RAY in block)
        changes = {
            "RayZenFlowStrategy()": f"RayZenFlowStrategy({options})",
            'num_workers=8, use_gpu=True, resources_per_worker={"CPU": 12, "GPU": 1}': "num_workers=2",
            "/shared/runs": str(folder),
        }
        for text, other in changes.items():
            assert text in snippet
            snippet = snippet.replace(text, other)
        self._program = "import json\nfrom ray_module import MyModule\n" + snippet + TAIL
        self._folder, self._ray_folder = folder, ray_folder

    def run(self, *, epochs: int = EPOCHS, **variables: str) -> tuple[Mapping[str, Any], Path]:
        """Trains; returns the metrics reported last, and the checkpoint."""
        program = self._folder / "train.py"
        assert f"max_epochs={EPOCHS}" in self._program
        program.write_text(self._program.replace(f"max_epochs={EPOCHS}", f"max_epochs={epochs}"))
        # Of 60 seconds, after which Ray tries again: workers import DeepSpeed, on machines that are busy.
        variables |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "900", "RAY_USAGE_STATS_ENABLED": "0"}
        places = (self._ray_folder, ROOT / "tests" / "support", *sys.path)
        run = run_python(self._folder, program, timeout=900, places=places, RECORDS=str(self._folder), **variables)
        (result,) = re.findall("^RESULT: (.*)$", run.stdout, re.MULTILINE)
        metrics, checkpoint = json.loads(result)
        return metrics, Path(checkpoint)

    def records(self) -> list[Records]:
        """Those of both ranks, in order."""
        files = [self._folder / f"{rank}.jsonl" for rank in range(2)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def losses(records: Records) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_recipe(tmp_path: Path, ray_folder: Path) -> None:
    """Uninterrupted; with a worker that is lost, by Ray; and in two runs of one name, from a folder of DeepSpeed's."""
    recipes = {}
    for name, options in {"whole": "", "lost": "", "in two": "checkpoint_format='deepspeed'"}.items():
        (tmp_path / name).mkdir()
        recipes[name] = Recipe(tmp_path / name, ray_folder, options)
    metrics, file = recipes["whole"].run()
    whole = recipes["whole"].records()
    assert metrics["epoch"] == EPOCHS - 1 and metrics["step"] == EPOCHS * STEPS
    assert (file / "checkpoint.ckpt").is_file()

    # Both ranks together see each sample once in an epoch, in another order, and train as AdamW does.
    module = MyModule()
    optimizer = module.configure_optimizers()
    steps, orders = list(zip(*whole, strict=True)), []
    for epoch in (steps[begin : begin + STEPS] for begin in range(0, len(steps), STEPS)):
        orders.append([sample for records in epoch for record in records for sample in record["samples"]])
        assert sorted(orders[-1]) == list(range(SAMPLES))
        for records in epoch:
            optimizer.zero_grad()
            of_ranks = [module.loss(torch.tensor(record["samples"])) for record in records]
            assert [loss.item() for loss in of_ranks] == pytest.approx([r["loss"] for r in records], rel=1e-5)
            torch.stack(of_ranks).mean().backward()
            optimizer.step()
    assert len(orders) == EPOCHS and all(a != b for a, b in pairwise(orders))
    for rank, records in enumerate(whole):
        assert {(r["local rank"], r["ranks on host"], len(r["workers"])) for r in records} == {(rank, 2, 1)}

    recipes["lost"].run(KILLED="1")
    again = recipes["lost"].records()
    for rank, records in enumerate(again):
        # Rank 0 has begun the step in which rank 1 is lost, or not. Then the second epoch begins again.
        first, later = records[: -(EPOCHS - 1) * STEPS], records[-(EPOCHS - 1) * STEPS :]
        assert len(first) in (STEPS + 1, STEPS + 2)
        assert losses(first) == losses(whole[rank][: len(first)]) and losses(later) == losses(whole[rank][STEPS:])
    assert not any(is_alive(pid) for records in again for record in records for pid in record["workers"])

    _, first_folder = recipes["in two"].run(epochs=1)
    assert (first_folder / "checkpoint.ckpt").is_dir()
    metrics, folder = recipes["in two"].run()
    assert metrics["step"] == EPOCHS * STEPS and folder != first_folder
    assert list(map(losses, recipes["in two"].records())) == list(map(losses, whole))
