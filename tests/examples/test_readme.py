"""README: every command and snippet runs, every file has its place, every number is the measured one, every link leads somewhere."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.convergence import __main__ as convergence
from benchmarks.kernel import __main__ as kernel
from benchmarks.step_time import __main__ as step_time
from benchmarks.step_time import timelines
from docs import draw_pictures, quote_tables
from example_runs import ROOT
from lightning_zenflow.cli import main
from lightning_zenflow.config import default_value, zenflow_keys
from models import Indexes, OptimizerOptions
from networks import Perceptron

README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")])

RUN_ELSEWHERE = {
    "scripts/train_glue": ("tests/examples/test_glue_example.py", 'run_script(tmp_path, "fit"'),
    "scripts/train_alpaca": ("tests/examples/test_alpaca_example.py", 'run_example(tmp_path, "alpaca.py", *command'),
    "scripts/test": (".ci/run", '"$root/scripts/test" ||'),
    "scripts/test -m slow": (".ci/run", '"$root/scripts/test" -m slow'),
    "scripts/test -m browser --screenshot=docs/images/dashboard.png": (".ci/run", '"$root/scripts/test" -m browser'),
    "scripts/check": (".ci/run", '"$root/scripts/check" --ci'),
    "scripts/docs": (".ci/run", '"$root/scripts/docs" ||'),
    "scripts/setup": ("scripts/test", '"$root/scripts/setup"'),
    ".ci/run": (".ci/run", "scripts/test"),
    "python examples/glue.py fit --config conf/glue.yaml": ("scripts/train_glue", "fit --config conf/glue.yaml"),
    "tensorboard --logdir logs": ("tests/training/test_tensorboard.py", '"tensorboard.main", "--logdir", "logs"'),
    "lightning-zenflow timeline logs/timeline.json --png timeline.png": (
        "tests/training/test_timeline.py",
        'main(["timeline", str(path), "--png"',
    ),
    "python -m docs.quote_tables": ("tests/examples/test_readme.py", "quote_tables.with_quotes"),
    # Needs a GPU, which CI does not have; the benchmark that it ends with runs without one.
    "scripts/gpu": ("tests/benchmarks/test_step_time_benchmark.py", "step_time.main"),
    "pytest -m gpu": ("scripts/gpu", "-m pytest -m gpu"),
}
"""Command of the README -> file that runs it, or a shorter case of it, and the text by which."""

BENCHMARKS = {"step_time": step_time, "kernel": kernel, "convergence": convergence, "step_time.timelines": timelines}


def blocks(language: str) -> list[str]:
    """The README's fenced blocks in a language; "" for output."""
    return [
        body
        for lang, body in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
        if lang == language
    ]


def commands() -> list[str]:
    """Those in blocks, without comments, and those in the text."""
    in_blocks = [" ".join(shlex.split(line, comments=True)) for block in blocks("bash") for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
    first_words = r"python|pytest|scripts/|\.ci/|tensorboard|lightning-zenflow [a-z]+ "
    in_text = [code for code in re.findall(r"`([^`\n]+)`", prose) if re.match(rf"(PYTHON=\S+ )?({first_words})", code)]
    return sorted({command for command in in_blocks + in_text if command})


class Model(Perceptron):
    """A user's module: two optimizer steps an epoch for the batch size that it is given."""

    def __init__(self, n_examples: int) -> None:
        super().__init__(widths=(16, 16, 1), length=n_examples, optimizer=OptimizerOptions(scheduler=False))

    @override
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Indexes(self.length), batch_size=32)


def test_commands_are_found() -> None:
    assert len(commands()) > 12
    assert len(blocks("python")) == 3


@pytest.mark.parametrize("command", commands())
def test_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    bare = re.sub(r"^PYTHON=\S+ ", "", command)
    words = shlex.split(bare)
    if words[:2] == ["lightning-zenflow", "estimate"] and len(words) > 2:
        assert main(words[1:]) == 0
        printed = capsys.readouterr().out
        assert any(block.strip() == printed.strip() for block in blocks("")), f"README's output should be\n{printed}"
    elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        BENCHMARKS[words[2].removeprefix("benchmarks.")].parse_arguments(words[3:])
    else:
        file, text = RUN_ELSEWHERE[bare]
        assert text in (ROOT / file).read_text(), f"{file} does not run {command!r} any more"
    if "/" in words[0]:
        assert (ROOT / words[0]).stat().st_mode & 0o100, f"{words[0]} is not executable"
        subprocess.run(["bash", "-n", str(ROOT / words[0])], check=True)


def test_trainings_of_the_quick_start_run_in_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    for example in ("glue", "alpaca"):
        assert f"-m slow tests/test_{example}_example.py" in ci
        assert (
            f"python examples/{example}.py fit --config conf/{example}.yaml"
            in (ROOT / "scripts" / f"train_{example}").read_text()
        )


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_snippet(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    model = Model(n_examples=64)
    before = [p.detach().clone() for p in model.parameters()]
    names: dict[str, Any] = {"model": model, "Trainer": pl.Trainer}
    exec(compile(blocks("python")[number], f"README.md, snippet {number}", "exec"), names)
    trainer = names.get("trainer")
    if "trainer" in names:
        trainer.fit_loop.max_epochs = 1
        trainer.fit(model)
    assert any((p.float() != q.float()).any() for p, q in zip(model.parameters(), before, strict=True))


def test_every_key_is_in_the_table() -> None:
    section = README.partition("## Configuration")[2].partition("## What holds")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", section, re.MULTILINE))
    assert set(rows) == set(zenflow_keys())
    for key, shown in rows.items():
        default = default_value(key)
        text = "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        assert shown.strip().strip("`") == text.removesuffix(".0"), key


def test_every_file_has_its_place() -> None:
    tables = README.partition("## Reading the code")[2]
    named = {
        Path(name).stem
        for cell in re.findall(r"^\| ([^|]+) \|", tables, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", cell)
    }
    files = [
        file
        for pattern in (
            "lightning_zenflow/*.py",
            "csrc/*.cpp",
            "csrc/*.h",
            "benchmarks/*.py",
            "examples/*.py",
            "docs/*.py",
            "scripts/*",
        )
        for file in ROOT.glob(pattern)
        if file.name != "__init__.py"
    ]
    assert len(files) > 100
    missing = sorted({str(file.relative_to(ROOT)) for file in files if file.stem not in named})
    assert not missing, f"the README's table of files lacks {missing}"


def test_measured_tables_are_those_of_the_documents() -> None:
    assert quote_tables.with_quotes(README) == README, "run `python -m docs.quote_tables`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
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


def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_pictures.main(tmp_path)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == {file.name for file in (ROOT / "docs" / "images").glob("*.svg")}
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)
