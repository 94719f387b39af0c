"""The record of the parameters that are trained, with the steps in which they were."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_zenflow.core.partition import Partition


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Which parameters are trained between two changes of that, each list in the order in which `Slice.parameter` counts them."""

    flags: list[bool]
    """Whether it is trained."""
    since: int
    """Applied steps of the run before."""
    counts: list[int]
    """Those in which it was trained."""

    @property
    def n_missed(self) -> list[int | None]:
        """Applied steps of the run that AdamW's own count lacks; None of a frozen parameter, whose count stands still."""
        return [self.since - n if is_trained else None for is_trained, n in zip(self.flags, self.counts, strict=True)]


class Freezing:
    """Record of the parameters that are trained at present. As under plain torch, a frozen parameter and its moments do not change, and
    AdamW's step count, which its bias correction depends on, is each parameter's own.

    Args:
        parameters: parameters of the model that required gradients at setup, by name, in the order in which `Slice.parameter` counts them.

    Attributes:
        now: which are trained, as everything else follows it.
    """

    def __init__(self, partition: Partition, parameters: Mapping[str, Tensor]) -> None:
        self._partition = partition
        self._parameters = parameters
        self.now = Trained(flags=[True] * len(parameters), since=0, counts=[0] * len(parameters))

    def present(self) -> list[bool]:
        """What `Trained.flags` should be by `requires_grad`, alike on every rank."""
        return [p.requires_grad for p in self._parameters.values()]

    def counts(self, count: int) -> dict[str, int]:
        """AdamW's own count of each parameter by name, after `count` applied steps of the run."""
        now = self.now
        own = (n + is_trained * (count - now.since) for is_trained, n in zip(now.flags, now.counts, strict=True))
        return dict(zip(self._parameters, own, strict=True))

    def trained(self, flags: list[bool], counts: Mapping[str, int] | None, count: int) -> Trained:
        """What is trained from `count` applied steps on. `counts` are as above, those of the run where missing; None: of this run."""
        own = self.counts(count) if counts is None else counts
        return Trained(flags=flags, since=count, counts=[own.get(name, count) for name in self._parameters])

    def slices(self, trained: Trained) -> dict[int, int]:
        """Slices of the parameters that are trained, each with the steps that it has missed."""
        n_missed = trained.n_missed
        of_slices = enumerate(n_missed[s.parameter] for s in self._partition.slices)
        return {index: n for index, n in of_slices if n is not None}
