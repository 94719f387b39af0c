"""The Alpaca example's command line under ZenFlow, its checkpoints and their export; with `-m slow` its whole default training."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch

import alpaca
import export_alpaca
from example_runs import EXAMPLES, ROOT, check_configuration, csv_rows, logged, run_example

SAMPLE = EXAMPLES / "data" / "alpaca"
CONFIG = ROOT / "conf" / "alpaca.yaml"
FILES = [f"--data.train_file={SAMPLE / 'train.json'}", f"--data.val_file={SAMPLE / 'val.json'}"]
SMALL = ["--model.layers=1", "--model.width=32", "--model.heads=2"]
FAST = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
METRICS = Path("logs", "csv_alpaca", "version_0", "metrics.csv")


def run_cli(monkeypatch: pytest.MonkeyPatch, folder: Path, subcommand: str, *arguments: str) -> None:
    """`python examples/alpaca.py SUBCOMMAND --config conf/alpaca.yaml ARGUMENTS`, in this process and at work in `folder`."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["alpaca.py", subcommand, "--config", str(CONFIG), *FILES, *FAST, *arguments])
    alpaca.main()


@pytest.mark.parametrize("file", ["alpaca.yaml", "alpaca_llama2_7b.yaml"])
def test_configurations_have_known_keys_and_build_their_strategy(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_configuration(alpaca.main, ROOT / "conf" / file, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--data.train_file=nowhere.json"], FileNotFoundError, "nowhere.json does not exist"),
        (["--model.warmup_ratio=2"], ValueError, "model.warmup_ratio=2.0 is not allowed"),
    ],
)
def test_wrong_commands_end_with_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        run_cli(monkeypatch, tmp_path, "fit", "--trainer.strategy=auto", *arguments)


@pytest.mark.usefixtures("no_worker_is_left")
def test_training_is_validated_resumed_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [*SMALL, "--trainer.val_check_interval=6", "--trainer.log_every_n_steps=1"]
    run_cli(monkeypatch, tmp_path, "fit", *short, "--trainer.max_steps=6")
    printed = re.findall(r"^Step (\d+), Loss: \d+\.\d+, Time: \d+\.\d+ms$", capsys.readouterr().out, re.MULTILINE)
    assert printed == [str(step) for step in range(1, 7)]
    rows = csv_rows(tmp_path / METRICS)
    assert {"train/loss", "val/loss", "val/perplexity", "val/token_accuracy", "val/exact_match"} <= set(rows[0])
    losses = logged(tmp_path / METRICS, "train/loss")
    assert losses[-1] < losses[0]

    checkpoint = tmp_path / "alpaca_output" / "last.ckpt"
    run_cli(monkeypatch, tmp_path, "fit", *short, "--trainer.max_steps=8", f"--ckpt_path={checkpoint}")
    assert "Step 7, " in capsys.readouterr().out
    run_cli(monkeypatch, tmp_path, "validate", *SMALL, f"--ckpt_path={tmp_path / 'alpaca_output' / 'best.ckpt'}")
    (val_loss,) = logged(tmp_path / "logs" / "csv_alpaca" / "version_2" / "metrics.csv", "val/loss")
    assert val_loss == pytest.approx(logged(tmp_path / METRICS, "val/loss")[-1], rel=1e-5)

    exported = tmp_path / "alpaca_output" / "model"
    export_alpaca.export(tmp_path / "alpaca_output" / "best.ckpt", exported, torch.float32)
    run_cli(monkeypatch, tmp_path, "validate", f"--model.pretrained={exported}")
    (export_loss,) = logged(tmp_path / "logs" / "csv_alpaca" / "version_3" / "metrics.csv", "val/loss")
    assert export_loss == pytest.approx(val_loss, rel=1e-5)


@pytest.mark.usefixtures("no_worker_is_left")
def test_pretrained_folder_and_deepspeed_json_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    """The parts of conf/alpaca_llama2_7b.yaml, from folders instead of names."""
    run_cli(
        monkeypatch,
        tmp_path,
        "fit",
        f"--model.pretrained={tiny_llama}",
        f"--data.tokenizer={tiny_llama}",
        "--model.activation_checkpointing=true",
        "--data.template=alpaca",
        "--data.packing=false",
        "--trainer.precision=bf16-true",
        "--trainer.max_steps=4",
        "--trainer.val_check_interval=4",
        "--trainer.limit_val_batches=2",
        "--trainer.strategy=lightning_zenflow.ZenFlowStrategy",
        f"--trainer.strategy.init_args.config={ROOT / 'conf' / 'zf_config.json'}",
    )
    (val_loss,) = logged(tmp_path / METRICS, "val/loss")
    (perplexity,) = logged(tmp_path / METRICS, "val/perplexity")
    assert perplexity == pytest.approx(math.exp(val_loss), rel=1e-5)  # to more digits than bfloat16 has

    from transformers import AutoTokenizer, LlamaForCausalLM

    exported = tmp_path / "model"
    export_alpaca.export(tmp_path / "alpaca_output" / "last.ckpt", exported, torch.bfloat16)
    tuned, pretrained = (LlamaForCausalLM.from_pretrained(folder) for folder in (exported, tiny_llama))
    assert tuned.dtype == torch.bfloat16
    assert not torch.equal(tuned.lm_head.weight, pretrained.lm_head.weight)
    assert tuned.config.use_cache
    assert len(AutoTokenizer.from_pretrained(exported)) == tuned.config.vocab_size


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_training_learns_to_answer(tmp_path: Path) -> None:
    command = ["fit", "--config", str(CONFIG), *FILES, "--trainer.accelerator=cpu"]
    output = run_example(tmp_path, "alpaca.py", *command, timeout=1200)
    assert output.count("Loss: ") == len(re.findall(r"Step \d+, Loss: \d+\.\d+, Time: \d+\.\d+ms", output)) > 500
    steps = int(re.findall(r"Step (\d+)", output)[-1])
    losses = logged(tmp_path / METRICS, "val/loss")
    assert losses[-1] < losses[0] / 3
    assert logged(tmp_path / METRICS, "val/exact_match")[-1] > 0.5

    # An epoch more loses nothing of it.
    checkpoint = tmp_path / "alpaca_output" / "last.ckpt"
    more = [f"--ckpt_path={checkpoint}", f"--trainer.max_epochs={len(losses) + 1}"]
    output = run_example(tmp_path, "alpaca.py", *command, *more, timeout=400)
    expected = range(steps + 1, steps + steps // len(losses) + 1)
    assert re.findall(r"Step (\d+)", output) == [str(number) for number in expected]
    (resumed,) = logged(tmp_path / "logs" / "csv_alpaca" / "version_1" / "metrics.csv", "val/loss")
    assert resumed < losses[0] / 3

    run_example(tmp_path, "export_alpaca.py", str(checkpoint), "model", timeout=200)
    run_example(tmp_path, "alpaca.py", "validate", *command[1:], "--model.pretrained=model", timeout=200)
    (exported,) = logged(tmp_path / "logs" / "csv_alpaca" / "version_2" / "metrics.csv", "val/loss")
    assert exported == pytest.approx(resumed, rel=1e-5)
