"""README and documents: every command is run by something or parses, snippets run, links and paths exist. What a release is built from:
addresses in metadata and README, and workflows whose actions cannot change.
"""

import gc
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from benchmarks.common.processes import fresh_environment
from benchmarks.common.results import RESULTS
from docs import draw_pictures, first_page, quote_tables, release, versions
from example_runs import ROOT, blocks
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.cli import main
from models import OptimizerOptions
from networks import Perceptron
from rank_processes import free_port
from tiny_models import save_tiny_model

README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*GUIDES, *ROOT.glob("CONTRIBUTING.md"), ROOT / "examples" / "README.md"]

COMMAND = re.compile(
    r"(PYTHON=\S+ )?(python |pytest |torchrun |mkdocs |pip (?:install|wheel) \S|scripts/\w|\.ci/\w|tensorboard |lightning-zenflow [a-z]+ )"
)
SEVERAL_PROCESSES = "num_nodes="
"""In snippets that `test_torchrun` runs, with the command for torchrun."""
LANGUAGE = "model(**batch).loss"
"""In a snippet with a model of transformers, whose batches are tokens."""
RAY = "import ray.train"
"""In the snippet that `test_ray.py` runs, where Ray is installed."""
FSDP = "fully_shard"
"""Of a snippet that runs in tests/optimizer/test_fsdp.py, on two ranks."""
HUGGING_FACE = ("lightning_zenflow.accelerate", "TrainingArguments")
"""In snippets that `tests/huggingface/test_transformers.py` runs."""


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_in_prose(document: Path) -> list[str]:
    """Inline code, outside of blocks."""
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def commands(document: Path) -> list[str]:
    """Those in blocks, without comments, and those in the text."""
    lines = [line for block in blocks(document, "bash") for line in block.splitlines()]
    in_blocks = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    in_text = [code for code in code_in_prose(document) if COMMAND.match(code)]
    return sorted({re.sub(r"^PYTHON=\S+ ", "", command) for command in in_blocks + in_text if command})


class Model(Perceptron):
    """A user's module: two optimizer steps an epoch."""

    def __init__(self) -> None:
        super().__init__(widths=(16, 16, 1), length=64, optimizer=OptimizerOptions(scheduler=False))

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(self.length), batch_size=32)


def is_run(name: str, by: Path) -> bool:
    """Whether a script or a test has a text, which runs or imports what is documented."""
    places = [ROOT / ".ci" / "run", *(ROOT / "scripts").iterdir(), *(ROOT / "tests").rglob("test_*.py")]
    return any(name in place.read_text() for place in places if place not in (by, Path(__file__)))


def check_script(words: list[str]) -> None:
    """It is executable and without errors of syntax; CI, another script or a test runs it, and its paths exist."""
    script = ROOT / words[0]
    assert script.stat().st_mode & 0o100, f"{words[0]} is not executable"
    subprocess.run(["bash", "-n", str(script)], check=True)
    # The examples' scripts set up .venv and run what the tests of the examples run.
    tested = {"scripts/train_glue": "conf/glue.yaml", "scripts/train_alpaca": "conf/alpaca.yaml"}
    assert words[0] == ".ci/run" or tested.get(words[0], "") in script.read_text()
    assert words[0] in {".ci/run", *tested} or is_run(words[0], script), f"nothing runs {words[0]}"
    assert all((ROOT / word).exists() for word in words[1:] if word.startswith("tests/"))


