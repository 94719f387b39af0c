"""Mistakes drawn by hypothesis, in all that a user gives: each must be refused by its name."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from random_training import Mistake, Trained


class Subclass(torch.optim.AdamW):
    """Might compute another update."""


def add(**members: Callable[[], Any]) -> Callable[[Trained], None]:
    """Adds parameters or submodules to the model."""

    def apply(model: Trained) -> None:
        for name, make in members.items():
            setattr(model.net, name, make())
            model.groups[0].extend(p for p in [getattr(model.net, name)] if isinstance(p, nn.Parameter))

    return apply


def share_memory(model: Trained) -> None:
    model.net.alias = nn.Parameter(model.net.base.weight.data)
    model.groups[0].append(model.net.alias)


def optimize_by_hand(model: Trained) -> None:
    model.automatic_optimization = False


def add_complex_buffer(model: Trained) -> None:
    model.net.register_buffer("rotation", torch.ones(2, dtype=torch.complex64))


MODULES: dict[str, tuple[Callable[[Trained], None], str]] = {
    "sparse": (add(words=lambda: nn.Embedding(3, 2, sparse=True)), r"words.sparse must be False, got True"),
    "complex": (
        add(phase=lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64))),
        r"net.phase must be a real tensor",
    ),
    "complex buffer": (add_complex_buffer, r"net.rotation must be a real tensor"),
    "double": (add(wide=lambda: nn.Parameter(torch.ones(2, dtype=torch.float64))), r"net.wide must be .*float64"),
    "lazy": (add(lazy=lambda: nn.LazyLinear(3)), r"net.lazy.weight must be .* uninitialized"),
    "expanded": (
        add(wide=lambda: nn.Parameter(torch.ones(1, 3).expand(4, 3))),
        r"net.wide must have memory for each .* an expanded tensor",
    ),
    "aliased": (share_memory, r"must have memory of its own, got that of net.(alias|base.weight), which is another"),
    "manual": (optimize_by_hand, r"automatic_optimization must be True"),
}

OTHER_OPTIMIZERS = [torch.optim.SGD, torch.optim.RAdam, torch.optim.Adamax, torch.optim.NAdam, Subclass]
NAN, INF = math.nan, math.inf
MISTAKES: dict[str, list[tuple[str, list[Any], str]]] = {
    "keywords": [
        ("stage", [0, 1, 3], r"stage must be 2"),
        ("zero_optimization", [False], r"zero_optimization must be True"),
        ("offload_optimizer", [False], r"offload_optimizer must be True"),
        ("offload_optimizer_device", ["nvme"], r"offload_optimizer_device must be 'cpu'"),
        ("offload_parameters", [True], r"offload_parameters must be False"),
        ("remote_device", ["nvme", "cpu"], r"remote_device must be None"),
        ("load_full_weights", [True], r"load_full_weights must be False"),
        ("contiguous_gradients", [False], r"contiguous_gradients must be True"),
        ("reduce_bucket_size", [-1, "large", 1.5, 0], r"reduce_bucket_size"),
        ("allgather_bucket_size", [-1, "large", 1.5, 0, 3], r"allgather_bucket_size"),
        ("no_such_key", [1], r"unknown key 'no_such_key'"),
        ("topk_rate", [0.1], r"unknown key 'topk_rate' .did you mean 'topk_ratio'"),
    ],
    "deepspeed": [
        ("zero_optimization.stage", [0, 1, 3, "2", True, 2.0], r"zero_optimization.stage must be 2"),
        ("zero_optimization.contiguous_gradients", [False, 1], r"contiguous_gradients must be True"),
        ("zero_optimization.round_robin_gradients", [True], r"round_robin_gradients must be False"),
        ("zero_optimization.elastic_checkpoint", [True], r"elastic_checkpoint must be False"),
        ("zero_optimization.offload_param", [{"device": "cpu"}, {"device": "nvme"}], r"offload_param.device must be"),
        ("zero_optimization.offload_optimizer", [{"device": "nvme"}, {"device": "gpu"}], r"offload_optimizer.device must be"),
        ("zero_optimization.reduce_bucket_size", [-1, "large", 1.5, "auto", 0], r"reduce_bucket_size"),
        ("zero_optimization.allgather_bucket_size", [-1, "large", 1.5, "auto", 0, 3], r"allgather_bucket_size"),
        ("zero_optimization.zenflow", [[1], 3], r"zero_optimization.zenflow must be a mapping"),
        ("zero_optimization", ["auto", 2, []], r"zero_optimization must be a mapping"),
        ("gradient_clipping", [-1, NAN, INF, "1", True], r"gradient_clipping must be"),
        ("gradient_accumulation_steps", [0, -1, 7, 1.5, "x", True], r"gradient_accumulation_steps must be"),
        ("sparse_gradients", [True], r"sparse_gradients must be False"),
        ("fp16.enabled", [True], r"fp16.enabled must be"),
        ("torch_autocast.enabled", [True], r"torch_autocast.enabled must be False"),
        ("data_types.grad_accum_dtype", ["int8", "fp64", "fp16"], r"data_types.grad_accum_dtype must be"),
        ("optimizer", [{"type": "SGD"}, {"type": "Lion", "params": {}}, {}], r"optimizer.type must be"),
        ("optimizer", [{"type": "AdamW", "params": {"amsgrad": True}}], r"optimizer.params.amsgrad must be"),
        ("optimizer", [{"type": "Adam", "params": {"max_grad_norm": 1.0}}], r"optimizer.params.max_grad_norm must be"),
        ("optimizer", [{"type": "Adam", "params": {"momentum": 1.0}}], r"optimizer.params: unknown key 'momentum'"),
        ("optimizer", ["AdamW", 3], r"optimizer must be a mapping"),
        ("prescale_gradients", [True], r"prescale_gradients must be False"),
        ("gradient_predivide_factor", [2.0, 0.5], r"gradient_predivide_factor must be 1.0"),
        ("communication_data_type", ["int8"], r"communication_data_type|int8"),
        ("gradient_cliping", [1.0], r"unknown key 'gradient_cliping' .did you mean 'gradient_clipping'"),
        ("zero_optimisation", [{"stage": 2}], r"unknown key 'zero_optimisation' .did you mean 'zero_optimization'"),
        ("zero_optimization.reduce_bucket_sise", [1], r"reduce_bucket_sise"),
        ("managed_gradient_accumulation", [False], r"managed_gradient_accumulation must be True"),
    ],
    "trainer": [
        ("precision", ["16-true", "16-mixed"], r"precision must be '32-true', 'bf16-true' or 'bf16-mixed'"),
        ("precision", ["64-true", "8-true", "no such"], r"(?i)precision"),
        ("gradient_clip_algorithm", ["value"], r"(?i)clip.*value|gradient_clip_algorithm"),
        ("gradient_clip_val", [-1.0, NAN, -0.5], r"gradient_clip"),
        ("accumulate_grad_batches", [0, -1], r"accumulate_grad_batches"),
        ("accumulate_grad_batches", [1.5], r"accumulate_grad_batches"),
    ],
    "optimizer": [
        ("class", OTHER_OPTIMIZERS, r"optimizer must be exactly one of"),
        ("amsgrad", [True], r"amsgrad must be False"),
        ("maximize", [True], r"maximize must be False"),
        ("differentiable", [True], r"differentiable must be False"),
        ("lr", [-1.0, NAN, INF, "0.1"], r"lr must be|learning rate|between instances of"),
        ("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN)], r"betas|beta parameter"),
        ("eps", [-1.0, NAN, INF], r"eps"),
        ("weight_decay", [-1.0, NAN, INF], r"weight_decay"),
        ("number", [0, 2, 3], r"configure_optimizers must return"),
        ("params", [lambda: [nn.Parameter(torch.ones(2))]], r"params must be parameters of the module"),
        ("params", [lambda: [nn.Parameter(torch.ones(2), requires_grad=False)]], r"params must be"),
    ],
    "module": [(name, [spoil], named) for name, (spoil, named) in MODULES.items()],
}  # fmt: skip


def mistakes(*where: str) -> st.SearchStrategy[Mistake]:
    """One of those in some places; all places where none is named."""
    rows = [(place, *row) for place in where or MISTAKES for row in MISTAKES[place]]
    return st.sampled_from(rows).flatmap(
        lambda row: st.sampled_from(row[2]).map(lambda value: Mistake(row[0], row[1], value, row[3]))
    )
