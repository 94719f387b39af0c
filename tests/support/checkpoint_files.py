"""Files of checkpoints, and changes to them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MODEL_FILE = "checkpoint/mp_rank_00_model_states.pt"
RANK_FILE = "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt"


def change_byte(file: Path, position: int, to: int) -> None:
    """Changes a single byte of a file."""
    with file.open("r+b") as stream:
        stream.seek(position)
        stream.write(bytes([to]))


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change of a file's content, for any checkpoint."""

    def apply(path: Path) -> None:
        content = torch.load(path / name, weights_only=False)
        change(content)
        torch.save(content, path / name)

    return apply
