"""Weights that the user writes in place between two steps: they become master weights, as under a torch optimizer."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.partition import Slice
from lightning_zenflow.engine.pieces import is_divided
from lightning_zenflow.worker.rank_state import RankState

_INSTEAD = (
    "with `deepspeed.utils.safe_set_full_fp32_param`, or by all ranks in `on_train_batch_start` or `on_train_batch_end`"
)


class WrittenWeights:
    """Notices what the user has written to a model's weights, by torch's version counters, which our own writes do not change.

    Writes through `parameter.data` change no counter. Norms find them, behind steps whose number is a power of two.

    Args:
        rank: the rank's weights and master weights.
        parameters: all that are trained, in the order in which `Slice.parameter` counts them.
        names: of the parameters.
        group: data-parallel ranks.
        await_slice: waits for the worker's writes to a slice, where it writes in place; None elsewhere.
    """

    def __init__(
        self,
        rank: RankState,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        await_slice: Callable[[int], None] | None,
    ) -> None:
        self._rank, self._parameters, self._names, self._await_slice = rank, parameters, names, await_slice
        self._slices = {s.parameter: s for s in rank.partition.slices}
        self._is_in_pieces = any(map(is_divided, parameters))
        self._refuses = self._is_in_pieces and dist.get_world_size(group) > 1
        # Of parameters that have been written before, by their numbers: what the model has shown since our last write. In place, where the
        # worker may be writing, it is exact.
        self._shown: dict[int, Tensor] = {}
        self._norms: Tensor | None = None
        self._written: dict[int, Tensor] = {}
        self.note()

    def note(self) -> None:
        """Takes what the model shows now for our own."""
        # Private: torch's counter of writes in place.
        self._versions = [p._version for p in self._parameters]
        self._norms = None

    def updated(self, step: int = 0) -> None:
        """Follows our own writes, at the end of a step or behind a flush (0), which the user has not written behind."""
        self._shown = {number: self._weights(self._slices[number]).clone() for number in self._shown}
        checks = self._norms is not None if step == 0 else step & (step - 1) == 0
        self._norms = self._norm() if checks and not self._is_in_pieces else None

    def found(self) -> list[int]:
        """Numbers of the parameters that the user has written since `note`.

        Raises:
            MisconfigurationException: a write has changed no counter; or several ranks have pieces, and may differ.
        """
        versions = [p._version for p in self._parameters]
        found = [] if versions == self._versions else [i for i, v in enumerate(versions) if v != self._versions[i]]
        if found and self._refuses:
            raise MisconfigurationException(
                f"ZenFlowStrategy: {self._names[found[0]]} must not be written in place with stage=3 on several ranks, which would have to"
                " wait for one another; write it with `deepspeed.utils.safe_set_full_fp32_param`"
            )
        if self._norms is not None:
            differs = (self._norm().nan_to_num() != self._norms.nan_to_num()).tolist()
            for number, is_other in zip(self._slices, differs, strict=True):
                if is_other and number not in found:
                    raise MisconfigurationException(
                        f"ZenFlowStrategy: {self._names[number]} must not be written through `parameter.data`, which goes unnoticed in most"
                        " steps: write to the parameter itself under `torch.no_grad()`"
                    )
        return found

    def keep(self, found: Sequence[int], *, shows_exact: bool) -> None:
        """Copies what the user has written, before a flush overwrites it.

        Args:
            found: result of `found`.
            shows_exact: whether the model's weights were those of all steps before the user's write.

        Raises:
            MisconfigurationException: they were not, and nothing says what they were.
        """
        for number in found:
            if not shows_exact and number not in self._shown:
                raise MisconfigurationException(
                    f"ZenFlowStrategy: {self._names[number]} must not be written in place while updates of it are pending: call"
                    " `trainer.strategy.flush()` before the first write, set update_interval=1 and publish_lag=0, or write it with"
                    " `deepspeed.utils.safe_set_full_fp32_param`"
                )
            if number in self._slices:
                if self._await_slice is not None:
                    self._await_slice(list(self._slices).index(number))
                self._written[number] = self._weights(self._slices[number]).clone()

    @torch.no_grad()
    def take_over(self) -> None:
        """Makes what `keep` has copied the model's and the master weights, right after a flush. What the user has left as it was keeps its
        precision there.
        """
        for number, theirs in self._written.items():
            s = self._slices[number]
            master = self._rank.arena.master.narrow(0, s.begin, s.numel)
            exact = master.to(theirs.dtype)
            theirs = theirs.cpu()
            is_new = theirs != self._shown.get(number, exact).cpu()
            master.copy_(torch.where(is_new, theirs.float(), master))
            shown = torch.where(is_new, theirs, exact)
            self._weights(s).copy_(shown)
            if self._await_slice is None:
                self._shown[number] = shown
        self._written = {}
        self.note()

    def refuse(self) -> None:
        """Refuses writes between backward and step, when updates are under way."""
        if found := self.found():
            raise MisconfigurationException(
                f"ZenFlowStrategy: {self._names[found[0]]} must not be written between backward and step, when its update is under way:"
                f" write it {_INSTEAD}"
            )

    def _weights(self, s: Slice) -> Tensor:
        return self._rank.weights_at(s.param_group, s.begin, s.numel)

    def _norm(self) -> Tensor:
        """Norm of each slice: [slices] float32 on the device."""
        norms = [torch.linalg.vector_norm(self._weights(s), dtype=torch.float32) for s in self._slices.values()]
        return torch.stack(norms) if norms else self._rank.weights[0].new_empty(0)
