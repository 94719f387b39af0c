"""A checkpoint that is one file, as Lightning's strategies for one device write it: whole weights, and AdamW's state in torch's layout.

Under the Trainer::

    state_dict            float32 master weights of what is trained, by the module's names; buffers and frozen weights in their own type
    optimizer_states      [state_dict of torch.optim.AdamW], the parameters in the order of the user's optimizer
    lightning_zenflow.run_state
                          what else continues the run bit for bit
        ranks             [rank] `ZenFlowStep.state_dict`
        loss_scaler       attributes of DeepSpeed's
        clip_grad         largest gradient norm
        count             applied steps; each parameter's own, without those in which it was frozen, are in its state
        counts            of DeepSpeed's engine
    ...                   what Lightning saves besides

Under Fabric weights and state have the names that the loop gives them. A file with weights only has the weights only. All of it but the
user's own objects is loaded by ``torch.load(path, weights_only=True)``.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor

from lightning_zenflow.checkpoint.files import FileContent, refusal, refuse_other_version
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.process import in_common
from lightning_zenflow.core.saved_tensors import DiskCopies, parts_on_disk
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.users_module import further_names, is_divided, is_in_pieces
from lightning_zenflow.deepspeed.users_objects import REQUIRED_OPTIONS
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY, MOMENTS

FILE_KEY = "lightning_zenflow.run_state"
"""Entry of ours in a file, beside those of users."""

COUNTS = ("global_steps", "global_samples", "skipped_steps")
"""Counters of DeepSpeed's engine: the names of its attributes, and their keys in its checkpoints and ours."""

_WEIGHTS_ONLY = "`model = Module.load_from_checkpoint(path)`"


