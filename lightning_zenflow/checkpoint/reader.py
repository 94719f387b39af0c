"""Reader of DeepSpeed's ZeRO-2 checkpoints: validation, and redistribution of the optimizer state to another number of ranks.

Files are memory-mapped, so that opening one is cheap and only the parts in use are read.
"""

import copy
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
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
from torch import Tensor

from lightning_zenflow.step.run_state import CHECKPOINT_KEY, VERSION
from lightning_zenflow.zero.saved_float32 import WithoutConversion

_CHUNK_BYTES = 2**20

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's moments in the state of a flat partition."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit the model; the message names the checkpoint or the file."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint directory. Its file ``latest`` names the folder with one file of the model and one file per rank.

    Content that is not what DeepSpeed writes may raise errors of any kind beside those named here.

    Raises:
        CheckpointError: `path` is missing, or not a complete checkpoint of ZeRO stage 1 or 2.
    """

    path: Path
    bf16: bool = False
    """Whether this run's model is in bfloat16."""

    def __post_init__(self) -> None:
        """Checks the structure of the directory."""
        if not self.path.exists():
            raise _refusal(self.path, "the path must exist")
        has_latest = (self.path / "latest").is_file()
        for parent in (self.path.parent, self.path.parent.parent):
            if not has_latest and (parent / "latest").is_file():
                raise _refusal(self.path, f"the path must be a whole checkpoint, got a part: use {parent}")
        if self.path.is_file():
            raise _refusal(
                self.path,
                "the path must be a directory saved by ZenFlowStrategy or DeepSpeedStrategy, got a file. To take the weights from a"
                " checkpoint of another strategy, use `model = Module.load_from_checkpoint(path)`, then `fit(model)`",
            )
        if not has_latest:
            raise _refusal(
                self.path, "the directory must be a checkpoint of DeepSpeed, got one without the file `latest`"
            )
        # Not `Path.is_dir`, which raises an error for a name that is too long.
        if not os.path.isdir(self.folder):
            name = str(self.folder.relative_to(self.path))
            raise _refusal(self.path, f"the folder {name[:60]!r}, named by its file `latest`, is missing")
        if not self._model_file.is_file():
            if (self.folder / f"zero_pp_rank_0_{self._model_file.name}").is_file():
                raise _refusal(self.path, "the ZeRO stage must be 1 or 2, got 3")
            raise _refusal(self.path, f"the file {self._model_file.name} is missing: the checkpoint is incomplete")

    @cached_property
    def folder(self) -> Path:
        """Folder with the files."""
        # Below `path`, whatever a damaged file says.
        return self.path / (self.path / "latest").read_text(errors="replace").strip().lstrip("/")

    @property
    def _model_file(self) -> Path:
        return self.folder / "mp_rank_00_model_states.pt"

    @cached_property
    def model_states(self) -> Mapping[str, Any]:
        """Content of the model file: weights, and state that all ranks share.

        Raises:
            CheckpointError: the file is damaged, or another one.
        """
        states = _read(self._model_file)
        # Written by `DeepSpeedEngine._save_checkpoint`; DeepSpeed has no constants for these two keys.
        if not isinstance(states, dict) or not {"module", "dp_world_size"} <= states.keys():
            raise _refusal(self._model_file, "the file must be a model file of DeepSpeed's engine")
        return states

    @property
    def world_size(self) -> int:
        """Number of ranks that saved the optimizer state."""
        return int(self.model_states["dp_world_size"])

    def verify_model(self) -> None:
        """Compares the model file with its checksums, for which it reads all of it.

        Raises:
            CheckpointError: the file is damaged.
        """
        _verify(self._model_file)

    def verify_optimizer(self, ranks: Iterable[int]) -> None:
        """As `verify_model`, for the files of some ranks of the run that saved."""
        for rank in ranks:
            _verify(self._optimizer_file(rank))

    def refuse_other_model(self, ours: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """Compares the saved parameters with those of the model: for each parameter group the shapes by name, in order.

        Raises:
            CheckpointError: they differ; the message names the first difference.
        """
        groups = self.model_states.get(PARAM_SHAPES)
        if groups is None:
            raise _refusal(self.path, "it must have optimizer state, got one that was saved without training")
        if len(groups) != len(ours):
            raise _refusal(
                self.path,
                f"configure_optimizers must return the saved number of parameter groups, {len(groups)}, got {len(ours)}",
            )
        for group, (saved, present) in enumerate(zip(groups, ours, strict=True)):
            if len(saved) != len(present):
                # The missing names tell more than the first pair that differs.
                unknown = [f"{n} only in the checkpoint" for n in saved if n not in present]
                unknown += [f"{n} only in the model" for n in present if n not in saved]
                raise _refusal(
                    self.path,
                    f"parameter group {group} must have {len(saved)} parameters, got {len(present)}: {', '.join(unknown[:4])}",
                )
            for theirs, own in zip(saved.items(), present.items(), strict=True):
                must, got = (f"{name} {list(shape)}" for name, shape in (theirs, own))
                if must != got:
                    raise _refusal(
                        self.path,
                        f"the model must be the saved one: parameter group {group} must have {must}, got {got}",
                    )

    def _optimizer_file(self, rank: int) -> Path:
        # As `DeepSpeedEngine._get_rank_zero_ckpt_name`, which has no public counterpart.
        name, other = (f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for prefix in ("", "bf16_"))
        if self.bf16:
            name, other = other, name
        file = self.folder / name
        if not file.is_file():
            if (self.folder / other).is_file():
                saved, present = ("one without bf16", "bf16") if self.bf16 else ("bf16", "another")
                raise _refusal(self.path, f"the precision must be that of the checkpoint, {saved}, got {present}")
            raise _refusal(
                self.path, f"the file of rank {rank} of {self.world_size} is missing: {self.folder.name}/{name}"
            )
        return file

    def optimizer_state(self, rank: int) -> dict[str, Any]:
        """Optimizer state of one rank of the run that saved, in DeepSpeed's layout; large tensors are memory-mapped.

        Raises:
            CheckpointError: the state is missing, damaged, or not that of AdamW under ZeRO stage 1 or 2.
        """
        file = self._optimizer_file(rank)
        content = _read(file)
        state = content.get(OPTIMIZER_STATE_DICT) if isinstance(content, dict) else None
        if not isinstance(state, dict) or SINGLE_PARTITION_OF_FP32_GROUPS not in state:
            raise _refusal(file, "the file must be an optimizer state of ZeRO stage 1 or 2")
        base = state[BASE_OPTIMIZER_STATE]
        if int(state[ZERO_STAGE]) > 2 or not isinstance(base, dict):
            raise _refusal(
                file, "the state must be of ZeRO stage 1 or 2 with zero_optimization.elastic_checkpoint=False"
            )
        flats = state[SINGLE_PARTITION_OF_FP32_GROUPS]
        for group, (param_group, flat) in enumerate(zip(base["param_groups"], flats, strict=True)):
            of_group = base["state"].get(param_group["params"][0], {})
            missing = [key for key in ("step", *MOMENTS) if key not in of_group]
            if missing:
                raise _refusal(
                    file, f"parameter group {group} must have the complete state of AdamW or Adam, got no {missing[0]}"
                )
            # Master weights are saved without padding.
            sizes = [of_group[name].numel() for name in MOMENTS]
            if min(sizes) < flat.numel() or len(set(sizes)) > 1:
                raise _refusal(
                    file, f"parameter group {group} must have moments of {flat.numel()} elements or more, got {sizes}"
                )
        ours = state.get(CHECKPOINT_KEY)
        if ours is not None and ours["version"] != VERSION:
            raise _refusal(
                file,
                f"the layout must be {VERSION}, got {ours['version']}: another version of lightning-zenflow wrote the checkpoint; continue"
                " with that version, or begin anew from its weights (`zero_to_fp32.py` in the checkpoint makes one file of them)",
            )
        # Copied because it is kept: a mapped tensor would hold the file for as long as the run lasts.
        return {**state, CHECKPOINT_KEY: copy.deepcopy(ours)}

    def state_for(self, rank: int, partition_sizes: Sequence[int], *, world_size: int) -> dict[str, Any]:
        """As `optimizer_state`, of one rank of this run, redistributed if the number of ranks has changed.

        Args:
            rank: of this run.
            world_size: of this run.
            partition_sizes: elements of each parameter group's flat partition in this run, including padding.
        """
        if world_size == self.world_size:
            return self.optimizer_state(rank)
        return repartition([self.optimizer_state(r) for r in range(self.world_size)], partition_sizes, rank)


def _refusal(path: Path, message: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path}: {message}")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Converts every error of a file that torch cannot read.

    Raises:
        CheckpointError: names the file; its cause is the error.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise _refusal(
            file,
            f"this file has a Python object that cannot be loaded ({type(error).__name__}: {error}): what defined it when it was saved, as"
            " the class of a hyperparameter, must be importable under the same name",
        ) from error
    except Exception as error:
        raise _refusal(file, f"this file is truncated or damaged ({type(error).__name__}: {error})") from error


def _verify(file: Path) -> None:
    """Compares a file written by torch with its checksums; one of torch's former format has none."""
    with _reading(file):
        if not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                # 0 where torch was told to compute none.
                if entry.CRC != 0:
                    with archive.open(entry) as content:
                        while content.read(_CHUNK_BYTES):
                            pass


def _read(file: Path) -> Any:
    # A file that is no archive has torch's former format, which cannot be mapped, or is incomplete.
    with _reading(file), WithoutConversion():
        return torch.load(file, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(file))


def repartition(saved: Sequence[Mapping[str, Any]], partition_sizes: Sequence[int], rank: int) -> dict[str, Any]:
    """Redistributes an optimizer state that another number of ranks saved.

    A parameter group is one flat tensor over all ranks, divided into equal partitions, with padding at its end only. The concatenation
    of the partitions without padding is the same for every number of ranks.

    Args:
        saved: states of all ranks that saved, in rank order.
        partition_sizes: elements of each parameter group's new partition, including padding.
        rank: rank of the new partition.

    Returns:
        State in the layout of `saved`, with copied tensors. All but AdamW's state is that of the first rank.
    """
    base = saved[0][BASE_OPTIMIZER_STATE]
    masters, states = [], {}
    for group, (param_group, size) in enumerate(zip(base["param_groups"], partition_sizes, strict=True)):
        key = param_group["params"][0]
        flats = [state[SINGLE_PARTITION_OF_FP32_GROUPS][group] for state in saved]
        of_ranks = [state[BASE_OPTIMIZER_STATE]["state"][key] for state in saved]
        part = partial(_part, [flat.numel() for flat in flats], rank * size, size)
        masters.append(part(flats))
        states[key] = {**of_ranks[0], **{name: part([state[name] for state in of_ranks]) for name in MOMENTS}}
    return {
        **saved[0],
        SINGLE_PARTITION_OF_FP32_GROUPS: masters,
        GROUP_PADDINGS: [0] * len(masters),
        BASE_OPTIMIZER_STATE: {**base, "state": states},
    }


def _part(lengths: Sequence[int], begin: int, size: int, tensors: Sequence[Tensor]) -> Tensor:
    """`size` elements from `begin` of the first `lengths` elements of each tensor, end to end; [size] float32, 0 behind the last."""
    ends = zip(tensors, lengths, accumulate(lengths), strict=True)
    parts = [t[:n][max(0, begin - end + n) : max(0, begin + size - end + n)] for t, n, end in ends]
    joined = torch.cat(parts).float()
    return torch.nn.functional.pad(joined, (0, size - joined.numel()))
