"""AdamW whose state is in host memory, updated behind the backward pass, as an optimizer of torch."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.step_inputs import read_hyperparameters
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY
from lightning_zenflow.optimizer.engine import OptimizerEngine
from lightning_zenflow.optimizer.last_pass import LastPass
from lightning_zenflow.optimizer.parameters import trained_parameters
from lightning_zenflow.step_meter import StepMeter
from lightning_zenflow.telemetry import Reading


class OffloadAdamW(Optimizer):
    """`torch.optim.AdamW` with its state in host memory (12 bytes a parameter), which a process on the CPU updates while the backward pass
    goes on (ZenFlow, arXiv 2505.12242, with S = 1, d = 0). Each step ends with AdamW's own weights.

    Gradients leave `parameter.grad` as they arrive; what stands there instead can be read, scaled, clipped by torch and accumulated.
    Weights change between the last backward pass and `step`, behind which they are AdamW's. Where no more than one step in three is
    clipped, nearly all of the update hides.

    Args:
        params, lr, betas, eps, weight_decay: as of `torch.optim.AdamW`. Parameters must be of one type and on one device; with several
            ranks, all must be those of `torch.distributed.fsdp.fully_shard` over all ranks, which make the optimizer together.
        accumulation_steps: backward passes of a step; None: as many as the first step has, or the last one inside of `step(closure)`.
            Steps with fewer are exact, and hide nothing.
        moments_dtype: type of the moments in host memory.
        worker_cores: number of the CPU's cores for updates, or their numbers.
        accumulate_on: where sums over micro-batches are.
        offload_ratio: share of the states in host memory; the device holds and updates the others, of the first layers.
        clip_prediction: blocks are updated in backward in steps that are clipped too, with a predicted factor that the next forward pass
            sees. What it is predicted from is learned: the norms of earlier steps, the limit of the last clipped one, and the last loss
            scale. The state has the true factor; `flush` makes the weights those of the state, before they are evaluated.

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
        offload_ratio: float | Literal["auto"] = "auto",
        clip_prediction: bool = False,
    ) -> None:
        if accumulation_steps is not None and accumulation_steps < 1:
            raise ValueError(f"accumulation_steps must be an integer >= 1 or None, got {accumulation_steps!r}")
        self._config = ZenFlowConfig(
            update_interval=1,
            publish_lag=0,
            clip_prediction=clip_prediction,
            moments_dtype=moments_dtype,
            worker_cores=worker_cores,
            accumulate_on=accumulate_on,
            offload_ratio=offload_ratio,
        )
        self._engine: OptimizerEngine | None = None
        self._signs = LastPass(accumulation_steps)
        self._hooked = dict[Tensor, None]()
        # Which torch's reads in parameter groups, where it continues from a `state_dict`; the last one before torch 2.7 too.
        any_parameter = torch.empty(0, dtype=torch.float32, device="cpu")
        defaults = torch.optim.AdamW([any_parameter]).defaults | {"decoupled_weight_decay": True}
        super().__init__(params, defaults | {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.register_state_dict_post_hook(_add_state)  # before the user's hooks
        read_hyperparameters(self)
        if any(p.device.type != "cpu" or isinstance(p, DTensor) for p in self._hooked):
            self._started()

    def _started(self) -> OptimizerEngine:
        """The training. On a CPU it begins with the first use, as parameters may be moved to a device before; for DTensors at once, as all
        ranks begin together. MisconfigurationException: parameters cannot be trained like this.
        """
        if self._engine is None:
            self._refuse_later()
            self._engine = OptimizerEngine(self, self._config, self._signs)
            weakref.finalize(self, self._engine.end)
            # For those who make state by a step with zero gradients where there is none, as torch.distributed.checkpoint. Without tensors:
            # Lightning would move them to the device.
            self.state.update({p: {} for p in self._hooked})
        return self._engine

    def _refuse_later(self) -> None:
        """Refuses parameters whose gradients would not be noticed."""
        for of in trained_parameters(self.param_groups)[0]:
            if of.parameter not in self._hooked:
                raise MisconfigurationException(
                    f"OffloadAdamW: {of.name}.requires_grad must be True when the optimizer gets it, got a parameter that was frozen then"
                    " or has taken the place of another: freeze behind the optimizer's construction, and construct it behind `fully_shard`,"
                    " which Accelerate calls in `prepare`"
                )

    def accumulate(self) -> AbstractContextManager[None]:
        """Context of backward passes that are not the step's last."""
        return self._signs.saying(is_last=False)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; without a backward pass since the last one, nothing.

        Args:
            closure: computes the loss and its gradients, and returns the loss. Its backward pass is the step's last.

        Raises:
            MisconfigurationException: the step did not use a parameter, or gradients were changed in a way that cannot be followed.
            WorkerError: the worker has ended.
        """
        loss = None
        if closure is not None:
            with self._signs.saying(is_last=True), torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p not in self._hooked for g in self.param_groups for p in g["params"]):
            self._refuse_later()
        if self._engine is not None or any(p.grad is not None for p in self._hooked):
            self._started().step(in_closure=closure is not None)
        return loss

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last step, and undoes what has been updated with them; `grad` is None then in any case."""
        if self._engine is not None:
            self._engine.training.drop_gradients()
        super().zero_grad(set_to_none=True)

    def flush(self) -> None:
        """Waits until the state in host memory is that of all steps so far."""
        if self._engine is not None:
            self._engine.training.flush()

    def give_back(self) -> None:
        """`Training.give_back`."""
        if self._engine is not None:
            self._engine.training.give_back()

    @override
    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.AdamW`'s, which can load it, with "master" beside the moments where weights are of fewer than 32 bits, and with
        `clip_prediction`: float32 weights. Tensors are on the CPU and, like torch's, the state itself where that is float32: the next step
        changes them. Those of DTensors are DTensors.

        Raises:
            RuntimeError: between the last backward pass of a step and the step.
        """
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a `state_dict` of this class or of `torch.optim.AdamW` or Adam, behind the model's `load_state_dict`.

        Raises:
            ValueError: it has other parameter groups.
        """
        state_dict = dict(state_dict)
        # Private, as the hooks behind: torch's method would round the moments to the type of the weights.
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        sizes, saved_sizes = ([len(g["params"]) for g in of_groups] for of_groups in (groups, saved_groups))
        if sizes != saved_sizes:
            raise ValueError(f"state_dict must have parameter groups of {sizes} parameters, got {saved_sizes}")
        for group, saved in zip(groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        indices = [index for saved in saved_groups for index in saved["params"]]
        self._started().load(indices, state_dict["state"], state_dict.get(CHECKPOINT_KEY))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, before the first backward pass only."""
        if self._engine is not None:
            raise MisconfigurationException(
                "OffloadAdamW: add_param_group must come before the first backward pass, when the state gets its memory: give all"
                " parameters at construction, and set their `requires_grad` between steps"
            )
        super().add_param_group(param_group)
        me = weakref.ref(self)

        def arrived(parameter: Tensor) -> None:
            if (optimizer := me()) is not None:
                optimizer._started().arrived(parameter)

        for p in self.param_groups[-1]["params"]:
            if p.requires_grad:
                self._hooked[p] = None
                weakref.finalize(self, p.register_post_accumulate_grad_hook(arrived).remove)

    @property
    def telemetry(self) -> Reading | None:
        """Clocks and counters so far, without waiting for the device; None before the state has its memory."""
        return None if self._engine is None else self._engine.training.parts.read_counters()

    @property
    def meter(self) -> StepMeter | None:
        """Measures the steps; None before the state has its memory."""
        return None if self._engine is None else self._engine.meter

    def close(self) -> None:
        """Ends the worker, and frees the state; weights stay. Logs a summary of 50 steps or more, as the end of the object does."""
        if self._engine is not None:
            self._engine.training.flush()
            self._engine.end()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "OffloadAdamW has a process of its own and cannot be pickled or copied: save its `state_dict()`"
        )


def _add_state(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    assert isinstance(optimizer, OffloadAdamW)
    if (engine := optimizer._engine) is not None:
        packed["state"], packed[CHECKPOINT_KEY] = engine.state(), engine.training.state_dict()
