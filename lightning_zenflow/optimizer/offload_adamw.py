"""AdamW whose state is in host memory, updated behind the backward pass, as an optimizer of torch."""

import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import torch
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_zenflow.between_steps.served_gradients import ServedGradient, ServedGradients
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import Calls, MisconfigurationException
from lightning_zenflow.core.step_inputs import GroupHyperparameters, read_hyperparameters
from lightning_zenflow.offload.build import rank_resources
from lightning_zenflow.offload.host_state import MOMENTS
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY
from lightning_zenflow.optimizer.parameters import rank_part, refuse_unsupported, trained_parameters
from lightning_zenflow.telemetry import Reading
from lightning_zenflow.training import Training

# As Lightning does when it is imported: messages are those of one rank, which nobody else may have said.
rank_zero_only.rank = getattr(rank_zero_only, "rank", int(os.environ.get("RANK", "0")))

CALLS = Calls(
    front="OffloadAdamW",
    setup="the first backward pass",
    backward="loss.backward()",
    clip="torch.nn.utils.clip_grad_norm_",
    accumulate="call `backward()` several times before `step()`",
    read="between `backward()` and `step()`",
    write="between `step()` and the next forward pass",
)

_OF_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Keys of a parameter group of `torch.optim.AdamW`, which reads them where it continues from a `state_dict`."""

_SILENT_STEPS = 50
"""Steps in a row in which nothing hides, before a warning."""


class OffloadAdamW(Optimizer):
    """`torch.optim.AdamW` with its state in host memory (12 bytes a parameter), which a process on the CPU updates while the backward pass
    goes on (ZenFlow, arXiv 2505.12242, with S = 1, d = 0). Each step ends with AdamW's own weights.

    Gradients leave `parameter.grad` as they arrive; what stands there instead can be read, scaled, clipped by torch and accumulated.
    Weights change between the last backward pass and `step`, behind which they are AdamW's. Where no more than one step in three is
    clipped, nearly all of the update hides.

    Args:
        params, lr, betas, eps, weight_decay: as of `torch.optim.AdamW`. Parameters must be of one type and on one device.
        accumulation_steps: backward passes of a step; None: as many as the first step has, or the last one inside of `step(closure)`.
            Steps with fewer are exact, and hide nothing.
        moments_dtype: type of the moments in host memory.
        worker_cores: number of the CPU's cores for updates, or their numbers.
        accumulate_on: where sums over micro-batches are.
        clip_prediction: whether forward passes may see weights with a predicted clip factor.

    Raises:
        ValueError: a value is out of range.
        MisconfigurationException: parameters cannot be trained like this; the message says why.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        accumulation_steps: int | None = None,
        moments_dtype: Literal["float32", "bfloat16", "int8"] = "float32",
        worker_cores: int | tuple[int, ...] | Literal["auto"] = "auto",
        accumulate_on: Literal["auto", "device", "host"] = "auto",
    ) -> None:
        if accumulation_steps is not None and accumulation_steps < 1:
            raise ValueError(f"accumulation_steps must be an integer >= 1 or None, got {accumulation_steps!r}")
        self._config = ZenFlowConfig(
            update_interval=1,
            publish_lag=0,
            clip_prediction=False,
            moments_dtype=moments_dtype,
            worker_cores=worker_cores,
            accumulate_on=accumulate_on,
        )
        self._run: _Run | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **_OF_TORCH})
        read_hyperparameters(self)
        self._signs = _LastPass(accumulation_steps)
        me = weakref.ref(self)

        def arrived(parameter: Tensor) -> None:
            if (optimizer := me()) is not None:
                optimizer._started().arrived(parameter)

        trained = [of.parameter for of in trained_parameters(self.param_groups)[0]]
        weakref.finalize(self, _remove, [p.register_post_accumulate_grad_hook(arrived) for p in trained])
        if any(p.device.type != "cpu" for p in trained):
            self._started()

    def _started(self) -> "_Run":
        """The training, which begins with the first use on a CPU: parameters may be moved to a device before."""
        if self._run is None:
            self._run = _Run(self, self._config, self._signs)
            weakref.finalize(self, self._run.training.end, keep_state=False)
        return self._run

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context of backward passes that are not the step's last."""
        before, self._signs.is_accumulating = self._signs.is_accumulating, True
        try:
            yield
        finally:
            self._signs.is_accumulating = before

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch's is overloaded
        """One step; without a backward pass since the last one, nothing.

        Args:
            closure: computes the loss and its gradients, and returns the loss. Its backward pass is the step's last.

        Raises:
            MisconfigurationException: the step did not use a parameter, or gradients were changed in a way that cannot be followed.
            WorkerError: the worker has ended.
        """
        loss = None
        if closure is not None:
            with self._signs.in_closure(), torch.enable_grad():
                loss = closure()
        if self._run is not None:
            self._run.step(in_closure=closure is not None)
        return loss

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last step, and undoes what has been updated with them; `grad` is None then in any case."""
        if self._run is not None:
            self._run.training.drop_gradients()
        super().zero_grad(set_to_none=True)

    def flush(self) -> None:
        """Waits until the state in host memory is that of all steps so far."""
        if self._run is not None:
            self._run.training.flush()

    @override
    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.AdamW`'s, which can load it, with "master" beside the moments where weights are of fewer than 32 bits: float32
        weights. Tensors are on the CPU and, like torch's, the state itself where that is float32: the next step changes them.

        Raises:
            RuntimeError: between the last backward pass of a step and the step.
        """
        packed = super().state_dict()
        if self._run is not None:
            packed["state"], packed[CHECKPOINT_KEY] = self._run.state(), self._run.training.state_dict()
        return packed

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a `state_dict` of this class or of `torch.optim.AdamW` or Adam, behind the model's `load_state_dict`.

        Raises:
            ValueError: it has other parameter groups.
        """
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved_groups]:
            raise ValueError(
                f"state_dict must have parameter groups of {[len(g['params']) for g in groups]} parameters, got"
                f" {[len(g['params']) for g in saved_groups]}"
            )
        for group, saved in zip(groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        indices = [index for saved in saved_groups for index in saved["params"]]
        self._started().load(indices, state_dict["state"], state_dict.get(CHECKPOINT_KEY))

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, before the first backward pass only."""
        if self._run is not None:
            raise MisconfigurationException(
                "OffloadAdamW: add_param_group must come before the first backward pass, when the state gets its memory: give all"
                " parameters at construction, and set their `requires_grad` between steps"
            )
        super().add_param_group(param_group)

    def read_counters(self) -> Reading | None:
        """Clocks and counters so far, without waiting for the device; None before the state has its memory."""
        return None if self._run is None else self._run.training.parts.read_counters()

    def close(self) -> None:
        """Ends the worker, and frees the state; weights stay."""
        if self._run is not None:
            self._run.training.flush()
            self._run.training.end(keep_state=False)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "OffloadAdamW has a process of its own and cannot be pickled or copied: save its `state_dict()`"
        )


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class _LastPass:
    """Which backward pass of a step is its last, as far as that is known when the pass begins.

    Attributes:
        learned: backward passes of a step; 0: those inside a closure are the last ones; None: not known yet.
        is_accumulating: whether the user has said that the pass is not the last.
    """

    def __init__(self, given: int | None) -> None:
        self.learned = given
        self.is_accumulating = self._is_in_closure = False
        self._n_silent = 0

    @contextmanager
    def in_closure(self) -> Iterator[None]:
        """Context of a step's closure."""
        self._is_in_closure = True
        try:
            yield
        finally:
            self._is_in_closure = False

    def is_last(self, number: int) -> bool:
        """Whether the backward pass that begins, the `number`-th of its step, is the last."""
        if self.is_accumulating:
            return False
        return self._is_in_closure or bool(self.learned and number >= self.learned)

    def end_step(self, n_passes: int, *, in_closure: bool, was_known: bool) -> None:
        """Learns from a step, and warns where nothing hides."""
        if self.learned is None:
            self.learned = 0 if in_closure else n_passes
            return
        self._n_silent = 0 if was_known else self._n_silent + 1
        if self._n_silent == _SILENT_STEPS:
            rank_zero_warn(
                f"OffloadAdamW: in {_SILENT_STEPS} steps no backward pass was known to be the last one of its step, so that no update was"
                f" hidden: set accumulation_steps to the number of backward passes, which is {n_passes} now and was {self.learned} in the"
                " first step"
            )


