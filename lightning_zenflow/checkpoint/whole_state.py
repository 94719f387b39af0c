"""`WholeState` puts together the whole weights and moments of all ranks, for a checkpoint that is one file (`single_file`)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor

from lightning_zenflow.checkpoint.engine_content import counts_of, further_names
from lightning_zenflow.core.distributed import in_common
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.flat_buffers import DiskCopies
from lightning_zenflow.deepspeed.host_state import MOMENTS, with_own_storage
from lightning_zenflow.deepspeed.optimizer import ZenFlowOptimizer
from lightning_zenflow.deepspeed.parameters import is_divided, is_in_pieces


class WholeState:
    """The state of a model and its optimizer that rank 0 writes to a file. All ranks put together one parameter at a time.

    One rank's float32 states are written from where they are. All others are copied to files without a name beside the checkpoint, since
    torch writes a file when all of it is there.

    Args:
        engine: DeepSpeed's, of the model.
        optimizer: the one that trains or has trained the model, if any.
        order: names of the parameters of each group of the user's optimizer.
        weights: the module's state dict, as hooks have left it.
        moments: whether the optimizer's state is saved.
        handed: the state dict that hooks were given; empty where there are none.
        without_frozen: whether weights are left out that are not trained at present.

    Attributes:
        weights: the same dict, and in `saved_as`, on rank 0, with whole master weights where the module shows these
            and an entry is what the module shows. All else is the user's: averaged weights, or what a hook has made of a weight.
        optimizer_state: there the state in torch's layout.
        run_state: there and later the entry of ours, None where there is no optimizer's state.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        optimizer: ZenFlowOptimizer | None,
        order: Sequence[Sequence[str]],
        weights: dict[str, Any],
        *,
        moments: bool,
        without_frozen: bool = False,
        handed: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine, self._optimizer, self._order = engine, optimizer, order
        self._firsts = further_names(engine.module)
        named: Any = engine.module.named_parameters()
        trained = {} if optimizer is None else optimizer.full_state.parameters
        # A user may have replaced parameters since training ended.
        self._parameters: dict[str, Any] = {**dict(named), **trained}
        self._places = {_place(p): name for name, p in self._parameters.items() if p.numel() > 0}
        self.weights = weights
        if without_frozen:
            of_entry: dict[str, Any] = {e: self._parameters.get(self._name_of(e)) for e in weights}
            for entry in [e for e, p in of_entry.items() if p is not None and not p.requires_grad]:
                del weights[entry]
        self._refuse_changed_pieces(handed or {})
        self._shapes = {} if optimizer is None else optimizer.full_state.shapes
        if optimizer is not None:
            optimizer.flush()
        self._exact = frozenset(() if optimizer is None else in_common(optimizer.full_state.shown()))
        self._keys: list[str | None] = [None, *(MOMENTS if moments and self._optimizer is not None else ())]
        self.optimizer_state: dict[str, Any] = {}
        self.run_state: dict[str, Any] | None = None

    def _name_of(self, entry: str) -> str:
        """Name of the parameter that an entry of the weights shows, which the module's `state_dict` or a hook may have renamed."""
        name, shown = self._firsts.get(entry, entry), self.weights[entry]
        if name in self._parameters or not isinstance(shown, Tensor):
            return name
        return self._places.get(_place(shown), name)

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
                    "under stage 3 the entries of the module's state dict must have the parameters' names and be as they are, without"
                    f" elements, got {entry!r}, which was renamed or changed: do so after loading, or save folders,"
                    ' `checkpoint_format="deepspeed"`'
                )

    @property
    def _in_pieces(self) -> dict[str, Any]:
        """Parameters of which each rank has a piece, and which the optimizer does not have as the module shows them."""
        if not is_in_pieces(self._engine.module):
            return {}
        wanted = {self._name_of(entry) for entry in self.weights} - self._exact
        return {n: p for n, p in self._parameters.items() if n in wanted and is_divided(p)}

    def copy_for_save(self, disk: DiskCopies) -> dict[str | None, dict[str, Tensor]]:
        """Memory for the whole states, on rank 0: by key and name; key None is of weights. Where the arena has them, they are there.

        Raises:
            OSError: the disk is full.
        """
        if dist.get_rank() != 0:
            return {}
        copies: dict[str | None, dict[str, Tensor]] = {}
        for key in self._keys:
            found = {name: self._in_arena(name, key) for name in self._shapes}
            missing = {name: self._shapes[name] for name, there in found.items() if there is None}
            sizes = [shape.numel() for shape in missing.values()]
            parts = torch.split(disk.zeros(sum(sizes)), sizes)
            for (name, shape), part in zip(missing.items(), parts, strict=True):
                found[name] = with_own_storage(part.view(shape))
            copies[key] = {name: state for name, state in found.items() if state is not None}
        copies[None] |= {n: disk.zeros(p.ds_numel, p.dtype).view(p.ds_shape) for n, p in self._in_pieces.items()}
        return copies

    def _in_arena(self, name: str, key: str | None) -> Tensor | None:
        if dist.get_world_size() > 1:
            return None
        assert self._optimizer is not None
        return self._optimizer.full_state.in_memory(name, key)

    @contextmanager
    def saved_as(self, copies: dict[str | None, dict[str, Tensor]]) -> Iterator[None]:
        """Context in which rank 0 writes the attributes; all ranks enter it together, and put the states together. At its end
        `weights` is as it was.

        Args:
            copies: result of `copy_for_save`.
        """
        for key in self._keys:
            for name in self._shapes:
                if self._in_arena(name, key) is None:
                    assert self._optimizer is not None
                    whole = self._optimizer.full_state.read(name, key)
                    if copies:
                        copies[key][name].copy_(whole)
        self._gather(copies.get(None, {}))
        if len(self._keys) > 1:
            self._add_run_state()
        shown = dict(self.weights)
        try:
            if copies:
                self._fill(copies)
            yield
        finally:
            self.weights.update(shown)
            self.optimizer_state = {}

    @torch.no_grad()
    def _gather(self, weights: Mapping[str, Tensor]) -> None:
        """Puts together the parameters of `_in_pieces`; those that DeepSpeed keeps gathered are gathered again afterwards."""
        pieces = self._in_pieces
        if not pieces:
            return
        for name, parameter in pieces.items():
            with GatheredParameters([parameter]):
                if name in weights:
                    weights[name].copy_(parameter)
        if self._optimizer is not None:
            with self._optimizer.saved_as(None):
                pass

    def _add_run_state(self) -> None:
        optimizer, engine = self._optimizer, self._engine
        assert optimizer is not None
        of_ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(optimizer.zenflow_step.state_dict(), of_ranks)
        self.run_state = {
            "ranks": of_ranks,
            "loss_scaler": dict(vars(optimizer.loss_scaler)),
            "clip_grad": optimizer.clip_grad,
            "counts": counts_of(engine),
        }

    def _fill(self, copies: Mapping[str | None, Mapping[str, Tensor]]) -> None:
        masters, entries = copies[None], dict[str, str]()
        for entry, shown in self.weights.items():
            name = self._name_of(entry)
            if name in masters and self._is_as_shown(name, shown):
                self.weights[entry] = masters[name]
                entries.setdefault(name, entry)
        if len(self._keys) == 1:
            return
        assert self._optimizer is not None and self.run_state is not None
        self.run_state["entries"] = {name: entry for name, entry in entries.items() if entry != name}
        # Of which hooks have made something else. A float32 weight that is loaded from that is the master.
        rounded = [n for n in self._exact - entries.keys() if self._parameters[n].dtype != torch.float32]
        self.run_state["masters"] = {name: masters[name] for name in sorted(rounded)}
        numbers = {name: i for i, name in enumerate(n for of_group in self._order for n in of_group)}
        step = torch.tensor(float(self._optimizer.zenflow_step.count), dtype=torch.float32, device="cpu")
        self.optimizer_state = {
            "state": {
                numbers[name]: {"step": step.clone(), **{key: copies[key][name] for key in MOMENTS}}
                for name in sorted(self._shapes, key=numbers.__getitem__)
            },
            "param_groups": [
                {**group, "params": [numbers[name] for name in names]}
                for group, names in zip(self._optimizer.optimizer.param_groups, self._order, strict=True)
            ],
        }

    def _is_as_shown(self, name: str, shown: Any) -> bool:
        """True if an entry is the weight that the module shows, by place or values, and that weight is the rounded master weight."""
        p = self._parameters[name]
        if not isinstance(shown, Tensor) or (is_divided(p) and shown.numel() == 0):
            return isinstance(shown, Tensor)
        if name not in self._exact or _layout(shown) != _layout(p):
            return False
        return _place(shown) == _place(p) or torch.equal(shown.detach().to(p.device), p.detach())


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), *_layout(tensor)
