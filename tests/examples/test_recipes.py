"""Recipes for several nodes: `train.py` of docs/recipes.md, with one rank on each of two nodes, which are this machine."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from test_readme import ROOT, SEVERAL_PROCESSES, blocks, commands

from benchmarks.common.processes import fresh_environment
from rank_processes import free_port

pytestmark = pytest.mark.slow

RECIPES = ROOT / "docs" / "recipes.md"

HEAD = "from test_readme import Model as MyModule\n"
TAIL = "\nimport torch.distributed\nprint('ranks:', torch.distributed.get_world_size())\n"


def train(folder: Path, command: Sequence[str], variables: Sequence[Mapping[str, str]]) -> None:
    """Runs a command once for each node, with `train.py` beside it."""
    (snippet,) = (block for block in blocks(RECIPES, "python") if SEVERAL_PROCESSES in block)
    (folder / "train.py").write_text(HEAD + snippet + TAIL)
    places = [ROOT, ROOT / "tests" / "support", ROOT / "tests" / "examples"]
    path = os.pathsep.join([*map(str, places), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [word.replace("NODE_NUMBER", str(node)) for word in command],
            cwd=folder,
            env={**fresh_environment(PYTHONPATH=path), "NODES": "2", "DEVICES": "1", **of_node},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, of_node in enumerate(variables)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert "ranks: 2" in output


def test_torchrun(tmp_path: Path) -> None:
    (command,) = (command for command in commands(RECIPES) if command.startswith("torchrun "))
    options = {
        "node-rank": "NODE_NUMBER",
        "nproc-per-node": "1",
        "master-addr": "127.0.0.1",
        "master-port": free_port(),
    }
    for name, value in options.items():
        command = re.sub(rf"--{name}=\S+", f"--{name}={value}", command)
    train(tmp_path, [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]], [{}, {}])


def test_slurm(tmp_path: Path) -> None:
    """Slurm itself is not here, but the variables that it sets for each task are."""
    (script,) = blocks(RECIPES, "sh")
    assert {"NODES=$SLURM_NNODES", "DEVICES=$SLURM_NTASKS_PER_NODE"} <= set(script.split())
    assert script.splitlines()[-1].endswith(" python train.py")
    job = {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_LOCALID": "0",
        "MASTER_PORT": str(free_port()),
    }
    nodes = [{**job, "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)} for node in range(2)]
    train(tmp_path, [sys.executable, "train.py"], nodes)
