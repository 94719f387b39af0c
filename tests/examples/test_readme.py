"""README and documents: every command and snippet runs, every output and quoted number is the real one, every link and path exists."""

import argparse
import gc
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader
from typing_extensions import override

from docs import draw_pictures, quote_tables, versions
from example_runs import ROOT
from lightning_zenflow import ZenFlowStrategy
from lightning_zenflow.cli import main
from models import Indexes, OptimizerOptions
from networks import Perceptron

README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*GUIDES, ROOT / "examples" / "README.md"]

RUN_ELSEWHERE = {
    "scripts/train_glue": ("tests/examples/test_glue_example.py", 'run_script(tmp_path, "fit"'),
    "scripts/train_alpaca": ("tests/examples/test_alpaca_example.py", 'run_example(tmp_path, "alpaca.py", *command'),
    "scripts/test": (".ci/run", 'step "$root/scripts/test"\n'),
    "scripts/test -m slow": (".ci/run", '"$root/scripts/test" -m slow'),
    "scripts/test -m slow tests/cpp": (".ci/run", 'step "$root/scripts/test" -m slow tests/cpp\n'),
    "scripts/test -m browser --screenshot=docs/images/dashboard.png": (".ci/run", '"$root/scripts/test" -m browser'),
    "scripts/check": (".ci/run", '"$root/scripts/check" --ci'),
    "scripts/docs": (".ci/run", 'step "$root/scripts/docs"\n'),
    "scripts/smoke": (".ci/run", 'step "$root/scripts/smoke"\n'),
    "scripts/aarch64": (".ci/run", 'step "$root/scripts/aarch64"\n'),
    "scripts/test -m slow tests/fuzz": (".ci/run", '"$root/scripts/test" -m slow'),
    "python -m docs.versions": ("tests/examples/test_readme.py", "versions.with_table"),
    "pip wheel --no-deps --wheel-dir dist .": ("scripts/smoke", "--no-deps --wheel-dir"),
    "lightning-zenflow doctor": ("tests/unit/doctor/test_doctor.py", 'main(["doctor"'),
    "scripts/setup": ("scripts/test", '"$root/scripts/setup"'),
    ".ci/run": (".ci/run", "scripts/test"),
    "python examples/glue.py fit --config conf/glue.yaml": ("scripts/train_glue", "fit --config conf/glue.yaml"),
    "python examples/fabric_loop.py": ("tests/fabric/test_example.py", 'run_example(tmp_path, "fabric_loop.py"'),
    "tensorboard --logdir logs": ("tests/training/test_tensorboard.py", '"tensorboard.main", "--logdir", "logs"'),
    "python -m lightning_zenflow estimate": (
        "tests/examples/test_command_line.py",
        '"-m", "lightning_zenflow"',
    ),
    "python -m docs.configuration": ("tests/unit/config/test_config.py", "with_table(text) == text"),
    "python -m docs.quote_tables": ("tests/examples/test_readme.py", "quote_tables.with_quotes"),
    "python -m docs.draw_pictures": ("tests/examples/test_readme.py", "draw_pictures.main"),
    "torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=10.0.0.1 --master-port=29500 train.py": (
        "tests/examples/test_recipes.py",
        '"torch.distributed.run"',
    ),
    # CI has no GPU; tiny cases run on a CPU.
    **{
        f"scripts/gpu {what}": ("tests/benchmarks/test_gpu_benchmark.py", text)
        for what, text in {
            "pack": "pack.pack(",
            "pack --python 3.11": "pack.pack(",
            "tests": 'call("tests"',
            "bench": '["bench", "train"]',
            "train": '["bench", "train"]',
        }.items()
    },
}
"""Command -> file that runs it, or a shorter case of it, and the text by which."""

MEASURED_BY = {
    "benchmarks.bookkeeping": "benchmarks.step_time.bookkeeping",
}
"""Module in the command of a measured table, as it was then -> its present name."""

