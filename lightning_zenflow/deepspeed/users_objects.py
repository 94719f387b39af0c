"""What the user gives: the optimizer, before, in and after a training; and checks of optimizer, module, Trainer and DeepSpeed's features,
each of which raises `MisconfigurationException` where ZenFlow or DeepSpeed cannot train.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from types import ModuleType
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.utils import z3_leaf_module
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.step_inputs import name_of, place_of, read_hyperparameters
from lightning_zenflow.deepspeed.users_module import is_in_pieces, whole_shape

_SUPPORTED: tuple[type[Optimizer], ...] = (torch.optim.AdamW, torch.optim.Adam, DeepSpeedCPUAdam, FusedAdam)

REQUIRED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "bias_correction": True}
"""Of a parameter group."""

_trained: "WeakSet[Optimizer]" = WeakSet()
"""Those that a training has given back: its moments are in its own arena."""


class UsersOptimizer:
    """The user's optimizer. In training its groups have the module's parameters, and in `as_deepspeeds` DeepSpeed's flat partitions, the
    keys of the state. After training they have the parameters in the user's order again, and there is no state.

    Attributes:
        given: the optimizer.
        optimizer: the same; behind `give_back` another one, with the groups and the state of the training, which saves read.
        params: parameters of the module in each group, frozen ones last.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if optimizer.state or optimizer in _trained:
            rank_zero_warn(
                "ZenFlow: the optimizer's moments and step count start at zero, unless a checkpoint is loaded. It has trained before, and"
                " would continue its own without ZenFlow; make another one to begin anew"
            )
        self.given = self.optimizer = optimizer
        self._order = self._present()
        for group in optimizer.param_groups:
            # DeepSpeed takes the type of the first one for that of the training, and drops frozen ones, such as quantised weights.
            group["params"].sort(key=lambda p: not p.requires_grad)
        self.params = self._present()

    def take(self) -> None:
        """Gives the groups the module's parameters, behind DeepSpeed's set-up, and refuses reads of the state."""
        self._deepspeeds = self._present()
        self._set(self.params)
        self._reading = self.optimizer.register_state_dict_pre_hook(_refuse_reading)

    @contextmanager
    def as_deepspeeds(self) -> Iterator[None]:
        """Context in which the groups have DeepSpeed's flat partitions, the keys of the state, and the state may be read."""
        self._reading.remove()
        self._set(self._deepspeeds)
        try:
            yield
        finally:
            self.take()

    def leave(self) -> None:
        """Ends the training of DeepSpeed's optimizer, which knows nothing of groups that the user has added in it."""
        self._reading.remove()
        del self.optimizer.param_groups[len(self.params) :]

    def give_back(self, *, has_trained: bool) -> None:
        """Gives the user's optimizer back, with a step of it or without."""
        # Groups and state without a step.
        in_saves = Optimizer([dict(group) for group in self.given.param_groups], self.given.defaults)
        in_saves.state = self.given.state
        self._set(self._order)
        self.optimizer = in_saves
        self.given.state = defaultdict(dict)
        if has_trained:
            _trained.add(self.given)

    def _present(self) -> list[list[Tensor]]:
        return [list(group["params"]) for group in self.optimizer.param_groups]

    def _set(self, of_groups: Sequence[Sequence[Tensor]]) -> None:
        for group, params in zip(self.optimizer.param_groups, of_groups, strict=True):
            group["params"] = list(params)


def _refuse_reading(_: Optimizer) -> None:
    raise MisconfigurationException(
        "ZenFlowStrategy: state_dict of the optimizer from configure_optimizers must not be called in training, when the worker has"
        " AdamW's moments: save a checkpoint, or read them with `deepspeed.utils.safe_get_full_optimizer_state`"
    )


