"""What DeepSpeed's code for checkpoints and this package's call of an optimizer."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.deepspeed.flat_layout import Layout
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY

_DeepSpeedsOptimizer: Any = object
"""What comes after the mixin in the order of base classes; `Any` for the type checker, since there are two."""


class Checkpointing(_DeepSpeedsOptimizer):  # type: ignore[misc]
    """Mixin of `ZenFlowOptimizer`: saves and loads AdamW's state, which is in the arena, and what else continues the run."""

    state_key: ClassVar[str]
    """Key of AdamW's state in DeepSpeed's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The user's, which DeepSpeed gives other parameters.
        (users,) = (argument for argument in args if isinstance(argument, Optimizer))
        self._of_groups = [list(group["params"]) for group in users.param_groups]
        super().__init__(*args, **kwargs)
        self._flats = self._exchange_params(self._of_groups)
        self._is_read = False
        self._reading = self.optimizer.register_state_dict_pre_hook(self._refuse_reading)

    def _exchange_params(self, of_groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Gives the groups of the user's optimizer other parameters, and returns those that they had."""
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        for group, params in zip(groups, of_groups, strict=True):
            group["params"] = list(params)
        return before

    @contextmanager
    def _with_flat_groups(self) -> Iterator[None]:
        """Context of DeepSpeed's code for checkpoints, for which the groups have what it left in them: flat partitions, the keys of the
        state. Everywhere else they have the module's parameters, as the user's code finds them under torch.
        """
        self._is_read = True
        self._exchange_params(self._flats)
        try:
            yield
        finally:
            self._exchange_params(self._of_groups)
            self._is_read = False

    def _refuse_reading(self, _: Optimizer) -> None:
        if not self._is_read:
            raise MisconfigurationException(
                "ZenFlowStrategy: state_dict of the optimizer from configure_optimizers must not be called in training, when the worker has"
                " AdamW's moments: save a checkpoint, or read them with `deepspeed.utils.safe_get_full_optimizer_state`"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's state with exact master weights and moments, and what else continues this run bit for bit."""
        self.flush()
        with self._with_flat_groups():
            state: dict[str, Any] = super().state_dict()
        self._put_exact_state(state)
        state[CHECKPOINT_KEY] = self.zenflow_step.state_dict()
        return state

    def _put_exact_state(self, state: dict[str, Any]) -> None:
        """Puts AdamW's state into DeepSpeed's as a checkpoint has it."""
        state[self.state_key] = self._host_state.as_saved(state[self.state_key])

    @override
    def load_state_dict(self, state_dict_list: Any, load_optimizer_states: bool = True, **kwargs: Any) -> None:
        """Loads DeepSpeed's state, a list of those of all ranks, into the arena.

        A checkpoint of this strategy with the same configuration and the same ranks continues the run that wrote it; after any other one
        nothing is device-owned until the first step has selected columns.

        Raises:
            MisconfigurationException: the state is a mapping, as torch's `load_state_dict` takes.
        """
        if isinstance(state_dict_list, Mapping):
            raise MisconfigurationException(
                "ZenFlowStrategy: optimizer.load_state_dict must not be called in training, when the worker has AdamW's moments: continue"
                " from a checkpoint (`fit(ckpt_path=...)`, `fabric.load`), or write single states with"
                " `deepspeed.utils.safe_set_full_optimizer_state`"
            )
        self.flush()
        rank = dist.get_rank(group=self.dp_process_group)
        own = state_dict_list[rank] if state_dict_list else None
        if own and load_optimizer_states:
            own = {**own, self.state_key: self._host_state.read_moments(own[self.state_key])}
            state_dict_list = [*state_dict_list[:rank], own, *state_dict_list[rank + 1 :]]
        with self._with_flat_groups():
            super().load_state_dict(state_dict_list, load_optimizer_states=load_optimizer_states, **kwargs)
        self._continue_from(own, optimizer_states=load_optimizer_states)

    def reset_master_from_model(self) -> None:
        """Makes the model's weights, loaded from elsewhere right after a flush, the master weights; moments stay."""
        # Private: DeepSpeed's own way to do the same with its buffers.
        self._restore_from_bit16_weights()
        self.zenflow_step.start_over(int(self.zenflow_step.count))
        self._written.note()

    def load_full_state(self, weights: Mapping[str, Tensor], saved: dict[str, Any] | None) -> None:
        """Continues from whole states, right after a flush and after the model has loaded its weights; all ranks call it together.

        Args:
            weights: master weights by name, [*shape of the parameter], any type; those of all trained parameters, perhaps of others.
            saved: "count" of applied steps; "groups" of hyperparameters; "moments" by key and name, 0 where there is none; and "zenflow",
                this rank's `ZenFlowStep.state_dict` or None. None: weights only.
        """
        for number, (name, shape) in enumerate(self.full_state.shapes.items()):
            self.full_state.write(number, weights[name])
            for key, of_names in sorted(({} if saved is None else saved["moments"]).items(), reverse=True):
                moment = of_names.get(name)
                self.full_state.write(number, weights[name].new_zeros(shape) if moment is None else moment, key)
        if saved is not None:
            for group, values in zip(self.optimizer.param_groups, saved["groups"], strict=True):
                group.update(values)
            self._host_state.write_count(saved["count"])
        self._continue_from(saved, optimizer_states=saved is not None)

    def copy_for_save(self, folder: Path) -> Any:
        """Disk space that a save to a folder needs for `saved_as` beside DeepSpeed's files; None: none.

        Raises:
            OSError: the disk is full.
        """
        return self._host_state.copy_on_disk(folder)

    @contextmanager
    def saved_as(self, copy: Any) -> Iterator[None]:
        """Context in which DeepSpeed saves the exact state, entered and left by all ranks together.

        Args:
            copy: result of `copy_for_save`.
        """
        if copy is not None:
            self.flush()
        with self._host_state.saved_from(copy):
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which a state is loaded, entered and left by all ranks together."""
        try:
            yield
        finally:
            # What has been loaded is not the user's write.
            self._written.note()

    @property
    @abstractmethod
    def shapes_by_name(self) -> Sequence[Mapping[str, Sequence[int]]]:
        """For each parameter group the shapes of its whole parameters, by name."""

    @property
    @abstractmethod
    def layouts(self) -> Sequence[Layout]:
        """Layout of each flat partition in training."""

    def _continue_from(self, own: dict[str, Any] | None, *, optimizer_states: bool) -> None:
        """Continues the run of a checkpoint, after DeepSpeed has loaded its state.

        Args:
            own: this rank's part of the checkpoint; its entry "zenflow" is read.
            optimizer_states: whether the optimizer's state was loaded, and not only weights.
        """
        count = self._host_state.copy_loaded_state_into_arena()
        saved = own.get(CHECKPOINT_KEY) if own and optimizer_states else None
        difference = self.zenflow_step.load_state_dict(saved, count)
        if difference:
            rank_zero_info(
                f"ZenFlow: the checkpoint has AdamW's exact state after {count} steps, but {difference}: the schedule,"
                " the selection of columns and the second moments of provisional updates start again"
            )
