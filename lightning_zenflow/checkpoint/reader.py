"""Reads DeepSpeed's ZeRO-2 checkpoints, and says what is wrong with those that cannot be continued from.

Files are mapped, not read: looking at one costs little, and only what is used of it is ever in memory.
"""

import copy
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)

from lightning_zenflow.checkpoint.upgrade import upgrade
from lightning_zenflow.step.run_state import CHECKPOINT_KEY, VERSION

Shapes = Sequence[Mapping[str, Sequence[int]]]
"""For each parameter group the shapes of its parameters by name, in order."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is not one of this model; the message names it, or the file in it, and what is wrong."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint directory: ``latest`` names the folder in it that holds one file of the model and one of each rank.

    Raises:
        CheckpointError: there is something else at `path`, or less.
    """

    path: Path

    def __post_init__(self) -> None:
        """Refuses what has not the form of a checkpoint."""
        if not self.path.exists():
            raise _refusal(self.path, "there is nothing under this name")
        for parent in (self.path.parent, self.path.parent.parent):
            if not (self.path / "latest").is_file() and (parent / "latest").is_file():
                raise _refusal(self.path, f"this is a part of a checkpoint; allowed is the whole: {parent}")
        if self.path.is_file():
            raise _refusal(
                self.path,
                "this is a file; allowed is a directory as ZenFlowStrategy and DeepSpeedStrategy save it. Of a checkpoint of"
                " another strategy the weights can be taken: `model = Module.load_from_checkpoint(path)`, then `fit(model)`",
            )
        if not (self.path / "latest").is_file():
            raise _refusal(self.path, "no file `latest` is in this directory: it is not a checkpoint of DeepSpeed")
        if not self.folder.is_dir():
            raise _refusal(self.path, f"there is no folder {self.folder.name!r}, which its file `latest` names")
        if not self._model_file.is_file():
            stage_3 = (self.folder / f"zero_pp_rank_0_{self._model_file.name}").is_file()
            what = "it is of ZeRO stage 3; allowed is stage 1 or 2" if stage_3 else "it is incomplete"
            raise _refusal(self.path, f"there is no file {self._model_file.name}: {what}")

    @cached_property
    def folder(self) -> Path:
        """Where its files are."""
        return self.path / (self.path / "latest").read_text(errors="replace").strip()

    @property
    def _model_file(self) -> Path:
        return self.folder / "mp_rank_00_model_states.pt"

    @cached_property
    def model_states(self) -> Mapping[str, Any]:
        """The file of the model: weights, and what is the same on every rank."""
        states = _read(self._model_file)
        if not isinstance(states, dict) or not {"module", "dp_world_size"} <= states.keys():
            raise _refusal(self._model_file, "this file was not written by DeepSpeed's engine")
        return states

    @property
    def world_size(self) -> int:
        """Ranks that the optimizer state is spread over."""
        return int(self.model_states["dp_world_size"])

    def refuse_other_model(self, ours: Shapes) -> None:
        """Refuses a checkpoint of parameters other than these.

        Raises:
            CheckpointError: names the first difference.
        """
        theirs = self.model_states.get(PARAM_SHAPES)
        if theirs is None:
            raise _refusal(self.path, "it has no optimizer state: it was saved where nothing was trained")
        if len(theirs) != len(ours):
            raise _refusal(
                self.path, f"it has {len(theirs)} parameter groups, but configure_optimizers returned {len(ours)}"
            )
        for group, (saved, present) in enumerate(zip(theirs, ours, strict=True)):
            if len(saved) != len(present):
                # Which one is missing says more than that all those after it have moved.
                unknown = [*(f"{n} only there" for n in saved if n not in present)]
                unknown += [f"{n} only here" for n in present if n not in saved]
                raise _refusal(
                    self.path,
                    f"parameter group {group} has {len(saved)} parameters there and {len(present)} here: {', '.join(unknown[:4])}",
                )
            for (their_name, their_shape), (name, shape) in zip(saved.items(), present.items(), strict=True):
                if their_name != name or tuple(their_shape) != tuple(shape):
                    raise _refusal(
                        self.path,
                        f"it is of another model: parameter group {group} has {their_name} {list(their_shape)} where this model has"
                        f" {name} {list(shape)}",
                    )

    def optimizer_state(self, rank: int, *, bf16: bool) -> dict[str, Any]:
        """DeepSpeed's optimizer state of one rank; its large tensors are mapped.

        Args:
            rank: of the run that saved.
            bf16: whether this run's model is in bfloat16, which the file's name says.

        Raises:
            CheckpointError: it is missing, damaged, or not of AdamW under ZeRO stage 1 or 2.
        """
        name, other = (f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for prefix in ("", "bf16_"))
        if bf16:
            name, other = other, name
        file = self.folder / name
        if not file.is_file():
            if (self.folder / other).is_file():
                there, here = ("another precision", "bf16") if bf16 else ("bf16", "another precision")
                raise _refusal(self.path, f"it was saved with precision {there}, this run has {here}")
            raise _refusal(
                self.path, f"rank {rank} of {self.world_size} is missing: there is no file {self.folder.name}/{name}"
            )
        content = _read(file)
        state = content.get(OPTIMIZER_STATE_DICT) if isinstance(content, dict) else None
        if not isinstance(state, dict) or SINGLE_PARTITION_OF_FP32_GROUPS not in state:
            raise _refusal(file, "this file has no state of a ZeRO stage 1 or 2 optimizer")
        base = state[BASE_OPTIMIZER_STATE]
        if int(state[ZERO_STAGE]) > 2 or not isinstance(base, dict):
            raise _refusal(file, "allowed is ZeRO stage 1 or 2 with zero_optimization.elastic_checkpoint=False")
        for group, param_group in enumerate(base["param_groups"]):
            of_group = base["state"].get(param_group["params"][0], {})
            missing = [key for key in ("step", *MOMENTS) if key not in of_group]
            if missing:
                raise _refusal(
                    file, f"parameter group {group} has no {missing[0]}: it is not the complete state of AdamW or Adam"
                )
        ours = state.get(CHECKPOINT_KEY)
        if ours is not None and ours["version"] > VERSION:
            raise _refusal(
                file,
                f"a newer lightning-zenflow wrote it (its layout is {ours['version']}, this version reads up to {VERSION}):"
                " upgrade lightning-zenflow",
            )
        # Copied because it is kept: a mapped tensor would hold the file for as long as the run lasts.
        return {**state, CHECKPOINT_KEY: None if ours is None else upgrade(copy.deepcopy(ours))}

    def state_for(self, rank: int, partition_sizes: Sequence[int], *, world_size: int, bf16: bool) -> dict[str, Any]:
        """The optimizer state that a rank of this run continues from.

        Args:
            rank: of this run.
            partition_sizes: elements of each parameter group's flat partition in this run, padding included.
            world_size: ranks of this run.
            bf16: see `optimizer_state`.

        Raises:
            CheckpointError: see `optimizer_state`.
        """
        if world_size == self.world_size:
            return self.optimizer_state(rank, bf16=bf16)
        saved = [self.optimizer_state(r, bf16=bf16) for r in range(self.world_size)]
        return repartition(saved, partition_sizes, rank)


