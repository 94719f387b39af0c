"""The training of an `OffloadAdamW`: what is around a `Training`, between the hooks of parameters and the step."""

import math
import os
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import runtime_of
from lightning_zenflow.core.errors import Calls, MisconfigurationException, unused
from lightning_zenflow.core.process import raising_together, world_size
from lightning_zenflow.core.shards import as_shard, local_part
from lightning_zenflow.core.step_inputs import GroupHyperparameters, read_hyperparameters
from lightning_zenflow.offload.build import Engine, rank_resources
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY, MOMENTS
from lightning_zenflow.optimizer.last_pass import LastPass
from lightning_zenflow.optimizer.parameters import TrainedParameter, rank_part, refuse_unsupported, trained_parameters
from lightning_zenflow.step_meter import StepMeter
from lightning_zenflow.training import Training

# As Lightning does when it is imported: messages are those of one rank, which nobody else may have said.
rank_zero_only.rank = getattr(rank_zero_only, "rank", int(os.environ.get("RANK", "0")))  # type: ignore[attr-defined]  # as Lightning

CALLS = Calls(
    front="OffloadAdamW",
    setup="the first backward pass",
    backward="loss.backward()",
    clip="torch.nn.utils.clip_grad_norm_",
    accumulate="call `backward()` several times before `step()`",
    read="between `backward()` and `step()`",
    write="between `step()` and the next forward pass",
)