COMMAND = re.compile(
    r"(PYTHON=\S+ )?(python |pytest |torchrun |mkdocs |pip (?:install|wheel) \S|scripts/\w|\.ci/\w|tensorboard |lightning-zenflow [a-z]+ )"
)


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks in a language; "" for output."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    return [body for lang, body in found if lang == language]


def code_in_prose(document: Path) -> list[str]:
    """Inline code, outside of blocks."""
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def commands(document: Path) -> list[str]:
    """Those in blocks, without comments, and those in the text."""
    lines = [line for block in blocks(document, "bash") for line in block.splitlines()]
    in_blocks = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    in_text = [code for code in code_in_prose(document) if COMMAND.match(code)]
    return sorted({command for command in in_blocks + in_text if command})


class Model(Perceptron):
    """A user's module: two optimizer steps an epoch."""

    def __init__(self) -> None:
        super().__init__(widths=(16, 16, 1), length=64, optimizer=OptimizerOptions(scheduler=False))

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Indexes(self.length), batch_size=32)


class Parsed(Exception):  # not an error
    """A program has parsed its arguments."""


def parse_only(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a module's program until it has parsed its arguments."""
    program = importlib.import_module(module)
    if hasattr(program, "__path__"):
        program = importlib.import_module(f"{module}.__main__")
    if hasattr(program, "parse_arguments"):
        program.parse_arguments(arguments)
        return
    parse_args = argparse.ArgumentParser.parse_args

    def stop(*args: Any, **kwargs: Any) -> None:
        parse_args(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, program.__name__)
    with pytest.raises(Parsed):
        runpy.run_module(program.__name__, run_name="__main__", alter_sys=True)


def check_pip(words: list[str]) -> None:
    """An installation's files and extras exist, and it is pinned; scripts/smoke runs it."""
    extras = [extra for word in words for extra in re.findall(r"\[(\w+)\]", word)]
    for extra in extras:
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), extra
    files = [file for option, file in pairwise(words) if option == "--constraint"]
    assert extras or files
    assert all((ROOT / file).is_file() for file in files)
    assert "constraints.txt constraints-lowest.txt" in (ROOT / "scripts" / "smoke").read_text()


def test_commands_are_found() -> None:
    assert {"scripts/train_glue", "scripts/train_alpaca"} < set(commands(README))
    assert sum(len(commands(document)) for document in GUIDES) > 30
    assert len(blocks(README, "python")) == 2


