"""Files of checkpoints, changes to them, and what a run that was resumed from one must be."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import Case, Run
from same_bits import assert_same_run, assert_same_tensors

MODEL_FILE = "checkpoint/mp_rank_00_model_states.pt"
RANK_FILE = "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt"


def zero_state(checkpoint: Path) -> Any:
    """Rank 0's ZeRO state in a folder of stage 2, in float32."""
    return torch.load(checkpoint / RANK_FILE, weights_only=False)["optimizer_state_dict"]


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


def in_order(case: Case, entries: Mapping[str, Tensor]) -> list[Tensor]:
    """The trained weights of a state dict, in the order of the parameter groups."""
    model = case.make_model()
    names = {id(p): name for name, p in model.named_parameters()}
    return [entries[names[id(p)]].contiguous() for group in model.parameter_groups() for p in group]


def assert_saved(path: Path, run: Run, case: Case) -> None:
    """A checkpoint that is a file has the state at the end of a run."""
    content = torch.load(path, weights_only=True)
    assert_same_tensors(in_order(case, content["state_dict"]), run.master)
    (state,) = (optimizer["state"] for optimizer in content["optimizer_states"])
    for key, theirs in (("exp_avg", run.exp_avg), ("exp_avg_sq", run.exp_avg_sq)):
        assert_same_tensors([state[i][key] for i in sorted(state)], [t.float() for t in theirs], key)


def assert_continues(rest: Run, whole: Run, saved: int) -> None:
    """A run that was resumed after a number of steps is the run that went on: the same weights in every step, bit for bit."""
    assert len(rest.losses) == len(whole.losses) - saved
    assert rest.schedules == whole.schedules[saved:]
    assert_same_run(rest, replace(whole, shown=whole.shown[saved:], losses=whole.losses[saved:]))
