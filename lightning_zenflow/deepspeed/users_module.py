"""The user's module: its parameters as stage 3 divides them; loaded; after training as it was before, with whole weights in memory of its
own; and pickled and copied in training as without DeepSpeed.

Private names of DeepSpeed's that are removed: `_OF_MODULES`, `_OF_PARAMETERS`, what begins with `ds_` on parameters, and hooks.
Those of a divided parameter: `ds_shape` (of the whole), `ds_tensor` (this rank's piece, flat, with padding), `ds_process_group` (of the
ranks that share it), `partition_numel` (elements of a piece) and `partition`, which drops gathered weights.
"""

import copyreg
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any, TypeGuard
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, InsertPostInitMethodToModuleSubClasses
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module

from lightning_zenflow.core.process import all_agree
from lightning_zenflow.core.saved_tensors import with_own_storage
from lightning_zenflow.worker.machine import free_host_memory

_OF_MODULES = (
    *("_external_params", "_original_parameters", "all_parameters", "applied_pre_backward_ref_cnt"),
    *("ds_external_parameters", "ds_grads_remaining", "ds_id", "ds_inflight_param_registry", "ds_recompute_parameters"),
    *("post_bwd_fn", "pre_bwd_fn"),
)
"""Under stage 3. Not by their prefix: a user's dataset may be in `ds_train`."""

_OF_PARAMETERS = {
    # Stage 1 and 2.
    *("_dp_group", "_hp_grad", "_hp_mapping", "_index_in_param_group", "_zero_optimizer", "cpu_data", "grad_accum"),
    *("get_full_hp_grad", "get_full_hp_param", "load_hp_checkpoint_state", "param_idx_in_group"),
    *("set_full_hp_grad", "set_full_hp_param"),
    # Stage 3.
    *("_ds_z3_eager_fallback_owner", "_ds_z3_gathered_param_context_depth", "_z3_optimizer", "aligned_size"),
    *("all_gather", "all_gather_coalesced", "convert_to_zero_parameters", "is_external_param", "item"),
    *("nvme_swapper", "padding_size", "partition", "partition_gradients", "partition_numel"),
    "reduce_gradients_at_owner",
}

_LEAF = "_z3_leaf"
"""Flag that a module is gathered as one: users set it, and DeepSpeed by its configuration."""

_users_leaves: "WeakSet[Module]" = WeakSet()

in_pieces: "WeakSet[Any]" = WeakSet()
"""Optimizers of stage 3, of trainings that go on."""

Released = Mapping[Any, dict[str, Any]]
"""Attributes that DeepSpeed's code for saving reads, by the parameter that they were taken from."""


def is_divided(parameter: Any) -> bool:
    """Whether stage 3 has divided a parameter."""
    return hasattr(parameter, "ds_tensor")


def is_in_pieces(module: Module) -> bool:
    """Whether stage 3 has divided the module's parameters."""
    return any(map(is_divided, module.parameters()))


def whole_shape(parameter: Tensor) -> torch.Size:
    """Shape of a parameter, also of one of which this rank has a piece only."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def further_names(module: Module) -> dict[str, str]:
    """Further names of the parameters that have several, each with the first."""
    firsts: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first for name, p in named if (first := firsts.setdefault(id(p), name)) != name}


def piece_of(whole: Tensor, parameter: Any) -> Tensor:
    """This rank's piece of a parameter, [elements of a piece]: a part of `whole`, or a copy with zeros as padding."""
    numel, flat = parameter.partition_numel(), whole.reshape(-1)
    begin = min(dist.get_rank(group=parameter.ds_process_group) * numel, flat.numel())
    part = flat[begin : begin + numel]
    return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])


@torch.no_grad()
def load_pieces(module: Module, states: Mapping[str, Any], pieces: Mapping[str, Tensor], *, strict: bool) -> None:
    """`Module.load_state_dict` of a divided module; drops what is gathered. Of parameters `states` has names, `pieces` this rank's."""
    parameters: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    # A parameter is loaded from itself: torch compares the names.
    module.load_state_dict({name: parameters.get(name, value) for name, value in states.items()}, strict=strict)
    for name, piece in pieces.items():
        parameters[name].partition()
        parameters[name].ds_tensor.copy_(piece)