class FileSource:
    """What is saved as one file, which rank 0 writes: a model and its optimizer, put together parameter by parameter, and other content.

    One rank's float32 states are written from where they are, all others from `DiskCopies`: torch writes a file when all of it is there.

    Args:
        optimizer: the one that trains or has trained the model, if any.
        weights: the module's state dict, as hooks have left it.
        content: what the file has, from the attributes as they are in `gathered`.
        handed: the state dict that hooks were given, if there are some.

    Attributes:
        weights: the same dict, and in `gathered`, on rank 0, with whole master weights where the module shows these and an entry is the
            parameter, in its memory. All else is the user's: averaged weights, or what a hook has made of a weight.
        optimizer_state: in `gathered`, on rank 0, the state in torch's layout.
        run_state: there and later the entry of ours, None where there is no optimizer's state.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        optimizer: ZenFlowOptimizer | None,
        weights: dict[str, Any],
        content: "Callable[[FileSource], Mapping[str, Any]]",
        *,
        moments: bool,
        without_frozen: bool,
        handed: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine, self._optimizer, self.weights, self._content = engine, optimizer, weights, content
        self._firsts = further_names(engine.module)
        # A user may have replaced parameters since training ended.
        self._parameters: dict[str, Any] = dict(engine.module.named_parameters())
        self._exact, self._shapes = frozenset[str](), dict[str, torch.Size]()
        # Of the optimizer's states; None is of weights.
        self._keys: list[str | None] = [None]
        if optimizer is not None:
            optimizer.training.flush()
            full_state = optimizer.training.full_state
            self._parameters |= full_state.parameters
            self._exact, self._shapes = frozenset(in_common(full_state.shown())), dict(full_state.shapes)
            self._keys += MOMENTS if moments else ()
        self._places = {_place(p): name for name, p in self._parameters.items() if p.numel() > 0}
        if without_frozen:
            names = {entry: self._name_of(entry) or self._firsts.get(entry, entry) for entry in weights}
            for entry, name in names.items():
                if name in self._parameters and not self._parameters[name].requires_grad:
                    del weights[entry]
        self._refuse_changed_pieces(handed or {})
        # On rank 0, by key and name: whole states.
        self._whole: dict[str | None, dict[str, Tensor]] = {}
        self.optimizer_state: dict[str, Any] = {}
        self.run_state: dict[str, Any] | None = None

    def _name_of(self, entry: str) -> str | None:
        """Name of the parameter that an entry of the weights is: by its memory, or where it is in pieces by its name."""
        name, shown = self._firsts.get(entry, entry), self.weights[entry]
        if not isinstance(shown, Tensor) or shown.layout is not torch.strided:
            return None
        if shown.numel() == 0 and is_divided(self._parameters.get(name)):
            return name
        return self._places.get(_place(shown))

    def _refuse_changed_pieces(self, handed: Mapping[str, Any]) -> None:
        """Raises MisconfigurationException if an entry shows a piece that nothing tells the parameter of, or that a hook has changed."""
        module = self._engine.module
        if not is_in_pieces(module):
            return
        known = self._parameters.keys() | self._firsts.keys() | dict(module.named_buffers()).keys()
        for entry, shown in self.weights.items():
            is_handed = entry in known and (not handed or shown is handed.get(entry))
            if not is_handed and isinstance(shown, Tensor) and shown.numel() == 0:
                raise MisconfigurationException(
                    f"under stage 3 the entries of the state dict must have the parameters' names and no elements, got {entry!r}, which was"
                    ' renamed or changed: do so after loading, or save folders, `checkpoint_format="deepspeed"`'
                )

    @property
    def _in_pieces(self) -> dict[str, Any]:
        """Parameters of which each rank has a piece, and which the optimizer does not have as the module shows them."""
        if not is_in_pieces(self._engine.module):
            return {}
        wanted = {self._name_of(entry) for entry in self.weights} - self._exact
        return {n: p for n, p in self._parameters.items() if n in wanted and is_divided(p)}

    def reserve(self, disk: DiskCopies) -> None:
        """Takes memory for the whole states, on rank 0, where the arena does not have them; raises OSError if the disk is full."""
        if dist.get_rank() != 0:
            return
        for key in self._keys:
            there = {name: state for name in self._shapes if (state := self._in_arena(name, key)) is not None}
            missing = {name: shape for name, shape in self._shapes.items() if name not in there}
            self._whole[key] = there | parts_on_disk(disk, missing, torch.float32)
        pieces = self._in_pieces
        for dtype in {p.dtype for p in pieces.values()}:
            of_type = {n: p.ds_shape for n, p in pieces.items() if p.dtype == dtype}
            self._whole[None] |= parts_on_disk(disk, of_type, dtype)

    def _in_arena(self, name: str, key: str | None) -> Tensor | None:
        if self._optimizer is None or dist.get_world_size() > 1:
            return None
        return self._optimizer.training.full_state.in_memory(name, key)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which rank 0 has the attributes, behind `reserve`; all ranks enter it together. At its end `weights` is as it was."""
        for key in self._keys:
            for name in self._shapes:
                if self._in_arena(name, key) is None:
                    assert self._optimizer is not None
                    whole = self._optimizer.training.full_state.read(name, key)
                    if self._whole:
                        self._whole[key][name].copy_(whole)
        for name, parameter in (pieces := self._in_pieces).items():
            with GatheredParameters([parameter]):
                if self._whole:
                    self._whole[None][name].copy_(parameter.detach())
        if pieces and self._optimizer is not None:
            # Those that DeepSpeed keeps gathered.
            self._optimizer.gather_weights()
        if self._optimizer is not None and len(self._keys) > 1:
            of_ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(self._optimizer.training.state_dict(), of_ranks)
            self.run_state = {
                "ranks": of_ranks,
                "loss_scaler": dict(vars(self._optimizer.loss_scaler)),
                "clip_grad": self._optimizer.clip_grad,
                "count": int(self._optimizer.training.steps.count),
                "counts": {name: getattr(self._engine, name) for name in COUNTS},
            }
        shown = dict(self.weights)
        try:
            if self._whole:
                self._fill()
            yield
        finally:
            self.weights.update(shown)
            self.optimizer_state = {}

    def _fill(self) -> None:
        masters = self._whole[None]
        for entry in self.weights:
            name = self._name_of(entry)
            # What is in pieces has been gathered where it is not exact.
            if name is not None and (name in self._exact or is_divided(self._parameters[name])):
                self.weights[entry] = masters[name]
        if len(self._keys) == 1:
            return
        assert self._optimizer is not None and self.run_state is not None
        order = self._optimizer.training.order
        numbers = {name: i for i, name in enumerate(n for of_group in order for n in of_group)}
        counts = self.run_state["ranks"][0]["counts"]
        self.optimizer_state = {
            "state": {
                numbers[name]: {
                    "step": torch.tensor(float(counts[name]), dtype=torch.float32, device="cpu"),
                    **{key: self._whole[key][name] for key in MOMENTS},
                }
                for name in sorted(self._shapes, key=numbers.__getitem__)
            },
            "param_groups": [
                {**group, "params": [numbers[name] for name in names]}
                for group, names in zip(self._optimizer.optimizer.param_groups, order, strict=True)
            ],
        }

    def files(self, place: Any) -> list[FileContent]:
        """As of `FolderSource.files`: this rank's, in `gathered`."""
        if dist.get_rank() != 0:
            return []
        ours = {} if self.run_state is None else {FILE_KEY: self.run_state}
        return [FileContent({**self._content(self), **ours}, place)]


