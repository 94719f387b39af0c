"""Reader of DeepSpeed's ZeRO-2 checkpoints: validation, and redistribution of the optimizer state to another number of ranks.

Files are memory-mapped, so that opening one is cheap and only the parts in use are read.
"""

import copy
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_ALIGNMENT_PADDINGS,
    PARAM_SHAPES,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)

from lightning_zenflow.engine.host_state import MOMENTS
from lightning_zenflow.engine.saved_float32 import WithoutConversion
from lightning_zenflow.step.run_state import CHECKPOINT_KEY, VERSION
from lightning_zenflow.zero.flat_layout import FlatLayout, runs

_CHUNK_BYTES = 2**20


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
        """Compares the saved parameters with those of the model: for each parameter group the shapes by name, in any order.

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
            if saved.keys() != present.keys():
                unknown = [f"{n} only in the checkpoint" for n in saved if n not in present]
                unknown += [f"{n} only in the model" for n in present if n not in saved]
                raise _refusal(
                    self.path,
                    f"parameter group {group} must have {len(saved)} parameters, got {len(present)}: {', '.join(unknown[:4])}",
                )
            for name, shape in saved.items():
                if tuple(shape) != tuple(present[name]):
                    raise _refusal(
                        self.path,
                        f"the model must be the saved one: parameter group {group} must have {name} {list(shape)}, got"
                        f" {name} {list(present[name])}",
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

    def state_for(self, rank: int, layouts: Sequence[FlatLayout], *, world_size: int) -> dict[str, Any]:
        """Optimizer state of one rank of this run, redistributed if the number of ranks or the order of the parameters is another one.

        Args:
            rank: rank of this run.
            layouts: of each parameter group in this run.
            world_size: number of ranks of this run.

        Raises:
            CheckpointError: see `optimizer_state`.
        """
        own_rank = rank if world_size == self.world_size else 0
        own = self.optimizer_state(own_rank)
        saved_layouts = self._layouts(own)
        if world_size == self.world_size and saved_layouts == list(layouts):
            return own
        saved = [own if r == own_rank else self.optimizer_state(r) for r in range(self.world_size)]
        return {**own, **repartition(saved, saved_layouts, layouts, rank)}

    def _layouts(self, state: Mapping[str, Any]) -> list[FlatLayout]:
        """Layout of each parameter group, in the order that the model's file has."""
        base, layouts = state[BASE_OPTIMIZER_STATE], []
        groups = self.model_states[PARAM_SHAPES]
        # DeepSpeed has them since it knows `parameter_alignment`.
        all_paddings = state.get(PARAM_ALIGNMENT_PADDINGS) or [[0] * len(shapes) for shapes in groups]
        for param_group, shapes, paddings in zip(base["param_groups"], groups, all_paddings, strict=True):
            moments = base["state"][param_group["params"][0]][MOMENTS[0]]
            numels = {name: math.prod(shape) for name, shape in shapes.items()}
            layouts.append(FlatLayout.of(numels, paddings, partition_numel=moments.numel()))
        return layouts


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


def repartition(
    saved: Sequence[Mapping[str, Any]], sources: Sequence[FlatLayout], targets: Sequence[FlatLayout], rank: int
) -> dict[str, Any]:
    """Redistributes AdamW's state that was saved in another layout.

    Args:
        saved: states of all ranks that saved, in rank order.
        sources: layouts of each parameter group there.
        targets: layouts to redistribute to.
        rank: rank of the new partition.

    Returns:
        AdamW's state in DeepSpeed's terms, copied, float32; 0 in padding.
    """
    base = saved[0][BASE_OPTIMIZER_STATE]
    masters, states = [], {}
    for group, (param_group, source, target) in enumerate(zip(base["param_groups"], sources, targets, strict=True)):
        key = param_group["params"][0]
        master, *moments = (torch.zeros(target.partition_numel) for _ in range(1 + len(MOMENTS)))
        for run in runs(source, target):
            if run.target_rank == rank:
                of_rank = saved[run.source_rank]
                theirs = of_rank[BASE_OPTIMIZER_STATE]["state"][key]
                parts = (of_rank[SINGLE_PARTITION_OF_FP32_GROUPS][group], *(theirs[name] for name in MOMENTS))
                for ours, part in zip((master, *moments), parts, strict=True):
                    ours.narrow(0, run.target_begin, run.numel).copy_(part.narrow(0, run.source_begin, run.numel))
        masters.append(master)
        states[key] = {**base["state"][key], **dict(zip(MOMENTS, moments, strict=True))}
    return {
        SINGLE_PARTITION_OF_FP32_GROUPS: masters,
        GROUP_PADDINGS: [0] * len(masters),
        PARAM_ALIGNMENT_PADDINGS: [[0] * len(target.places) for target in targets],
        BASE_OPTIMIZER_STATE: {**base, "state": states},
    }