def load_whole(module: Module, states: Mapping[str, Any], *, strict: bool) -> None:
    """`Module.load_state_dict`, also of a divided module, of which each rank takes its pieces."""
    if not is_in_pieces(module):
        module.load_state_dict(states, strict=strict)
        return
    parameters: dict[str, Any] = {name: p for name, p in module.named_parameters() if name in states}
    for name, p in parameters.items():
        if tuple(states[name].shape) != tuple(p.ds_shape):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: size mismatch for {name}: the shape must be"
                f" {list(p.ds_shape)}, got {list(states[name].shape)}"
            )
    pieces = {name: piece_of(states[name], p) for name, p in parameters.items()}
    load_pieces(module, states, pieces, strict=strict)


def note_users_flags(module: Module) -> None:
    """Notes what is the user's own of a module, before DeepSpeed sets it up."""
    _users_leaves.update(m for m in module.modules() if _LEAF in vars(m))


@torch.no_grad()
def make_whole(model: Module, *, ranks_on_host: int, together: bool) -> None:
    """Makes the weights whole that stage 3 has divided, one parameter after the other: of one rank where they are, views of its pieces; of
    several in host memory, if that has room for those of all ranks and all call it `together`; else they stay divided. `release` follows.
    """
    divided: list[Any] = [p for p in model.parameters() if is_divided(p)]
    # An exception in DeepSpeed's construction, which moves the pieces, may lose them.
    if not divided or any(p.ds_tensor is None or p.ds_tensor.numel() < p.partition_numel() for p in divided):
        return
    if dist.get_world_size() == 1:
        for p in divided:
            p.data = p.ds_tensor.data.narrow(0, 0, p.ds_numel).view(p.ds_shape)
        return
    if not together:
        return
    needed = ranks_on_host * sum(p.ds_numel * p.element_size() for p in divided)
    if not all_agree(needed <= free_host_memory().n_bytes):
        rank_zero_info(
            f"ZenFlow: the ranks' pieces stay as they are, since {needed / 2**30:.2f} GiB for whole weights of all ranks of a host are not"
            " free in its memory; `deepspeed.zero.GatheredParameters` gives whole weights of single layers"
        )
        return
    for p in divided:
        # After a prefetch that no module has used.
        p.ds_active_sub_modules.clear()
        p.partition()
        with GatheredParameters([p]):
            whole = p.data.to("cpu", copy=True)
        p.data = whole
        p.ds_tensor.data = p.ds_tensor.data.new_empty(0)


@torch.no_grad()
def release(model: Module) -> Released:
    """Ends DeepSpeed's engine of a module and removes what it has added to it; parameters in a flat buffer get memory of their own. If a
    weight is in host memory, all of the module moves there. What is divided over ranks stays so. Returns what `as_in_training` needs.
    """
    module: Module = model.module if isinstance(model, DeepSpeedEngine) else model
    parameters: list[Any] = list(module.parameters())
    restore_process()
    modules = set(module.modules())
    # Private: a process-wide list, to which each set-up and each interrupted forward pass adds.
    stack = parameter_offload.FWD_MODULE_STACK
    # One by one: another thread may add to it.
    for entry in [entry for entry in stack if entry in modules]:
        stack.remove(entry)
    if any(is_divided(p) and p.numel() != p.ds_numel for p in parameters):
        return {}
    if isinstance(model, DeepSpeedEngine):
        model.destroy()
    remove_hooks(module)
    for m in modules:
        _remove_attributes(m, vars(m))
    _users_leaves.difference_update(modules)
    released: dict[Any, dict[str, Any]] = {}
    for p in parameters:
        names = _names_on(p)
        if not names:
            continue
        storage = p.untyped_storage()
        if storage.nbytes() != p.numel() * p.element_size() or not storage.resizable():
            p.data = p.data.clone()
        released[p] = {name: vars(p).pop(name) for name in names}
        if (piece := released[p].get("ds_tensor")) is not None:
            piece.data = piece.data.new_empty(0)
    if any(p.device == torch.device("cpu") for p in parameters):
        # The weights may be larger than the device's memory, so the buffers come to them.
        module.cpu()
    return released