@pytest.mark.parametrize(
    ("document", "command"), [(short(d), command) for d in DOCUMENTS[:-1] for command in commands(d)]
)
def test_command(document: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    pyproject = (ROOT / "pyproject.toml").read_text()
    if "/" in words[0]:
        check_script(words)
    elif words[:2] == ["lightning-zenflow", "estimate"] and len(words) > 2:
        assert main(words[1:]) == 0
        printed = capsys.readouterr().out
        shown = [block.strip() for block in blocks(ROOT / document, "")]
        assert printed.strip() in shown, f"the output in {document} should be\n{printed}"
    elif words[0] == "lightning-zenflow" or words[:3] == ["python", "-m", "lightning_zenflow"]:
        subcommand = words[1] if words[0] == "lightning-zenflow" else words[3]
        assert is_run(f'main(["{subcommand}"', ROOT) or is_run(f'"{subcommand} ', ROOT), f"nothing runs {command!r}"
    elif words[:2] == ["pip", "install"]:
        extras = [extra for word in words for extra in re.findall(r"\[(\w+)\]", word)]
        assert all(re.search(rf"^{extra} = \[", pyproject, re.MULTILINE) for extra in extras), extras
        assert all((ROOT / word).is_file() for word in words if word.endswith(".txt"))
    elif words[:2] == ["python", "-m"] and words[2].startswith("docs."):
        name = words[2].removeprefix("docs.")
        assert f"{name}." in Path(__file__).read_text() or is_run(words[2], ROOT), f"nothing runs {command!r}"
    elif words[:2] == ["python", "-m"]:
        # A benchmark's program accepts the arguments.
        program = importlib.import_module(words[2])
        if hasattr(program, "__path__"):
            program = importlib.import_module(f"{words[2]}.__main__")
        program.parse_arguments(words[3:])
    elif words[0] == "python":
        assert is_run(Path(words[1]).name, ROOT), f"nothing runs {command!r}"
    else:
        assert words[0] in ("pip", "torchrun") or is_run(words[0], ROOT), f"nothing runs {command!r}"


@pytest.mark.parametrize(
    ("document", "number"),
    [
        (short(d), number)
        for d in GUIDES
        for number, snippet in enumerate(blocks(d, "python"))
        if not any(text in snippet for text in (SEVERAL_PROCESSES, RAY, FSDP, *HUGGING_FACE))
    ],
)
def test_snippet(document: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # seed_everything leaves it
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    snippet: str = blocks(ROOT / document, "python")[number]
    model: torch.nn.Module = Model()
    if LANGUAGE in snippet:
        model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path / "llama", "llama"))
    for checkpoint in re.findall(r'"([^"]+=[^"]+\.ckpt)"', snippet):
        strategy = ZenFlowStrategy(checkpoint_format="deepspeed" if "convert_zero" in snippet else "auto")
        trainer = pl.Trainer(strategy=strategy, max_epochs=1)
        trainer.fit(Model())
        trainer.save_checkpoint(checkpoint)
    before = [p.detach().clone() for p in model.parameters()]
    loader = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(256, (3, 2, 16))]
    names: dict[str, Any] = {"model": model, "MyModule": Model, "Trainer": pl.Trainer, "loader": loader}
    exec(compile(snippet, f"{document}, snippet {number}", "exec"), names)
    if "trainer" in names:
        names["trainer"].fit_loop.max_epochs = 1
        names["trainer"].fit(model)
    if "Trainer" in snippet or LANGUAGE in snippet or names["model"] is not model:
        trained = list(names["model"].parameters())
        # Those of stage 3 are in pieces.
        with GatheredParameters(trained):
            assert any((p.float() != q.float()).any() for p, q in zip(trained, before, strict=True))
    # A loop under Fabric tears nothing down: its worker ends with what refers to it.
    names.clear()
    gc.collect()


def test_readme_is_short_and_quoted_tables_are_new() -> None:
    assert len(README.read_text().splitlines()) <= 160
    assert first_page.with_tables(README.read_text()) == README.read_text(), "run `python -m docs.first_page`"
    assert versions.with_table(versions.DOCUMENT.read_text()) == versions.DOCUMENT.read_text(), (
        "run `python -m docs.versions`"
    )
    for document in (README, quote_tables.CONVERGENCE):
        assert quote_tables.with_quotes(document) == document.read_text(), "run `python -m docs.quote_tables`"


def test_traffic_of_a_selection() -> None:
    """Of Llama-2-7B: a float32 norm for each column, beside gradients of 16 bits."""
    with torch.device("meta"):
        parameters = [*LlamaForCausalLM(LlamaConfig()).parameters()]
    columns = sum(p.shape[1] for p in parameters if p.ndim == 2)
    times = sum(2 * p.numel() for p in parameters) / (4 * columns)
    assert round(times, -2) == 2900 and f"4 bytes for each of {columns / 1e6:.2f}e6 columns" in README.read_text()


