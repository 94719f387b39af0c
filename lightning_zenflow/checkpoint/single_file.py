"""A checkpoint that is one file, as Lightning's strategies for one device write it: whole weights, and AdamW's state in torch's layout.

Under the Trainer::

    state_dict            float32 master weights of what is trained, by the module's names; buffers and frozen weights in their own type
    optimizer_states      [state_dict of torch.optim.AdamW], the parameters in the order of the user's optimizer
    lightning_zenflow.run_state
                          what else continues the run bit for bit
        ranks             [rank] `ZenFlowStep.state_dict`
        loss_scaler       attributes of DeepSpeed's
        clip_grad         largest gradient norm
        counts            of DeepSpeed's engine
        entries           in the state dict, of parameters whose entries have other names
        masters           by name, where the model is in 16 bits and a hook has made something else of the entry
    ...                   what Lightning saves besides

Under Fabric weights and state have the names that the loop gives them. A file with weights only has the weights only. All of it but the
user's own objects is loaded by ``torch.load(path, weights_only=True)``.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor

from lightning_zenflow.checkpoint.engine_content import restore_counts
from lightning_zenflow.checkpoint.files import refusal, refuse_other_version
from lightning_zenflow.core.distributed import all_agree
from lightning_zenflow.deepspeed.host_state import MOMENTS
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.parameters import is_divided
from lightning_zenflow.deepspeed.users import REQUIRED_OPTIONS

FILE_KEY = "lightning_zenflow.run_state"
"""Entry of ours in a file, beside those of users."""

_WEIGHTS_ONLY = "`model = Module.load_from_checkpoint(path)`"


class SavedFile:
    """A checkpoint that is one file, of this package or of another strategy.

    Args:
        path: the file.
        content: what was read of it.

    Attributes:
        path: the file.
        content: what is in it; weights and optimizer's states may be mapped.

    Raises:
        CheckpointError: it is no checkpoint.
    """

    def __init__(self, path: Path | str, content: Any) -> None:
        self.path = path
        if not isinstance(content, dict):
            raise refusal(path, f"the file must be a checkpoint of Lightning, got a {type(content).__name__}")
        self.content: dict[str, Any] = dict(content)
        self._run_state = self.content.pop(FILE_KEY, None)

    def entry(self, name: str) -> Any:
        """An entry of the content.

        Raises:
            CheckpointError: it is missing.
        """
        if name not in self.content:
            raise refusal(self.path, f"the file must have an entry {name!r}, got {', '.join(map(str, self.content))}")
        return self.content[name]

    @property
    def optimizer_state(self) -> Mapping[str, Any]:
        """State dict of the optimizer, in a file of the Trainer.

        Raises:
            CheckpointError: there is none, or there are several.
        """
        states = self.entry("optimizer_states")
        if len(states) != 1:
            raise refusal(self.path, f"the file must have the state of one optimizer, got {len(states)}")
        state: Mapping[str, Any] = states[0]
        return state

    def unmap_others(self, mapped: Sequence[str]) -> None:
        """Copies what is in the content, but for the entries `mapped`, so that who keeps it does not hold the file."""
        self.content = {k: v if k in mapped else copy.deepcopy(v) for k, v in self.content.items()}

    def masters_for(self, optimizer: ZenFlowOptimizer, weights: Mapping[str, Any]) -> dict[str, Tensor]:
        """The master weights of the optimizer's parameters, by their names, before the module loads its weights (see `as_loaded`).

        Raises:
            CheckpointError: a module in pieces must have the file's, and the file has others.
        """
        run_state = self._run_state or {}
        entries, masters = run_state.get("entries", {}), dict(run_state.get("masters", {}))
        for name, shape in optimizer.full_state.shapes.items():
            # The module's `load_state_dict` or `on_load_checkpoint` renames them.
            weight = weights.get(name, weights.get(entries.get(name, name)))
            if isinstance(weight, Tensor) and weight.shape == shape:
                masters.setdefault(name, weight)
            elif is_divided(optimizer.full_state.parameters[name]):
                found = "none" if weight is None else f"one of {list(weight.shape)}"
                raise refusal(self.path, f"the model must be the saved one: {name} must be {list(shape)}, got {found}")
        return masters

    def state_for(
        self, optimizer: ZenFlowOptimizer, order: Sequence[Sequence[str]], saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        """This rank's argument of `ZenFlowOptimizer.load_full_state`.

        Args:
            optimizer: the one to load.
            order: as of `WholeState`.
            saved: a `torch.optim.AdamW.state_dict`.

        Raises:
            CheckpointError: it is no state of AdamW or Adam for these parameters, or another version of this package wrote it.
        """
        if self._run_state is not None:
            refuse_other_version(self.path, self._run_state["ranks"][0], f", {_WEIGHTS_ONLY}")
        if not {"state", "param_groups"} <= saved.keys():
            raise refusal(self.path, f"the optimizer's state must be one of torch, got {', '.join(map(str, saved))}")
        groups, sizes = saved["param_groups"], [len(names) for names in order]
        if (theirs := [len(group["params"]) for group in groups]) != sizes:
            raise refusal(self.path, f"the optimizer must have groups of {theirs} parameters as saved, got {sizes}")
        names = dict(zip((i for g in groups for i in g["params"]), (n for ns in order for n in ns), strict=True))
        shapes, found = optimizer.full_state.shapes, {names[i]: of_one for i, of_one in saved["state"].items()}
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
        counts: dict[int, str] = {}
        for name, of_one in states.items():
            for key in ("step", *MOMENTS):
                if key not in of_one or (key in MOMENTS and of_one[key].shape != shapes[name]):
                    got = f"one of {list(of_one[key].shape)}" if key in of_one else f"no {key}"
                    must = f"the state of AdamW or Adam for {list(shapes[name])}"
                    raise refusal(self.path, f"{name} must have {must}, got {got}")
            counts.setdefault(int(of_one["step"]), name)
        if len(counts) > 1:
            raise refusal(
                self.path,
                f"all parameters must have been trained for the same number of steps, got {counts}: one was frozen or had no gradient for a"
                f" while, and ZenFlow has one count; take the weights only, {_WEIGHTS_ONLY}",
            )
        return {
            "count": next(iter(counts), 0),
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "moments": {key: {name: of_one[key] for name, of_one in states.items()} for key in MOMENTS},
        }

    def run_state_for(self, optimizer: ZenFlowOptimizer) -> dict[str, Any] | None:
        """This rank's `ZenFlowStep.state_dict`; None in a file of another strategy. A collective."""
        if self._run_state is None:
            return None
        of_ranks, n_ranks = self._run_state["ranks"], dist.get_world_size()
        ours: dict[str, Any] = copy.deepcopy(of_ranks[dist.get_rank() if len(of_ranks) == n_ranks else 0])
        if not all_agree(ours["layout"] == optimizer.zenflow_step.layout):
            # So that all ranks find the difference, where some have the slices of the run that saved.
            ours["layout"]["slices"] = None
        return ours

    def restore_engine(self, engine: DeepSpeedEngine) -> None:
        """Restores what DeepSpeed's engine and its optimizer count, and the loss scale."""
        if self._run_state is None:
            return
        restore_counts(engine, self._run_state["counts"])
        engine.optimizer.clip_grad = self._run_state["clip_grad"]
        scaler, saved = vars(engine.optimizer.loss_scaler), self._run_state["loss_scaler"]
        if scaler.keys() == saved.keys():
            scaler.update(saved)


def as_loaded(masters: Mapping[str, Tensor], optimizer: ZenFlowOptimizer) -> dict[str, Tensor]:
    """The master weights where the module shows them after loading; otherwise those that its loader has made of the file's, or left."""
    loaded = {}
    for name, p in optimizer.full_state.parameters.items():
        master = masters.get(name)
        if is_divided(p) or (master is not None and torch.equal(p.detach().cpu(), master.cpu().to(p.dtype))):
            assert master is not None
            loaded[name] = master
        else:
            loaded[name] = p.detach().to("cpu", torch.float32)
    return loaded
