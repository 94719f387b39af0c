"""Tiny models in folders like those of pretrained ones."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of meta-llama/Llama-2-7b-hf, with a tiny model and a tokenizer without a token for padding."""
    from tiny_models import save_tiny_model

    texts = ["Say this again.", "### Response:", "### Instruction:"]
    return save_tiny_model(tmp_path_factory.mktemp("tiny_llama"), "llama", texts=texts, max_position_embeddings=256)
