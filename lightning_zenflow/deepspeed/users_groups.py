"""The parameter groups of the user's optimizer in training: the user's code finds the module's parameters there, DeepSpeed its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from lightning_zenflow.core.errors import MisconfigurationException


class UsersGroups:
    """Parameters of the groups, of the user and of DeepSpeed, whose code for checkpoints reads the optimizer's state by them.

    Args:
        optimizer: before DeepSpeed gives its groups other parameters.

    Attributes:
        given: the optimizer.
        optimizer: the same; when training has ended and that is the user's again, another one with its groups and state.
        users: the module's parameters of each group.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.given, self._is_read = optimizer, False
        self.optimizer = optimizer
        self.users = [list(group["params"]) for group in optimizer.param_groups]

    def take(self) -> None:
        """Gives the groups the module's parameters, behind DeepSpeed's set-up."""
        self._deepspeeds = self._exchange(self.users)
        self._reading = self.optimizer.register_state_dict_pre_hook(self._refuse_reading)

    @contextmanager
    def as_deepspeeds(self) -> Iterator[None]:
        """Context in which the groups have DeepSpeed's flat partitions, the keys of the state, and the state may be read."""
        self._is_read = True
        self._exchange(self._deepspeeds)
        try:
            yield
        finally:
            self._exchange(self.users)
            self._is_read = False

    def leave(self) -> None:
        """Ends this. Of groups that the user has added in training DeepSpeed knows nothing."""
        self._reading.remove()
        del self.optimizer.param_groups[len(self.users) :]

    def _exchange(self, of_groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
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