@contextmanager
def as_in_training(released: Released) -> Iterator[None]:
    """Context in which released parameters are as DeepSpeed's engine saves them; under stage 3 divided, without memory of their own."""
    whole: list[tuple[Any, Tensor]] = []
    try:
        for p, attributes in released.items():
            whole.append((p, p.data))
            p.__dict__.update(attributes)
            if is_divided(p):
                p.ds_tensor.data = piece_of(p.data, p)
                p.data = p.data.new_empty(0)
        yield
    finally:
        for p, data in whole:
            if is_divided(p):
                p.ds_tensor.data = data.new_empty(0)
                p.data = data
            for name in _names_on(p):
                delattr(p, name)


def restore_process() -> None:
    """Undoes what DeepSpeed's stage 3 does to the process, when no training needs it."""
    # Private: DeepSpeed replaces torch's function by one that keeps less memory, for ever, and notes the one before in its first set-up.
    noted = InsertPostInitMethodToModuleSubClasses
    if not in_pieces and hasattr(noted, "linear_bk"):
        if torch.nn.functional.linear is zero3_linear_wrap:
            torch.nn.functional.linear = noted.linear_bk
        del noted.linear_bk
    # Private: a method with a cache without a bound, in a decorator; its keys refer to coordinators, and so to whole trainings.
    decorated = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(decorated).nonlocals["func"].cache_clear()


def _names_on(parameter: Tensor) -> list[str]:
    return [name for name in vars(parameter) if name in _OF_PARAMETERS or name.startswith("ds_")]


def _remove_attributes(module: Module, attributes: dict[str, Any]) -> None:
    """Removes DeepSpeed's attributes from those of a module: all by their names, or a copy of them."""
    if isinstance(attributes["_parameters"], ZeROOrderedDict):
        own = dict(attributes["_parameters"].items())
        for name in _OF_MODULES:
            attributes.pop(name, None)
        attributes["_parameters"] = own
    if module not in _users_leaves:
        attributes.pop(_LEAF, None)
    # Lightning's detour through the engine leaves the class' method on the object.
    if getattr(attributes.get("forward"), "__func__", None) is type(module).forward:
        del attributes["forward"]


def remove_hooks(module: Module) -> None:
    """Removes DeepSpeed's hooks and ours from modules and parameters."""
    for m in module.modules():
        _remove_hooks_in(vars(m))
    # Private: torch's, where DeepSpeed waits for gradients.
    name = "_post_accumulate_grad_hooks"
    for p in module.parameters():
        _remove_hooks_in({name: getattr(p, name, None)})


def _remove_hooks_in(attributes: Mapping[str, Any]) -> None:
    """As `_remove_attributes`, of hooks."""
    # Private: torch's dictionaries of hooks and of their kinds, by the hooks' numbers.
    tables = [table for name, table in attributes.items() if "_hooks" in name and isinstance(table, dict)]
    theirs = {
        number
        for table in tables
        for number, hook in table.items()
        if str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0]
        in ("deepspeed", "lightning_zenflow")
    }
    for table in tables:
        for number in theirs:
            table.pop(number, None)


_twins: "WeakValueDictionary[int, Tensor]" = WeakValueDictionary()
"""`_twin` of parameters, by their identity: one that two modules share is pickled once. A pickler keeps them until its end."""

_pickled: list[list[set[Any]]] = []
"""Of each `pickled_as_before`: types, and addresses of storage objects."""


