"""The GLUE example's bundled sample and command line; with `-m slow` its whole default training."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import glue
import make_glue_sample as sample_script
from example_runs import ROOT, check_configuration, csv_rows, run_example
from glue_files import CONFIG, SAMPLE


@pytest.fixture(scope="module")
def sample() -> dict[str, list[sample_script.Sentence]]:
    return sample_script.make_sample()


def test_the_script_writes_the_bundled_files_again(tmp_path: Path, sample: dict[str, list[Any]]) -> None:
    sample_script.write_sample(sample, tmp_path)
    for split in ("train", "dev", "test"):
        assert (tmp_path / f"{split}.tsv").read_bytes() == (SAMPLE / f"{split}.tsv").read_bytes(), split
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 500_000


def test_sample_is_balanced_distinct_and_held_out(sample: dict[str, list[Any]]) -> None:
    for split, size in (("train", 4000), ("dev", 600), ("test", 600)):
        assert len(sample[split]) == size
        assert sum(sentence.label for sentence in sample[split]) == size // 2
    texts = [sentence.text for sentences in sample.values() for sentence in sentences]
    assert len(set(texts)) == len(texts)
    seen = frozenset().union(*(sentence.combinations for sentence in sample["train"]))
    held_out = frozenset().union(*(sentence.combinations for split in ("dev", "test") for sentence in sample[split]))
    assert not seen & held_out
    opinions = {word for words in sample_script.OPINIONS.values() for word in words}
    for split in sample:  # every opinion word itself is known from training
        assert opinions <= {word for sentence in sample[split] for word in sentence.text.split()}


# --- command line ------------------------------------------------------------------------------------------------------------

FAST = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


def run_cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, subcommand: str, *arguments: str) -> None:
    """`python examples/glue.py SUBCOMMAND --config conf/glue.yaml ARGUMENTS`, in this process and with its logs in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    data = [f"--data.data_dir={SAMPLE}"] if not any("--data.data_dir" in argument for argument in arguments) else []
    monkeypatch.setattr(sys, "argv", ["glue.py", subcommand, "--config", str(CONFIG), *data, *FAST, *arguments])
    glue.main()


@pytest.mark.parametrize("file", ["glue.yaml", "glue_gpt2.yaml"])
def test_configurations_have_known_keys_and_build_their_strategy(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_configuration(glue.main, ROOT / "conf" / file, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--data.data_dir=nowhere"], FileNotFoundError, "data.data_dir='nowhere' is no folder"),
        (
            ["--data.task=MRPC"],
            ValueError,
            "lacks the columns '#1 String', '#2 String', 'Quality' that task='MRPC' reads",
        ),
        (["--model.pretrained=gpt2"], ValueError, "set data.tokenizer='gpt2'"),
    ],
)
def test_wrong_commands_end_with_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        run_cli(monkeypatch, tmp_path, "fit", *arguments)


@pytest.mark.usefixtures("no_worker_is_left")
def test_training_under_zenflow_is_validated_tested_and_predicted_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--model.width=16", "--model.heads=2", "--model.layers=1", "--trainer.limit_val_batches=1"]
    short = ["--trainer.max_steps=8", "--trainer.val_check_interval=8", "--trainer.log_every_n_steps=1"]
    run_cli(monkeypatch, tmp_path, "fit", *small, *short)
    (checkpoint,) = tmp_path.glob("logs/glue/version_*/checkpoints/last.ckpt")
    assert list(tmp_path.glob("logs/glue/version_0/events.out.tfevents.*"))
    for subcommand in ("validate", "test", "predict"):
        run_cli(monkeypatch, tmp_path, subcommand, *small, f"--ckpt_path={checkpoint}")
    rows = csv_rows(tmp_path / "logs" / "csv" / "version_0" / "metrics.csv")
    losses = [float(row["train/lm_loss"]) for row in rows if row["train/lm_loss"]]
    assert losses[-1] < losses[0]
    # The checkpoint holds the weights that were validated.
    (validated,) = csv_rows(tmp_path / "logs" / "csv" / "version_1" / "metrics.csv")
    (trained,) = [row for row in rows if row["val/loss"]]
    assert float(validated["val/loss"]) == pytest.approx(float(trained["val/loss"]), rel=1e-5)
    header, *predicted = (tmp_path / "logs" / "submission" / "SST-2.tsv").read_text().splitlines()
    assert header == "index\tprediction"
    assert [row.split("\t")[0] for row in predicted] == [str(i) for i in range(600)]
    assert {row.split("\t")[1] for row in predicted} <= {"0", "1"}


def run_script(tmp_path: Path, subcommand: str, *arguments: str, timeout: float) -> None:
    """The command of the README, in a process of its own and with its logs in `tmp_path`."""
    common = [f"--data.data_dir={SAMPLE}", "--trainer.accelerator=cpu"]
    run_example(tmp_path, "glue.py", subcommand, "--config", str(CONFIG), *common, *arguments, timeout=timeout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_training_reaches_ninety_percent(tmp_path: Path) -> None:
    run_script(tmp_path, "fit", timeout=600)
    rows = csv_rows(tmp_path / "logs" / "csv" / "version_0" / "metrics.csv")
    accuracies = [float(row["val/accuracy"]) for row in rows if row["val/accuracy"]]
    assert accuracies[-1] >= 0.9
    checkpoint = tmp_path / "logs" / "glue" / "version_0" / "checkpoints" / "last.ckpt"
    run_script(tmp_path, "test", f"--ckpt_path={checkpoint}", timeout=200)
    (tested,) = [
        row for row in csv_rows(tmp_path / "logs" / "csv" / "version_1" / "metrics.csv") if row["test/accuracy"]
    ]
    assert float(tested["test/accuracy"]) >= 0.9