def test_numbers_of_a_gpu_have_the_commit_of_their_record() -> None:
    """How many commits it is behind, which the text says too, `git rev-list --count` tells."""
    of_glue, *others = (
        re.search(r'"commit": "(\w+)"', (RESULTS / "gpu_h200" / name).read_text())
        for name in ("glue/SST-2_auto_0.0003_1.json", "bench.json", "tests.json")
    )
    for record, document in ((of_glue, "convergence.md"), *((record, "performance.md") for record in others)):
        assert record and re.search(rf"{record[1]}\W+\d+\s+commits\s+before", (ROOT / "docs" / document).read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_links_and_paths(document: Path) -> None:
    """Paths: of source files, documents and folders, below the root, the package, the tests or the document's own folder."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert "://" in target or file.exists(), target
        if anchor and "://" not in target:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], target
    places = [ROOT, ROOT / "lightning_zenflow", document.parent, ROOT / "tests", ROOT / "tests" / "training"]
    places += list(document.parent.glob("*_task"))
    for name in code_in_prose(document):
        if re.fullmatch(r"[\w./-]+(/|\.(py|h|cpp|txt|md|yaml))", name) and name not in ("zero_to_fp32.py", "train.py"):
            assert any((place / name).exists() for place in places), name


def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_pictures.main(tmp_path)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == {file.name for file in (ROOT / "docs" / "images").glob("*.svg")}


RECIPES = ROOT / "docs" / "recipes.md"
HEAD = "from test_readme import Model as MyModule\n"
TAIL = "\nimport torch.distributed\nprint('ranks:', torch.distributed.get_world_size())\n"


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """The recipe for several nodes: `train.py` by torchrun, with one rank on each of two nodes, which are this machine.

    SLURM's variables: see tests/training/test_nodes.py.
    """
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
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert "ranks: 2" in output


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ADDRESS = "https://github.com/OWNER/NAME"


@pytest.mark.parametrize("revision", ["main", "v{}"])
def test_a_release_has_addresses_and_absolute_links(
    revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tag is the version."""
    monkeypatch.setattr(release, "ROOT", tmp_path)
    readme, pyproject = (Path(shutil.copy(ROOT / name, tmp_path)) for name in ("README.md", "pyproject.toml"))
    (version,) = re.findall(r'^version = "(.+)"$', before := pyproject.read_text(), re.MULTILINE)
    with pytest.raises(ValueError, match=rf"the tag must be v{re.escape(version)}, .*got v{re.escape(version)}0"):
        release.main(ADDRESS, f"v{version}0")
    revision = revision.format(version)
    release.main(ADDRESS, revision)
    targets = re.findall(r"\]\(([^)\s]+)\)", readme.read_text())
    assert len(targets) > 15 and all(target.startswith("https://") for target in targets)
    assert f"{ADDRESS}/raw/{revision}/docs/images/steps_side_by_side.svg" in targets
    assert f"{ADDRESS}/blob/{revision}/docs/configuration.md" in targets
    assert f'[project.urls]\nRepository = "{ADDRESS}"\n' in pyproject.read_text()
    assert [line for line in pyproject.read_text().splitlines() if ADDRESS not in line] == before.splitlines()


def test_versions_and_authors_are_those_of_the_citation() -> None:
    citation, project = (ROOT / "CITATION.cff").read_text(), (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)
    assert f'version = "{version}"\n' in project
    (author,) = re.findall(r"^  - name: (.+)$", citation, re.MULTILINE)
    assert f'authors = [{{ name = "{author}" }}]\n' in project


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_hash(workflow: Path) -> None:
    uses = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert uses
    for action, comment in uses:
        assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert action.startswith("./") or re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_the_release_runs_ci_before_it_publishes() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    publish = workflow.partition("\n  publish:")[2]
    assert "needs: [ci, check]" in publish and "id-token: write" in publish
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
