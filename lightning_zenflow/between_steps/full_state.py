"""Weights, moments and gradients of single parameters on all ranks, for `deepspeed.utils.safe_get_full_*` and the like, and for saves."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zenflow.core.partition import Slice
from lightning_zenflow.core.saved_tensors import with_own_storage
from lightning_zenflow.core.step_inputs import add_over_ranks
from lightning_zenflow.offload.build import RankPart
from lightning_zenflow.offload.run_state import StepParts
from lightning_zenflow.offload.step import ZenFlowStep
from lightning_zenflow.worker.moments import Moment


class FullState:
    """Reads and writes the state of one parameter on all ranks, in the arena (`states` are `HostState.states`), which `flush` makes exact.
    Methods are collective where they do not say otherwise.
    """

    def __init__(
        self,
        step: ZenFlowStep,
        parts: StepParts,
        states: Mapping[str | None, Moment],
        part: RankPart,
        *,
        flush: Callable[[], None],
    ) -> None:
        self._step, self._parts, self._states = step, parts, states
        self._piece_of, self._flush = part.piece_of, flush
        self.parameters: dict[str, Any] = part.parameters
        self.names, self.shapes = {p: name for name, p in self.parameters.items()}, part.shapes
        # A DTensor's shard is a whole here: torch's own operations exchange them.
        self._group = None if isinstance(next(iter(self.parameters.values())), DTensor) else part.group
        in_order = list(self.parameters)
        self._slices = {in_order[s.parameter]: (index, s) for index, s in enumerate(parts.rank.partition.slices)}

    def read(self, name: str, optim_state_key: str | None = None) -> Tensor:
        """Exact state of a parameter after the last step, [*shape of the parameter] float32, on its device; waits for pending updates.
        RuntimeError between the last backward pass of a step and the step, and as of `flush`. The weight, or by `optim_state_key` a moment.
        """
        state = self._exact(name, optim_state_key)
        return self._whole(name, lambda _, s: state.read(s.begin, s.numel))

    def in_memory(self, name: str, optim_state_key: str | None = None) -> Tensor | None:
        """What `read` gives, without a copy, where this rank has all of it in float32: [*shape of the parameter] on the CPU, in the arena's
        memory, exact until the next step; otherwise None. No collective.
        """
        state, shape = self._states[optim_state_key], self.shapes[name]
        if name not in self._slices or state.array.dtype != torch.float32:
            return None
        _, s = self._slices[name]
        part = state.array.narrow(0, s.begin, s.numel)
        return with_own_storage(part.view(shape)) if s.numel == shape.numel() else None

    def write(self, name: str, value: Tensor, optim_state_key: str | None = None) -> None:
        """Replaces the state of a parameter by `value`, of its shape and any type; otherwise as `read`. The model shows a weight with the
        next publish of its blocks, at most S + d steps later.
        """
        state = self._exact(name, optim_state_key)
        if value.shape != (shape := self.shapes[name]):
            raise ValueError(f"the new value of {name} must have the shape {list(shape)}, got {list(value.shape)}")
        if name in self._slices:
            _, s = self._slices[name]
            state.write(s.begin, value.detach().reshape(-1).narrow(0, s.start, s.numel))
        self._parts.moves.is_written = True

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that a step will use. No collective."""
        return self._step.micro_batches > 0 and not self._step.was_interrupted

    def gradient(self, name: str) -> Tensor:
        """Gradient of the step so far, averaged over the ranks; before clipping, times the loss scale. Waits for the device. [*shape of the
        parameter] float32, on its device; zero where the step did not use the parameter.
        """
        if not self.has_gradients:
            raise ValueError(
                f"safe_get_full_grad({name}): gradients are there after a backward pass of a step and before the step: call it in"
                " `on_before_optimizer_step`"
            )
        return self._whole(name, lambda index, _: self._parts.fill.gradient(index))

    def gradient_norms(self) -> dict[str, Tensor]:
        """Norms of all `gradient`s by name: 0-D float32, on the device. Waits for nothing where gradients were measured at arrival."""
        device, fill = self._parts.rank.device, self._parts.fill
        squares = dict.fromkeys(self.names.values(), torch.zeros((), dtype=torch.float64, device=device))
        squares |= {name: fill.squared_norm(index) for name, (index, _) in self._slices.items()}
        of_all = torch.stack(list(squares.values()))
        add_over_ranks(of_all, self._group)
        return dict(zip(squares, of_all.sqrt().float(), strict=True))

    def refuse_gradient(self, name: str, value: Tensor) -> None:
        """Raises RuntimeError, which says where gradients can be changed."""
        raise RuntimeError(
            f"safe_set_full_grad({name}): gradients are taken in backward: change them there, `parameter.register_hook(lambda g: ...)`"
        )

    def shown(self) -> list[str]:
        """Names of the parameters that show, right after a flush, this rank's part of the master weights. No collective."""
        others = set[str]()
        for name, (_, s) in self._slices.items():
            p = self.parameters[name]
            weights = p if self._piece_of is None else self._piece_of(p)
            begin = s.start if weights is p else 0
            part = weights.detach().reshape(-1)[begin : begin + s.numel].cpu()
            if not torch.equal(part, self._states[None].read(s.begin, s.numel).to(part.dtype)):
                others.add(name)
        return [name for name in self.parameters if name not in others]

    def _exact(self, name: str, key: str | None) -> Moment:
        """A state by its key, exact."""
        # The same on every rank. A flush would drop the step's gradients.
        if self._step.is_complete:
            raise RuntimeError(
                f"safe_get_full_*, safe_set_full_* of {name}: the gradients of a step are there and have not been applied; call it between"
                " steps, as in the Trainer's `on_train_batch_start` or `on_train_batch_end`"
            )
        self._flush()
        if key not in self._states:
            raise ValueError(f"optim_state_key must be 'exp_avg' or 'exp_avg_sq', got {key!r}")
        return self._states[key]

    def _whole(self, name: str, part: Callable[[int, Slice], Tensor]) -> Tensor:
        """Adds what the ranks hold of a parameter."""
        shape, rank = self.shapes[name], self._parts.rank
        # NCCL takes the rank's device only, which the parameter has left when training has ended.
        flat = torch.zeros(shape.numel(), dtype=torch.float32, device=rank.device)
        if name in self._slices:
            index, s = self._slices[name]
            flat.narrow(0, s.start, s.numel).copy_(part(index, s))
        add_over_ranks(flat, self._group)
        return flat.view(shape).to(self.parameters[name].device)
