"""Reader of DeepSpeed's ZeRO checkpoints: validation, and redistribution of the state to another number of ranks.

Files are memory-mapped, so that opening one is cheap and only the parts in use are read.
"""

import copy
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM_ALIGNMENT_PADDINGS,
    PARAM_SHAPES,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from torch import Tensor

from lightning_zenflow.checkpoint.files import read, refusal, refuse_other_version, verify
from lightning_zenflow.deepspeed.flat_buffers import Layout, copy_parts
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY, MOMENTS

_MODEL_FILE = "mp_rank_00_model_states.pt"
"""Of all ranks; under stage 3 with a prefix for each."""

_ATTRIBUTES = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""Attributes of DeepSpeed's optimizers that checkpoints have."""

_TERMS = {FP32_FLAT_GROUPS: SINGLE_PARTITION_OF_FP32_GROUPS, OPTIMIZER_STATE_DICT: BASE_OPTIMIZER_STATE}
"""Keys of stage 3 with those of stage 2: the flat master weights, and the state of the user's optimizer."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint directory: ``latest`` names the folder with the model's file, under stage 3 one a rank, and the optimizer's, one a rank.

    All methods raise CheckpointError where a file is missing or damaged, where the run has another ZeRO stage, other parameter groups or
    parameters of other shapes, and where another version of this package has written it. Content that is not what DeepSpeed writes for
    AdamW may raise errors of any kind besides.
    """

    path: Path
    bf16: bool | None = None
    """Required precision of the saved model: bfloat16 (True), another one (False), or any (None)."""
    tag: str | None = None
    """Name of the folder, if it is not the one that ``latest`` names."""

    def __post_init__(self) -> None:
        """Refuses what is no checkpoint of DeepSpeed, or has no file of the model."""
        if self.tag is None and not (self.path / "latest").is_file():
            raise refusal(
                self.path, "the path must be a file, or a folder of DeepSpeed with its file `latest`, got neither"
            )
        if not self.is_stage_3 and not os.path.isfile(file := self.folder / _MODEL_FILE):
            name = file.relative_to(self.path)
            raise refusal(self.path, f"a file is missing in the folder that `latest` or the tag names: {name}")

    @cached_property
    def folder(self) -> Path:
        """Folder with the files of the ranks."""
        # Below `path`, whatever a damaged file says.
        return self.path / (self.tag or (self.path / "latest").read_text(errors="replace")).strip().lstrip("/")

    @cached_property
    def is_stage_3(self) -> bool:
        """True if stage 3 has saved, which divides the weights, too."""
        # Not `Path.is_file`, which raises an error for a name that is too long.
        return os.path.isfile(self.folder / f"zero_pp_rank_0_{_MODEL_FILE}")

    def refuse_other_stage(self, *, is_stage_3: bool) -> None:
        """Refuses files of another stage than this run's: a model in pieces loads those of stage 3, a whole one others."""
        if is_stage_3 != self.is_stage_3:
            saved, present = ("3", "another") if self.is_stage_3 else ("1 or 2", "3")
            raise refusal(
                self.path,
                f"the ZeRO stage must be that of the folder, {saved}, got {present}: set `stage` so, or load a checkpoint that is one file,"
                ' which every stage loads (`checkpoint_format="lightning"` in the run that saves)',
            )

    def _file(self, rank: int, *names: str) -> Path:
        found = [file for name in names if (file := self.folder / name).is_file()]
        if len(found) != 1:
            raise refusal(
                self.path,
                f"rank {rank} of {self.world_size} must have one file for this run's precision, {self.folder.name}/{names[0]}, got"
                f" {len(found)}",
            )
        return found[0]

    def _model_file(self, rank: int) -> Path:
        return self._file(rank, f"zero_pp_rank_{rank}_{_MODEL_FILE}") if self.is_stage_3 else self.folder / _MODEL_FILE

    @cached_property
    def model_states(self) -> Mapping[str, Any]:
        """Content of the model's file: weights, and state that all ranks share; under stage 3 of the first rank's."""
        return self.read_model(0)

    def read_model(self, rank: int, *, mapped: bool = True) -> dict[str, Any]:
        """Content of a rank's model file (`model_states`); tensors are memory-mapped if `mapped`."""
        file = self._model_file(rank)
        # Written by `DeepSpeedEngine._save_checkpoint`; DeepSpeed has no constants for these keys.
        states: dict[str, Any] = read(file, mapped=mapped)
        for key in ("dp_world_size", "global_steps") if rank > 0 else ():
            if (first := self.model_states.get(key)) != (other := states.get(key)):
                raise refusal(file, f"the files of all ranks must be of one save: {key} must be {first}, got {other}")
        return states

    @property
    def world_size(self) -> int:
        """Number of ranks that saved the optimizer state."""
        return int(self.model_states["dp_world_size"])

    def verify_model(self) -> None:
        """Compares the model's files with their checksums, for which it reads all of them, and refuses those of several saves."""
        verify(self._model_file(0))
        for rank in range(1, self.world_size) if self.is_stage_3 else ():
            verify(self._model_file(rank))
            self.read_model(rank)

    def verify_optimizer(self, ranks: Iterable[int]) -> None:
        """As `verify_model`, for the optimizer's files of some ranks of the run that saved."""
        for rank in ranks:
            verify(self._optimizer_file(rank))

    def refuse_other_model(self, ours: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Refuses a model with other parameters than were saved: for each parameter group the shapes by name, in any order."""
        buffers = iter(self._shapes)
        groups = self._shapes
        if self.is_stage_3:
            param_groups = self.optimizer_state(0)[BASE_OPTIMIZER_STATE]["param_groups"]
            groups = [{n: s for _ in group["params"] for n, s in next(buffers).items()} for group in param_groups]
        if len(groups) != len(ours):
            must = "configure_optimizers must return the saved number of parameter groups"
            raise refusal(self.path, f"{must}, {len(groups)}, got {len(ours)}")
        for number, of_group in enumerate(zip(groups, ours, strict=True)):
            self._refuse_other_shapes(*of_group, where=f"in parameter group {number} ")

    def _refuse_other_shapes(
        self, saved: Mapping[str, Sequence[int]], present: Mapping[str, Sequence[int]], *, where: str = ""
    ) -> None:
        for name in {**saved, **present}:
            theirs, ours = (list(shapes[name]) if name in shapes else "absent" for shapes in (saved, present))
            if theirs != ours:
                raise refusal(self.path, f"the model must be the saved one: {name} {where}must be {theirs}, got {ours}")

    @property
    def _shapes(self) -> Sequence[Mapping[str, tuple[int, ...]]]:
        """For each flat buffer, of a parameter group or under stage 3 of a sub-group, the shapes of its parameters."""
        shapes: Sequence[Mapping[str, tuple[int, ...]]] | None = self.model_states.get(PARAM_SHAPES)
        if shapes is None:
            raise refusal(self.path, "it must have optimizer state, got one that was saved without training")
        return shapes

    def _optimizer_file(self, rank: int) -> Path:
        # As `DeepSpeedEngine._get_rank_zero_ckpt_name`, which has no public counterpart.
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        of_bf16 = f"bf16_{name}"
        return self._file(rank, *((name, of_bf16) if self.bf16 is None else (of_bf16,) if self.bf16 else (name,)))

    def optimizer_state(self, rank: int) -> dict[str, Any]:
        """Optimizer state of one rank of the run that saved, in the terms of DeepSpeed's stage 2; large tensors are memory-mapped."""
        file = self._optimizer_file(rank)
        state = read(file)[OPTIMIZER_STATE_DICT]
        if self.is_stage_3:
            state = {_TERMS.get(key, key): value for key, value in state.items()}
        ours = state.get(CHECKPOINT_KEY)
        refuse_other_version(file, ours, " (`zero_to_fp32.py` in the checkpoint makes one file of them)")
        numels = [[t.numel() for t in of_buffer] for of_buffer in _partitions_of(state)]
        for number, ((master, *moments), layout) in enumerate(zip(numels, self._layouts(state), strict=True)):
            # Stage 2 saves master weights without padding. What stage 3 cuts otherwise (MiCS, AutoEP), or has on NVMe, has other lengths.
            n = layout.partition_numel
            if {*moments} != {n} or (master != n if self.is_stage_3 else master > n):
                raise refusal(
                    file, f"flat buffer {number} must have {n} elements of each state, got {master, *moments}"
                )
        # Copied because it is kept: a mapped tensor would hold the file for as long as the run lasts.
        return {**state, CHECKPOINT_KEY: copy.deepcopy(ours)}

    def state_for(self, rank: int, layouts: Sequence[Layout], *, world_size: int) -> dict[str, Any]:
        """State of one rank of this run, for `ZenFlowOptimizer.load_partitions`; redistributed, then float32, copied, and 0 in padding, if
        ranks or order of the parameters are others. One rank's file is read at a time. `layouts` are those of the flat buffers in this run.
        """
        own_rank = rank if world_size == self.world_size else 0
        own = self.optimizer_state(own_rank)
        base, ours, saved_layouts = own[BASE_OPTIMIZER_STATE], own[CHECKPOINT_KEY], self._layouts(own)
        partitions = _partitions_of(own)
        is_other = world_size != self.world_size or saved_layouts != list(layouts)
        if is_other:

            def read(r: int) -> list[list[Tensor]]:
                return _partitions_of(own if r == own_rank else self.optimizer_state(r))

            sizes = [(1 + len(MOMENTS), layout.partition_numel) for layout in layouts]
            partitions = [list(torch.zeros(size, dtype=torch.float32, device="cpu")) for size in sizes]
            copy_parts(read, saved_layouts, layouts, rank, partitions)
        return {
            "partitions": partitions,
            "count": int(base["state"][_keys_of(base)[0]]["step"]),
            # Earlier checkpoints, and those of plain DeepSpeed, do not have them.
            "counts": (ours or {}).get("counts", {}),
            "groups": base["param_groups"],
            "attributes": {name: own[name] for name in _ATTRIBUTES if name in own},
            CHECKPOINT_KEY: ours,
            # Parameters of one shape may have changed places. (Stage 2 trains in another order than it saves in.)
            "continues": not (self.is_stage_3 and is_other),
        }

    def _layouts(self, state: Mapping[str, Any]) -> list[Layout]:
        """Layout of each flat buffer, in the order that the model's file has."""
        numels = [{name: math.prod(shape) for name, shape in shapes.items()} for shapes in self._shapes]
        if self.is_stage_3:
            return [Layout.of_pieces(of_buffer, n_ranks=self.world_size) for of_buffer in numels]
        base = state[BASE_OPTIMIZER_STATE]
        partitions = [base["state"][key][MOMENTS[0]].numel() for key in _keys_of(base)]
        # DeepSpeed has them since it knows `parameter_alignment`.
        all_paddings = state.get(PARAM_ALIGNMENT_PADDINGS) or [[0] * len(of_group) for of_group in numels]
        return [
            Layout.of_partitions(of_group, paddings, partition_numel=partition)
            for of_group, paddings, partition in zip(numels, all_paddings, partitions, strict=True)
        ]

    def weights_for(self, rank: int, shapes: Mapping[str, Sequence[int]], *, world_size: int) -> dict[str, Tensor]:
        """A rank's pieces of the saved parameters of a folder of stage 3, [ceil(numel / world_size)], in the type of the saved model, on
        the CPU; 0 in padding. `shapes` are of the whole parameters in this run, by their first names. One rank's file is read at a time.
        """
        module, of_frozen = self.model_states["module"], self.model_states.get(FROZEN_PARAM_SHAPES) or {}
        saved = {n: s for of_buffer in (*self._shapes, of_frozen) for n, s in of_buffer.items() if n in module}
        names = [name for name in shapes if name in saved]
        self._refuse_other_shapes(*({name: of[name] for name in names} for of in (saved, shapes)))

        def cut(n_ranks: int, names: Iterable[str]) -> list[Layout]:
            return [Layout.of_pieces({name: math.prod(saved[name])}, n_ranks=n_ranks) for name in names]

        def read(r: int) -> list[list[Tensor]]:
            masters, fragments = self.optimizer_state(r)[SINGLE_PARTITION_OF_FP32_GROUPS], self.read_model(r)
            return [[part] for part in (*masters, *(fragments[FROZEN_PARAM_FRAGMENTS][name] for name in frozen))]

        targets, frozen = cut(world_size, names), [name for name in of_frozen if name in names]
        pieces = {
            name: torch.zeros(target.partition_numel, dtype=module[name].dtype, device="cpu")
            for name, target in zip(names, targets, strict=True)
        }
        sources = [*self._layouts({}), *cut(self.world_size, frozen)]
        copy_parts(read, sources, targets, rank, [[piece] for piece in pieces.values()])
        return pieces


def _keys_of(base: Mapping[str, Any]) -> list[Any]:
    """Keys of the flat buffers in the state of the user's optimizer, in the buffers' order; a group has several under stage 3."""
    return [key for param_group in base["param_groups"] for key in param_group["params"]]


def _partitions_of(state: Mapping[str, Any]) -> list[list[Tensor]]:
    """Tensors of a rank's state, for each flat buffer: master weights, perhaps without padding, and moments."""
    base, masters = state[BASE_OPTIMIZER_STATE], state[SINGLE_PARTITION_OF_FP32_GROUPS]
    keys = zip(masters, _keys_of(base), strict=True)
    return [[master, *(base["state"][key][name] for name in MOMENTS)] for master, key in keys]