def _refusal(path: Path, message: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path}: {message}")


def _read(file: Path) -> Any:
    """The content of a file that torch wrote.

    Raises:
        CheckpointError: it is not one, or not complete.
    """
    try:
        # What is no archive was written in the format that torch had before, which cannot be mapped, or is not complete.
        return torch.load(file, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(file))
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise _refusal(file, f"this file is truncated or damaged ({type(error).__name__}: {error})") from error


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, in the state of each flat partition."""


def repartition(saved: Sequence[Mapping[str, Any]], partition_sizes: Sequence[int], rank: int) -> dict[str, Any]:
    """One rank's part of an optimizer state that was saved by another number of ranks.

    A parameter group is one flat tensor over all ranks, cut into equal parts, with padding at its end only. So the parts without padding,
    one after the other, are the same for every number of ranks.

    Args:
        saved: the states of all ranks that saved, in their order.
        partition_sizes: elements of each parameter group's part on the rank, padding included.
        rank: whose state is wanted.

    Returns:
        As an element of `saved`; tensors are copies. What is not AdamW's is the first rank's.
    """
    base = saved[0][BASE_OPTIMIZER_STATE]
    keys = [param_group["params"][0] for param_group in base["param_groups"]]
    masters, states = [], {}
    for group, (key, size) in enumerate(zip(keys, partition_sizes, strict=True)):
        first = base["state"][key]
        # Neither master weights nor moments of padding are ever read.
        master, *moments = (torch.zeros(size) for _ in range(1 + len(MOMENTS)))
        begin = rank * size
        offset = 0
        for state in saved:
            part = state[SINGLE_PARTITION_OF_FP32_GROUPS][group]
            lower, upper = max(begin, offset), min(begin + size, offset + part.numel())
            if lower < upper:
                theirs = state[BASE_OPTIMIZER_STATE]["state"][key]
                sources = [part, *(theirs[name] for name in MOMENTS)]
                for target, source in zip((master, *moments), sources, strict=True):
                    target[lower - begin : upper - begin] = source[lower - offset : upper - offset]
            offset += part.numel()
        masters.append(master)
        states[key] = {**first, **dict(zip(MOMENTS, moments, strict=True))}
    return {
        **saved[0],
        SINGLE_PARTITION_OF_FP32_GROUPS: masters,
        GROUP_PADDINGS: [0] * len(masters),
        BASE_OPTIMIZER_STATE: {**base, "state": states},
    }
