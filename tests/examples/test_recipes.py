"""The recipe for several nodes: `train.py` of docs/recipes.md by torchrun, with one rank on each of two nodes, which are this machine.

SLURM's variables: see tests/training/test_nodes.py.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import ROOT, SEVERAL_PROCESSES, blocks, commands

from benchmarks.common.processes import fresh_environment
from rank_processes import free_port

pytestmark = pytest.mark.slow

RECIPES = ROOT / "docs" / "recipes.md"

HEAD = "from test_readme import Model as MyModule\n"
TAIL = "\nimport torch.distributed\nprint('ranks:', torch.distributed.get_world_size())\n"


def test_torchrun(tmp_path: Path) -> None:
    (snippet,) = (block for block in blocks(RECIPES, "python") if SEVERAL_PROCESSES in block)
    (tmp_path / "train.py").write_text(HEAD + snippet + TAIL)
    (command,) = (command for command in commands(RECIPES) if command.startswith("torchrun "))
    options = {"nproc-per-node": "1", "master-addr": "127.0.0.1", "master-port": free_port()}
    for name, value in options.items():
        command = re.sub(rf"--{name}=\S+", f"--{name}={value}", command)
    places = [ROOT, ROOT / "tests" / "support", ROOT / "tests" / "examples"]
    path = os.pathsep.join([*map(str, places), os.environ.get("PYTHONPATH", "")])
    environment = {**fresh_environment(PYTHONPATH=path), "NODES": "2", "DEVICES": "1"}
    processes = []
    for node in range(2):
        words = shlex.split(re.sub(r"--node-rank=\S+", f"--node-rank={node}", command))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words[1:]],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in processes:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert "ranks: 2" in output
