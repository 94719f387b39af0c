"""What DeepSpeed's code for checkpoints and this package's call of an optimizer."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, NoReturn

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zenflow.core.errors import MisconfigurationException, OtherBases
from lightning_zenflow.deepspeed.flat_buffers import Layout, OrderedCopy
from lightning_zenflow.deepspeed.host_state import MOMENTS, DiskCopies
from lightning_zenflow.offload.run_state import CHECKPOINT_KEY


class Checkpointing(OtherBases):  # type: ignore[misc]
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
        self._saved: OrderedCopy | None = None
        self._reading = self.optimizer.register_state_dict_pre_hook(self._refuse_reading)

    def _exchange_params(self, of_groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Gives the groups of the user's optimizer other parameters, and returns those that they had."""
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        for group, params in zip(groups, of_groups, strict=True):
            group["params"] = list(params)
        return before

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
        self._is_read = True
        # What DeepSpeed has left in the groups, flat partitions, are the keys of the state. Everywhere else the groups have the module's
        # parameters, as the user's code finds them under torch.
        self._exchange_params(self._flats)
        try:
            state: dict[str, Any] = super().state_dict()
        finally:
            self._exchange_params(self._of_groups)
            self._is_read = False
        state[self.state_key] = self._host_state.as_saved(
            state[self.state_key], None if self._saved is None else self._saved.states
        )
        state[CHECKPOINT_KEY] = self.zenflow_step.state_dict()
        return state

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the worker has AdamW's moments."""
        raise MisconfigurationException(
            "ZenFlowStrategy: optimizer.load_state_dict must not be called in training, when the worker has AdamW's moments: continue"
            " from a checkpoint (`fit(ckpt_path=...)`, `fabric.load`), or write single states with"
            " `deepspeed.utils.safe_set_full_optimizer_state`"
        )

    def load_partitions(self, saved: Mapping[str, Any], *, optimizer_states: bool) -> None:
        """Continues from this rank's state in a folder, right after a flush; all ranks call it together.

        A checkpoint of this strategy with the same configuration and the same ranks continues the run that wrote it; after any other one
        nothing is device-owned until the first step has selected columns.

        Args:
            saved: "partitions": for each flat partition master weights and moments, [partition_numel], any type; "attributes" of
                DeepSpeed's optimizer; what else `load_full_state` has.
            optimizer_states: whether the optimizer's state is loaded, and not only weights.
        """
        for name, value in saved["attributes"].items():
            setattr(self, name, value)
        self._host_state.load(saved["partitions"], moments=optimizer_states)
        self._continue_from(saved if optimizer_states else None)

    def reset_master_from_model(self) -> None:
        """Makes the model's weights, loaded from elsewhere right after a flush, the master weights; moments stay."""
        # Private: DeepSpeed's own way to do the same with its buffers.
        self._restore_from_bit16_weights()
        self.zenflow_step.start_over(int(self.zenflow_step.count))
        self._written.note()

    def load_full_state(self, weights: Mapping[str, Tensor], saved: Mapping[str, Any] | None) -> None:
        """Continues from whole states, right after a flush and after the model has loaded its weights; all ranks call it together.

        Args:
            weights: master weights by name, [*shape of the parameter], any type; those of all trained parameters, perhaps of others.
            saved: "count" of applied steps; "groups" of hyperparameters; "moments" by key and name, 0 where there is none; and "zenflow",
                this rank's `ZenFlowStep.state_dict` or None. None: weights only.
        """
        for name, shape in self.full_state.shapes.items():
            self.full_state.write(name, weights[name])
            for key, of_names in sorted(({} if saved is None else saved["moments"]).items(), reverse=True):
                moment = of_names.get(name)
                self.full_state.write(name, weights[name].new_zeros(shape) if moment is None else moment, key)
        self._continue_from(saved)

    def copy_for_save(self, copies: DiskCopies) -> Any:
        """Disk space that a save to a folder needs for `saved_as` beside DeepSpeed's files, for all states in another order or for moments
        without views; None: none.

        Raises:
            OSError: the disk is full.
        """
        is_reordered = self.saved_layouts != self.layouts
        if not is_reordered and self._host_state.has_views:
            return None
        return OrderedCopy(copies, self.saved_layouts, n_states=is_reordered + len(MOMENTS))

    @contextmanager
    def saved_as(self, copy: Any) -> Iterator[None]:
        """Context in which DeepSpeed saves the exact state, entered and left by all ranks together.

        Args:
            copy: result of `copy_for_save`.
        """
        if copy is not None:
            self.flush()
            layouts, names = self.layouts, (None, *MOMENTS)[-copy.n_states :]
            states = [[partial(self._host_state.read, group, name) for name in names] for group in range(len(layouts))]
            copy.fill(states, layouts, device=self._rank.device, group=self.dp_process_group)
        self._saved = copy
        try:
            yield
        finally:
            self._saved = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which a state is loaded, entered and left by all ranks together; not while weights have left the device."""
        self._refuse_asleep()
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

    @property
    def saved_layouts(self) -> Sequence[Layout]:
        """The same in checkpoints, which have DeepSpeed's."""
        return self.layouts

    def _continue_from(self, saved: Mapping[str, Any] | None) -> None:
        """Continues the run of a checkpoint, whose weights and moments are in the arena; see `load_full_state`."""
        count = int(self.zenflow_step.count)
        if saved is not None:
            count = saved["count"]
            for group, values in zip(self.optimizer.param_groups, saved["groups"], strict=True):
                # Copied: a tensor may be a view of a mapped file, and would keep it open.
                group.update(deepcopy(values))
        self._host_state.write_count(count)
        difference = self.zenflow_step.load_state_dict(None if saved is None else saved.get(CHECKPOINT_KEY), count)
        if difference:
            rank_zero_info(
                f"ZenFlow: the checkpoint has AdamW's exact state after {count} steps, but {difference}: the schedule,"
                " the selection of columns and the second moments of provisional updates start again"
            )