class OptimizerEngine(Engine):
    """The training of an `OffloadAdamW`, from its first gradient on. It does not hold the optimizer, which ends it. Weights are where FSDP2
    looks for them, and have no other streams or places.
    """

    loss_scale = 1.0

    def __init__(self, optimizer: Optimizer, config: ZenFlowConfig, signs: LastPass) -> None:
        self._optimizer, self._signs = weakref.ref(optimizer), signs
        self._trained, frozen = trained_parameters(optimizer.param_groups)
        is_divided = any(isinstance(of.parameter, DTensor) for of in self._trained)
        with raising_together(MisconfigurationException) if is_divided else nullcontext():
            refuse_unsupported(self._trained)
        part = rank_part(self._trained)
        self._runtime = runtime_of(part.device)
        self._stream = self._runtime.current_stream()
        resources = rank_resources(config, part.device, ranks_on_host=None, world_size=world_size(), timeout=None)
        self.training = Training(config, resources, CALLS, frozen)
        if config.predicts_clipping:
            self.training.max_norm = math.inf
        self.training.start(part, self)
        self._gradients = self.training.gradients
        self.meter = StepMeter(self.training.parts, config)
        self._task = -1

    def arrived(self, parameter: Tensor) -> None:
        """Takes the gradient of a parameter, in its hook in backward."""
        gradient = parameter.grad
        if self._gradients.stands_in(parameter) or gradient is None:
            return  # autograd, or FSDP2, has added to it
        if gradient.requires_grad:
            raise MisconfigurationException("OffloadAdamW: `backward` must be called without create_graph=True")
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]  # a DTensor too
            raise MisconfigurationException(
                f"OffloadAdamW: gradients must be divided as their parameters, got {gradient.placements}"
            )
        parameter.grad = None
        if parameter in self.training.slice_of:
            self.add_gradient(parameter, local_part(gradient))
            self._gradients.put(parameter)
        else:
            # An empty shard is in collectives over gradients, such as norms; FSDP2's own keeps the memory of all gradients beside it.
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)

    @override
    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Receives a gradient of a parameter of which this rank has a part, its first one of a step or a further one."""
        # Private: as `torch.utils.checkpoint`, which tells one backward pass from another by it.
        task = torch._C._current_graph_task_id()
        self._follow_stream()
        if not self.training.in_backward:
            self._begin_backward(task)
        elif task != self._task:
            raise MisconfigurationException(
                "OffloadAdamW: a backward pass must not run inside of another one, nor behind one that an exception has interrupted: use"
                " `checkpoint(use_reentrant=False)`, or call `optimizer.zero_grad()` behind the exception"
            )
        self._gradients.change()
        # Its memory may be of another stream, and is freed behind this call.
        self._runtime.keep_for(self._stream, gradient)
        index, is_last = self.training.slice_of[parameter], self.training.steps.is_complete
        self.training.receive(index, gradient.detach().reshape(-1), last=is_last)

    def _begin_backward(self, task: int) -> None:
        steps = self.training.steps
        if steps.is_complete:
            raise MisconfigurationException(
                "OffloadAdamW: a backward pass must not come behind the last one of its step, whose gradients have updated weights: call"
                " `optimizer.zero_grad()` before it; or set accumulation_steps to the number of backward passes of a step; or put those"
                " that are not the last into `with optimizer.accumulate():`"
            )
        self.training.before_backward(last=self._signs.is_last(steps.micro_batches + 1))
        self._task = task
        # Private: what runs behind a backward pass, as of torch's own FSDP and DDP.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._follow_stream()
        self.training.end_backward()

    def _follow_stream(self) -> None:
        """Orders the current stream behind the last one that was worked on: hooks run on autograd's streams, and FSDP2's on its own."""
        current = self._runtime.current_stream()
        if current != self._stream:
            current.wait_stream(self._stream)
            self._stream = current

    def step(self, *, in_closure: bool) -> None:
        """One step."""
        training = self.training
        self._follow_stream()
        training.in_update.end()
        self._refuse_moved()
        n_passes, was_known = training.steps.micro_batches, training.steps.is_complete
        if training.step(asks_finite=False) is None:
            self._refuse_assigned()
            return
        self._signs.end_step(n_passes, in_closure=in_closure, was_known=was_known)
        self.meter.end_step()

    def end(self) -> None:
        """Ends the worker, with a summary; may be called again. A fork's copy of the optimizer ends nothing."""
        if self.training.is_elsewhere:
            return
        try:
            self.meter.sum_up()
        finally:
            self._gradients.clear()
            self.training.end(keep_state=False)

    @override
    def refuse_unused(self) -> None:
        """No collective: FSDP2 reduces a gradient on all ranks or none, those of empty shards too."""
        of_step = zip(self._trained, self.training.steps.trained, strict=True)
        if found := [of.name for of, is_trained in of_step if is_trained and of.parameter.grad is None]:
            raise unused(found)

    def _refuse_assigned(self) -> None:
        """Refuses gradients of no backward pass, but for zeros, with which torch.distributed.checkpoint makes state."""
        for of in self._trained:
            gradient = of.parameter.grad
            if gradient is not None and not self._gradients.stands_in(of.parameter) and local_part(gradient).any():
                raise MisconfigurationException(
                    f"OffloadAdamW: gradients must come from `loss.backward()`, got one that was assigned to `grad` of {of.name}"
                )

    def _refuse_moved(self) -> None:
        for of, weights in zip(self._trained, self.training.parts.rank.weights, strict=True):
            if local_part(of.parameter).data_ptr() != weights.data_ptr():
                raise MisconfigurationException(
                    f"OffloadAdamW: {of.name} must keep its memory from the first backward pass on, got another one: move the model, or"
                    " assign `data`, before it"
                )

    def state(self) -> dict[int, dict[str, Any]]:
        """State by the numbers of the parameters, as `torch.optim.AdamW.state_dict` has it; no collective."""
        steps = self.training.steps
        if steps.is_complete:
            raise RuntimeError(
                "OffloadAdamW: state_dict must be called between steps, got a call between backward and step: call `optimizer.step()`, or"
                " `optimizer.zero_grad()`, before it"
            )
        self.training.flush()
        counts = steps.state_dict()["counts"]
        keys: dict[str, str | None] = {key: key for key in MOMENTS}
        # Weights have fewer bits, or another factor in their last update until a flush, which the model's may have been saved before.
        if self.training.parts.rank.dtype != torch.float32 or self.training.config.predicts_clipping:
            keys["master"] = None
        return {
            of.number: {
                "step": torch.tensor(float(counts[of.name]), dtype=torch.float32, device="cpu"),
                **{key: as_shard(self._state_of(of, which), of.parameter) for key, which in keys.items()},
            }
            for of in self._trained
        }

    def _state_of(self, of: TrainedParameter, key: str | None) -> Tensor:
        """A parameter's moment or, with None, its master weights, of this rank: [*shape of its part] float32 on the CPU."""
        training = self.training
        if (in_memory := training.full_state.in_memory(of.name, key)) is not None:
            return in_memory
        shape = training.full_state.shapes[of.name]
        if (index := training.slice_of.get(of.parameter)) is None:
            return torch.empty(shape, dtype=torch.float32, device="cpu")
        s = training.parts.rank.partition.slices[index]
        return training.host_state.states[key].read(s.begin, s.numel).to(torch.float32, copy=True).view(shape)

    def load(self, indices: list[Any], state: Mapping[Any, Mapping[str, Any]], run_state: Any) -> None:
        """Continues from a state by the numbers of the parameters, which are `indices` in their order, and from `Training.state_dict`."""
        training = self.training
        training.drop_gradients()
        training.flush()
        saved = {of.name: state.get(indices[of.number], {}) for of in self._trained}
        counts = {name: int(values.get("step", 0)) for name, values in saved.items()}
        weights = {of.name: local_part(saved[of.name].get("master", of.parameter.detach())) for of in self._trained}
        moments = {key: {name: local_part(v[key]) for name, v in saved.items() if key in v} for key in MOMENTS}
        run = {"count": max(counts.values()), "counts": counts, "groups": [{}] * len(weights), "moments": moments}
        run[CHECKPOINT_KEY] = run_state
        training.load(weights, run)
        with torch.no_grad():
            for of in self._trained:
                local_part(of.parameter).copy_(weights[of.name])
        training.written.note()

    @override
    def read_groups(self) -> list[GroupHyperparameters]:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer ends the run"
        of_groups = read_hyperparameters(optimizer)
        return [of_groups[of.group] for of in self._trained]

    @override
    def refuse_use(self) -> None:
        if self.training.closed:
            raise MisconfigurationException(
                "OffloadAdamW: a backward pass must not come behind `close()`: make another optimizer, and load this one's `state_dict()`"
            )