class _Run:
    """The training of an `OffloadAdamW`, from its first gradient on: the `Engine` of a `Training`, and the source of its gradients.

    It does not hold the optimizer, which ends it.
    """

    loss_scale = 1.0

    def __init__(self, optimizer: Optimizer, config: ZenFlowConfig, signs: _LastPass) -> None:
        self._optimizer, self._signs = weakref.ref(optimizer), signs
        self._trained, frozen = trained_parameters(optimizer.param_groups)
        refuse_unsupported(self._trained)
        part = rank_part(self._trained)
        self._addresses = [w.data_ptr() for w in part.weights]
        self._inner, self._n_groups = part.optimizer, len(self._trained)
        resources = rank_resources(config, part.device, ranks_on_host=1, world_size=1, timeout=None)
        self.training = Training(config, resources, CALLS, frozen)
        self.training.start(part, self, serves=self)
        self._gradients: ServedGradients = self.training.taken
        self._task = -1
        self._knows_last = False

    def arrived(self, parameter: Tensor) -> None:
        """Takes the gradient of a parameter, in its hook in backward."""
        gradient = parameter.grad
        if isinstance(gradient, ServedGradient) or gradient is None:
            return  # autograd has added to it
        if gradient.requires_grad:
            raise MisconfigurationException("OffloadAdamW: `backward` must be called without create_graph=True")
        parameter.grad = None
        if (index := self.training.slice_of.get(parameter)) is not None:
            self.add_gradient(index, gradient)
            self._gradients.put(parameter)

    def add_gradient(self, slice_index: int, gradient: Tensor) -> None:
        """See `GradientSource`."""
        # Private: as `torch.utils.checkpoint`, which tells one backward pass from another by it.
        task = torch._C._current_graph_task_id()
        if task == -1:
            raise self._gradients.error("something other than a backward pass would change it")
        if not self.training.in_backward:
            self._begin_backward(task)
        elif task != self._task:
            raise MisconfigurationException(
                "OffloadAdamW: a backward pass must not run inside of another one, nor behind one that an exception has interrupted: use"
                " `checkpoint(use_reentrant=False)`, or call `optimizer.zero_grad()` behind the exception"
            )
        self.training.receive(slice_index, gradient.detach().reshape(-1), last=self._knows_last)

    def _begin_backward(self, task: int) -> None:
        steps = self.training.steps
        if steps.is_complete:
            raise MisconfigurationException(
                "OffloadAdamW: a backward pass must not come behind the last one of its step, whose gradients have updated weights: call"
                " `optimizer.zero_grad()` before it; or set accumulation_steps to the number of backward passes of a step; or put those"
                " that are not the last into `with optimizer.accumulate():`"
            )
        last = self._signs.is_last(steps.micro_batches + 1)
        self.training.before_backward(last=last)
        self._task, self._knows_last = task, last
        # Private: what runs behind a backward pass, as of torch's own FSDP and DDP.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.training.end_backward()
        self.training.parts.rank.d2h.join()

    def step(self, *, in_closure: bool) -> None:
        """One step."""
        training, gradients = self.training, self._gradients
        training.in_update.end()
        self._refuse_moved()
        n_passes, was_known = training.steps.micro_batches, training.steps.is_complete
        is_scaled, training.factor = gradients.has_factors, gradients.factor()
        try:
            done = training.step(asks_finite=False, refuses_unused=True)
        finally:
            training.factor = None
        if done is None:
            return
        if is_scaled:
            # From now on backward passes do not rely on a factor of 1.
            training.max_norm = math.inf
        gradients.use()
        self._signs.end_step(n_passes, in_closure=in_closure, was_known=was_known)

    def _refuse_moved(self) -> None:
        for of, address in zip(self._trained, self._addresses, strict=True):
            if of.parameter.data_ptr() != address:
                raise MisconfigurationException(
                    f"OffloadAdamW: {of.name} must keep its memory from the first backward pass on, got another one: move the model, or"
                    " assign `data`, before it"
                )

    def state(self) -> dict[int, dict[str, Any]]:
        """State by the numbers of the parameters, as `torch.optim.AdamW.state_dict` has it."""
        full, steps = self.training.full_state, self.training.steps
        if steps.is_complete:
            raise RuntimeError(
                "OffloadAdamW: state_dict must be called between steps, got a call between backward and step: call `optimizer.step()`, or"
                " `optimizer.zero_grad()`, before it"
            )
        self.training.flush()
        counts = steps.state_dict()["counts"]
        if not any(counts.values()):
            return {}
        keys: dict[str, str | None] = {key: key for key in MOMENTS}
        if self.training.parts.rank.dtype != torch.float32:
            keys["master"] = None
        numbers = {id(p): n for n, p in enumerate(self._parameters())}
        state = {}
        for of in self._trained:
            memory = {key: full.in_memory(of.name, which) for key, which in keys.items()}
            tensors = {key: full.read(of.name, keys[key]).cpu() if t is None else t for key, t in memory.items()}
            count = torch.tensor(float(counts[of.name]), dtype=torch.float32, device="cpu")
            state[numbers[id(of.parameter)]] = {"step": count, **tensors}
        return state

    def load(self, indices: list[Any], state: Mapping[Any, Mapping[str, Any]], run_state: Any) -> None:
        """Continues from a state by the numbers of the parameters, which are `indices` in their order, and from `Training.state_dict`."""
        training = self.training
        training.drop_gradients()
        training.flush()
        of_parameter = {id(p): state.get(i, {}) for p, i in zip(self._parameters(), indices, strict=True)}
        saved = {of.name: of_parameter[id(of.parameter)] for of in self._trained}
        counts = {name: int(values.get("step", 0)) for name, values in saved.items()}
        weights = {of.name: saved[of.name].get("master", of.parameter.detach()) for of in self._trained}
        moments = {key: {name: v[key] for name, v in saved.items() if key in v} for key in MOMENTS}
        run = {"count": max(counts.values()), "counts": counts, "groups": [{}] * self._n_groups, "moments": moments}
        run[CHECKPOINT_KEY] = run_state
        training.load(weights, run)
        training.written.note()

    def _parameters(self) -> list[Tensor]:
        """All parameters of the optimizer, in the order in which its state counts them."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer ends the run"
        return [p for group in optimizer.param_groups for p in group["params"]]

    def gradient_norm_of(self, slice_index: int) -> Tensor:
        """See `GradientSource`."""
        self.training.complete()
        return self.training.parts.fill.squared_norm(slice_index).sqrt().float()

    def copy_gradient(self, slice_index: int) -> Tensor:
        """See `GradientSource`."""
        self.training.complete()
        rank = self.training.parts.rank
        return self.training.parts.fill.gradient(slice_index).to(rank.device, rank.dtype, copy=True)

    def read_groups(self) -> list[GroupHyperparameters]:
        """See `Engine`, as below."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer ends the run"
        of_groups = read_hyperparameters(optimizer)
        return [of_groups[of.group] for of in self._trained]

    def refuse_use(self) -> None:
        """See `Engine`: behind `close`."""
        if self.training.closed:
            raise MisconfigurationException(
                "OffloadAdamW: a backward pass must not come behind `close()`: make another optimizer, and load this one's `state_dict()`"
            )

    def _nothing(self) -> None:
        """There are no other ranks, streams or places of weights."""

    gather_weights = take_weights = join_reads = refuse_other_backward = has_ended = _nothing