@contextmanager
def pickled_as_before(parts: Iterable[Module | Tensor]) -> Iterator[None]:
    """Context in which Python's `copyreg` has a function for the types of `parts` (`_reduce`): whoever pickles or copies one of them, the
    user's code or a checkpoint with a module among its hyperparameters, gets it without what DeepSpeed has added.

    * A module: without DeepSpeed's hooks and attributes. It has twins of divided parameters.
    * A parameter: a twin, with its own elements and the user's attributes only. Under stage 3 it is whole where the parameter is gathered
      or there is one rank; otherwise RuntimeError.
    * A tensor in a parameter's memory, as in a `state_dict`: with its own elements only, and not those of the flat buffer.

    A type's place in the registry is free again at the end of the last such context, in any order.
    """
    parts = list(parts)
    parameters: list[Any] = [p for p in parts if isinstance(p, Tensor) and _names_on(p)]
    # Private: the address of the storage object, whose memory may change (`Sleep`).
    buffers = {t.untyped_storage()._cdata for p in parameters for t in (p, getattr(p, "ds_tensor", p)) if t.numel()}
    table: dict[type, Any] = copyreg.dispatch_table
    # A list of its own, since sets compare by what is in them.
    this = [{*map(type, parts), Tensor}, buffers]
    # First, so that what the garbage collector ends from here on leaves the entries.
    _pickled.append(this)
    for kind in this[0]:
        if not _is_ours(theirs := table.get(kind)):
            table[kind] = partial(_reduce, theirs)
    try:
        yield
    finally:
        _pickled[:] = [other for other in _pickled if other is not this]
        for kind in this[0].difference(*(kinds for kinds, _ in _pickled)):
            # The user's own if it has come since.
            if _is_ours(entry := table.get(kind)):
                del table[kind]
                if entry.args[0] is not None:
                    table[kind] = entry.args[0]


def _is_ours(entry: Any) -> TypeGuard[partial[Any]]:
    return isinstance(entry, partial) and entry.func is _reduce


def _reduce(theirs: Callable[[Any], Any] | None, part: Module | Tensor) -> Any:
    theirs = theirs or methodcaller("__reduce_ex__", 4)
    if type(part) is Tensor:
        is_ours = part.layout is torch.strided and any(part.untyped_storage()._cdata in of for _, of in _pickled)
        return theirs(with_own_storage(part) if is_ours else part)
    if isinstance(part, Tensor):
        return theirs(_twin(part))
    reduced = theirs(part)
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    # A class may have its own `__getstate__`, but what it leaves of a module's attributes has their names.
    if not isinstance(state, dict) or "_parameters" not in state:
        return reduced
    ours = {k: type(v)(v) if "_hooks" in k and isinstance(v, dict) else v for k, v in state.items()}
    _remove_hooks_in(ours)
    _remove_attributes(part, ours)
    # Not by their own `_reduce`, of which copies make no use.
    ours["_parameters"] = {k: p if p is None or not is_divided(p) else _twin(p) for k, p in ours["_parameters"].items()}
    return (*reduced[:2], ours, *reduced[3:])


def _twin(parameter: Any) -> Any:
    """A parameter of the same elements, without DeepSpeed's attributes; RuntimeError where other ranks have pieces of it."""
    names = _names_on(parameter)
    if not names:
        return parameter
    if (known := _twins.get(id(parameter))) is not None:
        return known
    whole = parameter.data
    if is_divided(parameter) and whole.numel() != parameter.ds_numel:
        if dist.get_world_size(parameter.ds_process_group) > 1:
            raise RuntimeError(
                "a parameter that stage 3 has divided can be pickled or copied where it is whole only: do it on all ranks within"
                " `deepspeed.zero.GatheredParameters(module.parameters())`, or save with `trainer.save_checkpoint`"
            )
        whole = parameter.ds_tensor.data.narrow(0, 0, parameter.ds_numel).view(parameter.ds_shape)
    twin: Any = Tensor._make_subclass(type(parameter), with_own_storage(whole), parameter.requires_grad)
    vars(twin).update({k: v for k, v in vars(parameter).items() if k not in names})
    _twins[id(parameter)] = twin
    return twin
