"""The examples' command lines: configurations, wrong settings, bundled data and trainings; with `-m slow` the whole default trainings."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import alpaca
import export_alpaca
import glue
import make_alpaca_sample
import make_glue_sample
from example_runs import ALPACA_SAMPLE, GLUE_SAMPLE, ROOT, csv_rows, logged, run_example
from lightning_zenflow import ZenFlowStrategy
from tiny_models import save_tiny_model

CONF = ROOT / "conf"
PROGRAMS = {"glue": glue, "alpaca": alpaca}
DATA = {
    "glue": [f"--data.data_dir={GLUE_SAMPLE}", "--trainer.accelerator=cpu"],
    "alpaca": [
        *(f"--data.{split}_file={ALPACA_SAMPLE / split}.json" for split in ("train", "val")),
        "--trainer.accelerator=cpu",
    ],
}
SETTINGS = {program: ["--config", str(CONF / f"{program}.yaml"), *arguments] for program, arguments in DATA.items()}
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
SMALL = ["--model.layers=1", "--model.heads=2"]

Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`python examples/PROGRAM.py SUBCOMMAND ARGUMENTS` with its default configuration or another one, in this process, at work in
    `tmp_path`.
    """
    monkeypatch.chdir(tmp_path)

    def run(program: str, subcommand: str, *arguments: str, file: str = "") -> None:
        config = str(CONF / (file or f"{program}.yaml"))
        argv = [program, subcommand, "--config", config, *DATA[program], *QUIET, *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        PROGRAMS[program].main()

    return run


def export(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["export_alpaca.py", *arguments])
    export_alpaca.main()


@pytest.mark.parametrize("file", sorted(path.name for path in CONF.glob("*.yaml")))
def test_configurations_have_known_keys_and_build_their_strategy(
    file: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^(None|0)?$"):
        run(re.split(r"[_.]", file)[0], "fit", "--print_config", file=file)
    settings = OmegaConf.create(capsys.readouterr().out).trainer.strategy
    assert settings.class_path == "lightning_zenflow.ZenFlowStrategy"
    ZenFlowStrategy(**settings.init_args)


@pytest.mark.parametrize(
    ("script", "bundled"),
    [(make_glue_sample, GLUE_SAMPLE), (make_alpaca_sample, ALPACA_SAMPLE)],
    ids=["glue", "alpaca"],
)
def test_the_scripts_write_the_bundled_files_again(script: Any, bundled: Path, tmp_path: Path) -> None:
    script.write_sample(script.make_sample(), tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert files == {name: (bundled / name).read_bytes() for name in files} and len(files) > 1
    assert sum(map(len, files.values())) < 500_000


def test_glue_is_trained_validated_tested_and_predicted(run: Run, tmp_path: Path) -> None:
    small = [*SMALL, "--model.width=16", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1"]
    run("glue", "fit", *small, "--trainer.max_steps=8", "--trainer.val_check_interval=8")
    (checkpoint,) = tmp_path.glob("logs/glue/version_*/checkpoints/last.ckpt")
    assert list(tmp_path.glob("logs/glue/version_0/events.out.tfevents.*"))
    for subcommand in ("validate", "test", "predict"):
        run("glue", subcommand, *small, f"--ckpt_path={checkpoint}")
    losses = logged(tmp_path, "train/lm_loss")
    assert losses[-1] < losses[0]
    # The checkpoint holds the weights that were validated.
    assert logged(tmp_path, "val/loss", version=1) == pytest.approx(logged(tmp_path, "val/loss"), rel=1e-5)
    assert 0 <= logged(tmp_path, "test/accuracy", version=2)[0] <= 1
    header, *predicted = (tmp_path / "logs" / "submission" / "SST-2.tsv").read_text().splitlines()
    assert header == "index\tprediction"
    assert [row.split("\t")[0] for row in predicted] == [str(i) for i in range(600)]
    assert {row.split("\t")[1] for row in predicted} <= {"0", "1"}


def test_alpaca_is_trained_resumed_validated_and_exported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [*SMALL, "--model.width=32"]
    short = [*small, "--trainer.val_check_interval=6", "--trainer.log_every_n_steps=1"]
    run("alpaca", "fit", *short, "--trainer.max_steps=6")
    printed = re.findall(r"^Step (\d+), Loss: \d+\.\d+, Time: \d+\.\d+ms$", capsys.readouterr().out, re.MULTILINE)
    assert printed == [str(step) for step in range(1, 7)]
    losses = logged(tmp_path, "train/loss")
    assert losses[-1] < losses[0]
    assert all(len(logged(tmp_path, f"val/{name}")) == 1 for name in ("perplexity", "token_accuracy", "exact_match"))

    run("alpaca", "fit", *short, "--trainer.max_steps=8", "--ckpt_path=alpaca_output/last.ckpt")
    assert re.findall(r"^Step (\d+)", capsys.readouterr().out, re.MULTILINE) == ["7", "8"]
    run("alpaca", "validate", *small, "--ckpt_path=alpaca_output/best.ckpt")
    export(monkeypatch, "alpaca_output/best.ckpt", "alpaca_output/model")
    run("alpaca", "validate", "--model.pretrained=alpaca_output/model")
    trained, validated, exported = (logged(tmp_path, "val/loss", version=version) for version in (0, 2, 3))
    assert validated == pytest.approx(trained, rel=1e-5) and exported == pytest.approx(trained, rel=1e-5)
    with pytest.raises(ValueError, match="logs is no checkpoint of a training"):
        export(monkeypatch, "logs", "model")


def test_a_model_larger_than_the_gpu_in_small(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random and pretrained weights, divided over the ranks; the checkpoint resumes, and is exported to what stage 3 divides again."""
    file = "alpaca_larger_than_gpu.yaml"
    short = ["--trainer.val_check_interval=4", "--trainer.limit_val_batches=2", "--data.batch_size=4"]
    small = [*SMALL, "--model.width=32", "--model.lr=1e-2"]
    run("alpaca", "fit", *small, *short, "--trainer.max_steps=4", file=file)
    run("alpaca", "fit", *small, *short, "--trainer.max_steps=8", "--ckpt_path=alpaca_output/last.ckpt", file=file)
    losses = [*logged(tmp_path, "train/loss"), *logged(tmp_path, "train/loss", version=1)]
    assert len(losses) == 8 and losses[-1] < losses[0]
    export(monkeypatch, "alpaca_output/last.ckpt", "model", "--dtype=bfloat16")
    # The weights in the model's own type that were validated, here in pieces and there whole.
    for version, strategy in ((2, []), (3, ["--trainer.strategy=auto"])):
        run("alpaca", "validate", "--model.pretrained=model", *short[1:], *strategy, file=file)
        # To bfloat16's rounding, which depends on how weights are aligned.
        expected = pytest.approx(logged(tmp_path, "val/loss", version=1), rel=1e-4)
        assert logged(tmp_path, "val/loss", version=version) == expected

    # As a folder of meta-llama/Llama-2-7b-hf, whose tokenizer has no token for padding.
    texts = ["Say this again.", "### Response:", "### Instruction:"]
    llama = save_tiny_model(tmp_path / "llama", "llama", texts=texts, max_position_embeddings=256)
    pretrained = [f"--model.pretrained={llama}", f"--data.tokenizer={llama}", "--data.max_length=256"]
    run("alpaca", "fit", *pretrained, *short, "--trainer.max_steps=2", file=file)
    assert len(logged(tmp_path, "train/loss", version=4)) == 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_warning_is_printed(program: str, tmp_path: Path) -> None:
    """Of the commands that a new user runs first."""
    short = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1"]
    run_example(tmp_path, f"{program}.py", "fit", *SETTINGS[program], *short, timeout=250)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_training_of_glue_reaches_ninety_percent(tmp_path: Path) -> None:
    run_example(tmp_path, "glue.py", "fit", *SETTINGS["glue"], timeout=600)
    assert logged(tmp_path, "val/accuracy")[-1] >= 0.9
    checkpoint = "--ckpt_path=logs/glue/version_0/checkpoints/last.ckpt"
    run_example(tmp_path, "glue.py", "test", *SETTINGS["glue"], checkpoint, timeout=200)
    assert logged(tmp_path, "test/accuracy", version=1)[-1] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_default_training_of_alpaca_learns_to_answer(tmp_path: Path) -> None:
    output = run_example(tmp_path, "alpaca.py", "fit", *SETTINGS["alpaca"], timeout=1200)
    assert output.count("Loss: ") == len(re.findall(r"Step \d+, Loss: \d+\.\d+, Time: \d+\.\d+ms", output)) > 500
    losses = logged(tmp_path, "val/loss")
    assert losses[-1] < losses[0] / 3
    assert logged(tmp_path, "val/exact_match")[-1] > 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loop_under_fabric(tmp_path: Path) -> None:
    settings = ["trainer.max_steps=20", "trainer.accelerator=cpu", f"data.data_dir={GLUE_SAMPLE}"]
    assert "epoch 0, step 20:" in run_example(tmp_path, "fabric_loop.py", *settings, timeout=300)
    folder = tmp_path / "logs" / "fabric"
    assert (folder / "last.ckpt").is_file()
    names = {name for row in csv_rows(folder / "version_0" / "metrics.csv") for name in row}
    assert {"train/lm_loss", "val/accuracy", "zenflow/stall/device_percent"} <= names