def validate_optimizer(optimizer: Optimizer, module: Module) -> None:
    """Accepts exactly the classes whose update ZenFlow implements; subclasses may compute another one."""
    kind = type(optimizer)
    if kind not in _SUPPORTED:
        supported = ", ".join(map(name_of, _SUPPORTED))
        found = f"{kind.__module__}.{kind.__qualname__}"
        raise MisconfigurationException(f"optimizer must be exactly one of {supported}, not a subclass, got {found}")
    known = {id(parameter) for parameter in module.parameters()}
    # Who asks for the shapes of divided parameters gets empty ones, and all parameters in one group.
    divided = (
        "; or choose groups by `p.ds_shape` or by name: stage 3 has divided the parameters, and `p.shape` and `p.ndim` are those of"
        " nothing"
        if is_in_pieces(module)
        else ""
    )
    for index, group in enumerate(optimizer.param_groups):
        for option, required in REQUIRED_OPTIONS.items():
            value = group.get(option, required)
            if bool(value) != required:
                raise MisconfigurationException(
                    f"{place_of(optimizer, index)}{option} must be {required}, got {value!r}"
                )
        params = group["params"]
        if not any(p.requires_grad and whole_shape(p).numel() for p in params):
            raise MisconfigurationException(
                f"{place_of(optimizer, index)}params must be a list with a trainable parameter, got"
                f" {f'{len(params)} frozen or empty ones' if params else 'none'}; leave the group out: DeepSpeed cannot hold one that"
                f" trains nothing at setup{divided}"
            )
        for place, p in enumerate(params):
            # Checkpoints have no name for it.
            if id(p) not in known:
                raise MisconfigurationException(
                    f"{place_of(optimizer, index)}params must be parameters of the module, got one of shape {list(p.shape)} at place"
                    f" {place}; make it an attribute of the module"
                )
    read_hyperparameters(optimizer)


def configured(module: pl.LightningModule, lightning: ModuleType, *, in_config: bool) -> tuple[Optimizer, list[Any]]:
    """The optimizer of `configure_optimizers`, and Lightning's configurations of its schedulers; `in_config`: DeepSpeed's has one."""
    # Private: calls the user's method.
    made = lightning.core.optimizer
    several = "configure_optimizers must return one optimizer, got several (use its groups), or schedulers beside a DeepSpeed config's"
    try:
        optimizers, schedulers = made._init_optimizers_and_lr_schedulers(module)
    except Exception as error:
        if "multiple optimizers" not in str(error):  # in automatic optimization
            raise
        raise MisconfigurationException(several) from error
    optimizer, *others = optimizers
    if others or (len(schedulers) > 1 and in_config):
        raise MisconfigurationException(several)
    if isinstance(optimizer, made._MockOptimizer):  # private: what Lightning puts in the place of None
        raise MisconfigurationException(
            "configure_optimizers must return an optimizer, got None; use `Trainer(strategy='auto')`, or `validate`, `test`, `predict`"
        )
    validate_optimizer(optimizer, module)
    return optimizer, schedulers


def refuse_features(zero_optimizer: Any, of_stage: Mapping[str, bool]) -> None:
    """Refuses features that only DeepSpeed's engine knows of, and those in `of_stage`: by the feature, whether it is present."""
    features = {
        **of_stage,
        "master weights or gradients in half precision": zero_optimizer.master_weights_and_grads_dtype != torch.float32,
        "sequence parallelism": zero_optimizer.sequence_parallel_size > 1,
        "data_types.grad_accum_dtype other than the model's": (
            zero_optimizer.gradient_accumulation_dtype != zero_optimizer.dtype
        ),
    }
    for feature, present in features.items():
        if present:
            raise MisconfigurationException(f"ZenFlowStrategy does not support {feature}; turn it off")