@pytest.mark.parametrize(("document", "command"), [(short(d), command) for d in GUIDES for command in commands(d)])
def test_command(
    document: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = re.sub(r"^PYTHON=\S+ ", "", command)
    words = shlex.split(bare)
    if bare in RUN_ELSEWHERE:
        file, text = RUN_ELSEWHERE[bare]
        assert text in (ROOT / file).read_text(), f"{file} does not run {command!r} any more"
    elif words[:2] == ["lightning-zenflow", "estimate"]:
        assert main(words[1:]) == 0
        printed = capsys.readouterr().out
        shown = [block.strip() for block in blocks(ROOT / document, "")]
        assert printed.strip() in shown, f"the output in {document} should be\n{printed}"
    elif words[:2] == ["pip", "install"]:
        check_pip(words)
    else:
        assert words[:2] == ["python", "-m"], f"nothing runs {command!r}"
        parse_only(MEASURED_BY.get(words[2], words[2]), words[3:], monkeypatch)
    if "/" in words[0]:
        assert (ROOT / words[0]).stat().st_mode & 0o100, f"{words[0]} is not executable"
        subprocess.run(["bash", "-n", str(ROOT / words[0])], check=True)


def test_trainings_of_the_readme_run_in_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    for example in ("glue", "alpaca"):
        assert f"-m slow tests/examples/test_{example}_example.py" in ci
        script = (ROOT / "scripts" / f"train_{example}").read_text()
        assert f"python examples/{example}.py fit --config conf/{example}.yaml" in script


SEVERAL_PROCESSES = "num_nodes="
"""In snippets that `test_recipes.py` runs."""


@pytest.mark.parametrize(
    ("document", "number"),
    [
        (short(d), number)
        for d in GUIDES
        for number, snippet in enumerate(blocks(d, "python"))
        if SEVERAL_PROCESSES not in snippet
    ],
)
def test_snippet(
    document: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_worker_is_left: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    snippet, model = blocks(ROOT / document, "python")[number], Model()
    for checkpoint in re.findall(r'"([^"]+=[^"]+\.ckpt)"', snippet):
        trainer = pl.Trainer(strategy=ZenFlowStrategy(), max_epochs=1)
        trainer.fit(Model())
        trainer.save_checkpoint(checkpoint)
    before = [p.detach().clone() for p in model.parameters()]
    names: dict[str, Any] = {"model": model, "MyModule": Model, "Trainer": pl.Trainer}
    exec(compile(snippet, f"{document}, snippet {number}", "exec"), names)
    if "trainer" in names:
        names["trainer"].fit_loop.max_epochs = 1
        names["trainer"].fit(model)
    if "Trainer" in snippet or names["model"] is not model:
        trained = names["model"].parameters()
        assert any((p.float() != q.float()).any() for p, q in zip(trained, before, strict=True))
    # A loop under Fabric tears nothing down: its worker ends with what refers to it.
    names.clear()
    gc.collect()


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 200


@pytest.mark.parametrize("document", [README, ROOT / "docs" / "architecture.md"], ids=short)
def test_every_room_has_its_place(document: Path) -> None:
    named = {code.rstrip("/").split("/")[-1] for code in code_in_prose(document) if code.endswith("/")}
    rooms = {file.parent.name for file in (ROOT / "lightning_zenflow").glob("*/__init__.py")}
    folders = {"csrc", "tests", "benchmarks", "examples", "conf", "docs", "scripts"}
    assert len(rooms) > 10
    assert rooms | folders <= named, f"{short(document)} lacks {sorted((rooms | folders) - named)}"


def test_layers_are_those_of_the_import_contract() -> None:
    contract = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2].partition("]")[0]
    checked = [
        set(re.findall(r"\w+", line)) for line in contract.splitlines() if '"' in line and "__main__" not in line
    ]
    drawn = [block for block in blocks(ROOT / "docs" / "architecture.md", "") if re.match(r"\d  ", block)]
    assert [set(re.findall(r"[a-z]\w+", line.replace(".py", ""))) for line in drawn[0].splitlines()] == checked


def test_the_table_of_versions_is_what_ci_runs() -> None:
    assert versions.with_table(README.read_text()) == README.read_text(), "run `python -m docs.versions`"
    lowest = {line for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if "==" in line}
    metadata = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    for name, bound in re.findall(r'"([\w-]+)>=([\d.]+)', metadata):
        found = [line for line in lowest if line.lower().startswith(f"{name.lower()}==")]
        assert name == "typing-extensions" or (found and bound in found[0]), (
            f"{name}>={bound} is not what scripts/smoke installs"
        )


def test_quoted_tables_are_those_of_the_documents() -> None:
    assert quote_tables.with_quotes(README.read_text()) == README.read_text(), "run `python -m docs.quote_tables`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_headings_have_lines_of_their_own(document: Path) -> None:
    assert re.findall(r"^.*\S #{2,} \w.*$", document.read_text(), re.MULTILINE) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_links(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], target


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_paths(document: Path) -> None:
    """Every source file and folder that a document names exists: below the root, the package, the tests or the document's own folder."""
    places = [ROOT, ROOT / "lightning_zenflow", document.parent, ROOT / "tests", ROOT / "tests" / "training"]
    places += list(document.parent.glob("*_task"))
    of_others = {"zero_to_fp32.py", "train.py"}
    for name in code_in_prose(document):
        if re.fullmatch(r"[\w./-]+(/|\.(py|h|cpp|txt|md|yaml))", name) and name not in of_others:
            assert any((place / name).exists() for place in places), name


def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_pictures.main(tmp_path)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == {file.name for file in (ROOT / "docs" / "images").glob("*.svg")}
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)
