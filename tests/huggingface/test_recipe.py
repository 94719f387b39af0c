"""The recipe's snippets, and examples/sft.py."""

from pathlib import Path

import pytest
import torch
from test_transformers import Tokens, tiny_llama
from torch.utils.data import DataLoader, TensorDataset

import sft
from accelerate_loops import Net, new_process

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"


def snippet(text: str) -> str:
    """The block of the recipe that has a text."""
    (found,) = (block for block in RECIPES.read_text().split("```python\n")[1:] if text in block.partition("```")[0])
    return found.partition("```")[0]


def test_loop_under_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(32, 16, dtype=torch.float32), torch.zeros(32, dtype=torch.int64))
    names = {"model": Net(), "loader": DataLoader(data, batch_size=4)}
    before = Net()
    with new_process():
        exec(snippet("lightning_zenflow.accelerate"), names)
    after = names["accelerator"].unwrap_model(names["model"])
    assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True))
    assert (tmp_path / "state" / "pytorch_model" / "mp_rank_00_model_states.pt").is_file()


def test_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, before = tiny_llama(), tiny_llama()
    with new_process():
        exec(snippet("lightning_zenflow.transformers"), {"model": model, "dataset": Tokens()})
    assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), model.parameters(), strict=True))


def test_example_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--max_steps=30", "--per_device_train_batch_size=8", "--logging_steps=10", "--disable_tqdm=True"]
    with new_process():
        trainer = sft.main([*options, "--eval_strategy=no", "--warmup_steps=0"])
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.accelerator.free_memory()
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "sft_output" / "model.safetensors").is_file()