class SavedFile:
    """A checkpoint that is one file, of this package or of another strategy: its path, and the content that was read of it, without the
    entry of ours; weights and states may be mapped. What is missing, or no state of AdamW for the parameters, raises CheckpointError.
    """

    def __init__(self, path: Path | str, content: Any) -> None:
        self.path = path
        if not isinstance(content, dict):
            raise refusal(path, f"the file must be a checkpoint of Lightning, got a {type(content).__name__}")
        self.content: dict[str, Any] = dict(content)
        self._run_state = self.content.pop(FILE_KEY, None)

    def entry(self, name: str) -> Any:
        """An entry of the content, which must be there."""
        if name not in self.content:
            raise refusal(self.path, f"the file must have an entry {name!r}, got {', '.join(map(str, self.content))}")
        return self.content[name]

    @property
    def optimizer_state(self) -> Mapping[str, Any]:
        """State dict of the one optimizer in a file of the Trainer."""
        states: Sequence[Mapping[str, Any]] = self.entry("optimizer_states")
        if len(states) != 1:
            raise refusal(self.path, f"the file must have the state of one optimizer, got {len(states)}")
        return states[0]

    def unmap_others(self, mapped: Sequence[str]) -> None:
        """Copies what is in the content, but for the entries `mapped`, so that who keeps it does not hold the file."""
        self.content = {k: v if k in mapped else copy.deepcopy(v) for k, v in self.content.items()}

    def masters(self, optimizer: ZenFlowOptimizer, weights: Mapping[str, Any]) -> dict[str, Tensor]:
        """Master weights by name, when the module has loaded `weights`: the file's where it shows these, otherwise its own."""
        masters = dict[str, Tensor]()
        for name, p in optimizer.training.full_state.parameters.items():
            # None where the module's `load_state_dict` renames the entry, or is not strict.
            weight = weights.get(name)
            # `load_whole` has compared the shapes of those that are divided.
            if weight is not None and (is_divided(p) or torch.equal(p.detach().cpu(), weight.cpu().to(p.dtype))):
                masters[name] = weight
            elif not is_divided(p):
                masters[name] = p.detach().to("cpu", torch.float32)
        return masters

    def state_for(self, optimizer: ZenFlowOptimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's state for `Training.load`, from a `torch.optim.AdamW.state_dict`."""
        order = optimizer.training.order
        if self._run_state is not None:
            refuse_other_version(self.path, self._run_state["ranks"][0], f", {_WEIGHTS_ONLY}")
        groups, sizes = saved["param_groups"], [len(names) for names in order]
        if (theirs := [len(group["params"]) for group in groups]) != sizes:
            raise refusal(self.path, f"the optimizer must have groups of {theirs} parameters as saved, got {sizes}")
        names = dict(zip((i for g in groups for i in g["params"]), (n for ns in order for n in ns), strict=True))
        shapes, found = optimizer.training.full_state.shapes, {names[i]: of_one for i, of_one in saved["state"].items()}
        for index, group in enumerate(groups):
            # torch's SGD has no betas, and its NAdam and RAdam have neither of the others.
            if "betas" not in group or not {"amsgrad", "bias_correction"} & group.keys():
                raise refusal(
                    self.path,
                    f"parameter group {index} must be one of AdamW or Adam, got the options {', '.join(map(str, group))}: take the weights"
                    f" only, {_WEIGHTS_ONLY}",
                )
            for option, required in REQUIRED_OPTIONS.items():
                if bool(group.get(option, required)) != required:
                    raise refusal(
                        self.path, f"parameter group {index}: {option} must be {required}, got {group[option]!r}"
                    )
        # None of a parameter that has never had a gradient.
        states = {name: found[name] for name in shapes if name in found}
        for name, of_one in states.items():
            got = {key: list(of_one[key].shape) for key in MOMENTS if key in of_one}
            if got != {key: list(shapes[name]) for key in MOMENTS}:
                must = f"the state of AdamW or Adam for {list(shapes[name])}"
                raise refusal(self.path, f"{name} must have {must}, got moments of {got}")
        counts = {name: int(states[name]["step"]) if name in states else 0 for name in shapes}
        # A file of another strategy has none.
        of_ranks = [None] if self._run_state is None else self._run_state["ranks"]
        ours = of_ranks[dist.get_rank() if len(of_ranks) == dist.get_world_size() else 0]
        return {
            "count": max([(self._run_state or {}).get("count", 0), *counts.values()]),
            "counts": counts,
            "groups": groups,
            "moments": {key: {name: of_one[key] for name, of_one in states.items()} for key in MOMENTS},
            CHECKPOINT_KEY: copy.deepcopy(ours),
        }

    def restore_engine(self, engine: DeepSpeedEngine) -> None:
        """Restores what DeepSpeed's engine and its optimizer count, and the loss scale."""
        if self._run_state is None:
            return
        restore_counts(engine, self._run_state["counts"])
        engine.optimizer.clip_grad = self._run_state["clip_grad"]
        scaler, saved = vars(engine.optimizer.loss_scaler), self._run_state["loss_scaler"]
        # One that is fixed is that of the configuration.
        if scaler["dynamic"] and saved["dynamic"]:
            scaler.update(saved)


def restore_counts(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restores the counters of an engine that were saved."""
    for name in saved.keys() & set(COUNTS):
        setattr(engine, name, saved[name])


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