def refuse_unsupported_trainer(trainer: Any, lightning: ModuleType, *, in_pieces: bool) -> None:
    """Refuses callbacks that cannot work with a DeepSpeed optimizer, before they change the model."""
    kinds = lightning.callbacks
    refused = {
        kinds.LearningRateFinder: (
            ", and `Tuner.lr_find` not be called: they put a scheduler of their own on a torch optimizer, which DeepSpeed's is not; find"
            " the learning rate with another strategy and a model that fits, such as Trainer(strategy='auto')"
        ),
        kinds.BaseFinetuning: (
            ": it adds parameter groups in mid-run, and the ranks divide all of them at set-up; give `configure_optimizers` all parameters,"
            " and set their `requires_grad` in `on_train_epoch_start`"
        ),
        kinds.StochasticWeightAveraging: ": it replaces the weights of a torch optimizer; use `WeightAveraging`",
    }
    if in_pieces:
        refused[kinds.WeightAveraging] = (
            " with stage=3: it averages whole weights, and each rank has only its pieces; use stage=2"
        )
    for callback, (kind, reason) in product(trainer.callbacks, refused.items()):
        if isinstance(callback, kind):
            raise MisconfigurationException(f"ZenFlowStrategy: {type(callback).__name__} must be absent{reason}")


def refuse_unsupported_module(module: Module) -> None:
    """Refuses, before set-up, sparse gradients, weights that cannot be converted, and trained parameters whose elements share memory."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name or type(part).__name__}.sparse must be False, got True: gradients must be dense"
            )
    first_at: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        must, found = "be a real tensor of at most 32 bits", ""
        # Lightning's precision plugin for DeepSpeed would convert these without a word.
        if tensor.is_complex():
            found = f"{tensor.dtype}: its imaginary part would be lost; keep it as `torch.view_as_real(...)`"
        elif type(tensor) is torch.nn.Parameter and tensor.dtype == torch.float64:
            found = f"{tensor.dtype}: call `module.float()`"
        # Subclasses may have no memory that can be compared.
        elif type(tensor) is torch.nn.Parameter and tensor.numel() > 0 and not tensor.is_meta:
            other_name, other = first_at.setdefault(tensor.data_ptr(), (name, tensor))
            trained = tensor.requires_grad or other.requires_grad
            must = "have memory for each of its elements, which is no other parameter's"
            if trained and any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
                found = (
                    "an expanded tensor: make the smaller tensor the parameter and expand it in `forward`, or clone it"
                )
            elif trained and other is not tensor:
                found = f"that of {other_name}: to share weights, assign the parameter itself and not its `data`"
        if found:
            raise MisconfigurationException(f"ZenFlowStrategy: {name} must {must}, got {found}")


def refuse_features_of_stage_3(zero_optimizer: Any) -> None:
    """As `refuse_features`, and modules that are compiled in another way than in place."""
    features = {
        # Private: where DeepSpeed's AutoEP puts the parameters of experts. Others have the groups of all ranks.
        "mixture of experts with expert parallelism": any(
            not getattr(p, "allreduce", True) or getattr(p, "ds_zero_placement_family", "replicated") != "replicated"
            for p in chain.from_iterable(zero_optimizer.fp16_groups)
        ),
        "tensor parallelism": zero_optimizer.model_parallel_group is not None,
    }
    refuse_features(zero_optimizer, features)
    for name, part in zero_optimizer.module.named_modules():
        # It passes attributes on to what it wraps, DeepSpeed's records of parameters among them.
        if isinstance(part, OptimizedModule):
            raise MisconfigurationException(
                f"ZenFlowStrategy: {name} must be compiled in place with stage=3, got the result of torch.compile, a module around it that"
                " DeepSpeed does not see through: use `module.compile()`"
            )


def check_inputs_of_leaf_modules(module: Module) -> list[RemovableHandle]:
    """Hooks that refuse inputs of leaf modules (`set_z3_leaf_modules`) with which DeepSpeed would take gradients before they are computed:
    torch calls DeepSpeed's hook for the gradients of the positional arguments at once where none of these needs one.
    """
    leaves = ((name, part) for name, part in module.named_modules() if z3_leaf_module(part))
    return [part.register_forward_pre_hook(partial(_refuse_input_without_gradient, name)) for name, part in leaves]


def _refuse_input_without_gradient(name: str, module: Module, args: tuple[object, ...]) -> None:
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    if trains and not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        raise MisconfigurationException(
            f"ZenFlowStrategy: a positional argument of {name}, a leaf module of ZeRO stage 3, must require a gradient, got none that"
            " does: DeepSpeed takes the gradients of the module's parameters when that of its input is there; call `requires_grad_()` on"
            " the input"
        )
