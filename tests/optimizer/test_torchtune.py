"""Training code that nobody here wrote: torchtune's recipe for one device, from PyPI, with only its configuration's optimizer changed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from example_runs import ALPACA_SAMPLE, run_python

PACKAGES = "torchtune==0.6.1 torchao==0.10.0 torchdata==0.11.0 sentencepiece==0.2.3 tiktoken==0.14.0"
"""What the recipe imports and the tests' environment lacks. torchao is of its time: later ones have moved what it imports."""
ADAMW, OURS = "torch.optim.AdamW", "lightning_zenflow.OffloadAdamW"
STEPS = 8
"""Of each of two epochs."""
MODEL = {"vocab_size": 300, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 512}
PREPARE = f"""
import sentencepiece, torch
from pathlib import Path
from torchtune.models.llama2 import llama2

text = {str(ALPACA_SAMPLE / "train.json")!r}
sentencepiece.SentencePieceTrainer.train(
    input=text, model_prefix="tokenizer", vocab_size={MODEL["vocab_size"]}, pad_id=0, unk_id=3
)
torch.manual_seed(0)
Path("initial").mkdir()
torch.save(llama2(**{MODEL}).state_dict(), "initial/model.pt")
"""
SETTINGS = {
    "model._component_": "torchtune.models.llama2.llama2",
    **{f"model.{key}": value for key, value in MODEL.items()},
    "tokenizer.path": "tokenizer.model",
    "dataset.source": "json",
    "dataset.data_files": ALPACA_SAMPLE / "val.json",
    "dataset.split": "train",
    "checkpointer._component_": "torchtune.training.FullModelTorchTuneCheckpointer",
    "checkpointer.checkpoint_dir": "initial",
    "checkpointer.checkpoint_files": "[model.pt]",
    "device": "cpu",
    "dtype": "fp32",
    "enable_activation_offloading": False,
    "log_peak_memory_stats": False,
    "seed": 1,
    "epochs": 2,
    "max_steps_per_epoch": STEPS,
    "gradient_accumulation_steps": 2,
    "optimizer_in_bwd": False,
    "clip_grad_norm": 0.8,
    "optimizer.lr": 0.01,
    "lr_scheduler.num_warmup_steps": 2,
}
RESUMED = {
    "resume_from_checkpoint": True,
    "checkpointer.checkpoint_files": "[epoch_0/model-00001-of-00001.bin]",
    "metric_logger.filename": "resumed",
}


class Recipe:
    """torchtune in a folder of its own, which other tests do not see, and trainings of a tiny Llama.

    Args:
        folder: of the package, the model and the runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._packages = folder, folder / "packages"
        install = f"-m pip install --quiet --no-deps --target {self._packages} {PACKAGES}"
        subprocess.run([sys.executable, *install.split()], check=True)
        self._run("-c", PREPARE)

    def train(self, run: str, optimizer: str, **changes: object) -> list[tuple[float, float]]:
        """Loss and norm of the gradient, of each step.

        Args:
            run: name of the run's folder.
            optimizer: the class by its name in the configuration.
            changes: other settings.
        """
        keys = {"output_dir": run, "optimizer._component_": optimizer, "metric_logger.filename": "log"}
        keys = {**keys, **SETTINGS, **changes}
        recipes = self._packages / "recipes"
        configuration = recipes / "configs" / "llama2" / "7B_full_low_memory.yaml"
        arguments = ["--config", configuration, *(f"{key}={value}" for key, value in keys.items())]
        self._run(recipes / "full_finetune_single_device.py", *arguments)
        log = self._folder / run / "logs" / str(keys["metric_logger.filename"])
        found = re.findall(r"loss:(\S+) .*grad_norm:(\S+)", log.read_text())
        return [(float(loss), float(norm)) for loss, norm in found]

    def _run(self, *arguments: object) -> None:
        variables = {"OMP_NUM_THREADS": "1", "HF_HOME": str(self._folder / "cache")}
        run_python(self._folder, "-W", "ignore", *arguments, timeout=900, places=[self._packages], **variables)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_full_finetune_single_device(tmp_path: Path) -> None:
    """With its accumulation, scaling by tokens, clipping, scheduler, recomputed activations, and checkpoints, which either one resumes."""
    recipe = Recipe(tmp_path)
    expected, trained = recipe.train("torch", ADAMW), recipe.train("ours", OURS)
    assert len(trained) == 2 * STEPS
    for ours, torch_s in zip(trained, expected, strict=True):
        assert ours == pytest.approx(torch_s, rel=3e-6)
    norms = [norm for _, norm in expected]
    assert min(norms) < float(str(SETTINGS["clip_grad_norm"])) < max(norms)
    assert expected[-1][0] < 0.8 * expected[0][0]
    assert recipe.train("ours", OURS, **RESUMED) == trained[STEPS:]
    # The state of ours in AdamW of torch.
    resumed = recipe.train("ours", ADAMW, **{**RESUMED, "metric_logger.filename": "resumed by torch"})
    for ours, torch_s in zip(trained[STEPS:], resumed, strict=True):
        assert ours == pytest.approx(torch_s, rel=3e-6)
