"""Schedule of column selections, and the selected columns."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_zenflow.core.device import AsyncHostCopy, runtime_of
from lightning_zenflow.topk.column_norms import ColumnLayout, ColumnSquaredNorms
from lightning_zenflow.topk.importance import (
    column_count,
    count_kept,
    owned_norm_share,
    select_columns,
)
from lightning_zenflow.topk.state_export import Columns

_SHORTEST_CHECK = 8

LONGEST_CHECK = 512
"""The longest interval, in steps, at which `select_interval: auto` looks whether its choice still fits."""

_SMALLEST_OVERLAP = 0.7
"""`select_interval: auto` selects anew when a smaller share of the fresh top-k columns is already owned."""

_MISSES_IN_A_ROW = 3
"""So often `select_interval: auto` looks sooner after a choice that did not fit. After more, looking sooner does not help: which columns
have the largest gradients is mostly noise, and a selection costs time."""


@dataclass(frozen=True, kw_only=True)
class SelectionContext:
    """Inputs of a user's `select_strategy` besides the proxies."""

    parameter: str
    """Name of the matrix."""
    step: int
    """Optimizer step whose gradient the proxies are from, counted from 1."""
    epoch: int
    k: int
    """Number of columns that `topk_ratio` allows; the callable may return fewer."""
    current: Tensor
    """int64, ascending; the columns selected last, empty before the first selection."""


SelectStrategy = Callable[[Tensor, SelectionContext], Tensor]
"""`(proxies, context) -> indices`, all on the CPU: proxies [columns] float32, sums of squares, the same on every rank; indices int64,
distinct, at most `context.k`."""


class _Choice:
    """Chosen columns of all parameters.

    Args:
        host: for each parameter, int64, ascending, on the CPU.
        device: the same on the training device.
        owned: of all columns, whether they are chosen, on the training device.
        kept: how many of them the choice before has, too.
    """

    def __init__(self, host: Sequence[Tensor], device: Sequence[Tensor], owned: Tensor, kept: int = 0) -> None:
        self.host, self.device, self.owned = list(host), list(device), owned
        total = sum(columns.numel() for columns in host)
        self.overlap = kept / total if total else 1.0
        """Share of the columns that the choice before has, too."""


class Selector:
    """Decides, alike on every rank, in which steps proxies are measured and which columns are selected.

    Args:
        names: of the model's parameters.
        columns: see `ColumnLayout`.
        topk_ratio: share of the columns.
        strategy: "step" or "epoch" (what `interval` counts; "auto" counts steps), or the import path of a `SelectStrategy`.
        interval: steps or epochs between selections; 0 selects once; "auto" selects when the present choice no longer fits.
    """

    def __init__(
        self,
        names: Sequence[str],
        columns: Sequence[int],
        *,
        topk_ratio: float,
        strategy: str,
        interval: int | Literal["auto"],
        device: torch.device,
    ) -> None:
        self._names = names
        self._layout = ColumnLayout(columns)
        self._topk_ratio = topk_ratio
        self._by_epoch = strategy == "epoch"
        self._callable = None if strategy in ("auto", "step", "epoch") else import_strategy(strategy)
        self._interval = interval
        self._device = device
        self._epoch = 0
        self.start_over()

    @property
    def epoch(self) -> int:
        """Number of the present epoch."""
        return self._epoch

    @property
    def n_selections(self) -> int:
        """Selections since the start."""
        return self._n_selections

    @property
    def last_overlap(self) -> float | None:
        """Share of the columns chosen last that were chosen before as well; None until there is something to compare."""
        return self._last_overlap

    def start_over(self) -> None:
        """Forgets all selections."""
        self._current = self._from_host([torch.empty(0, dtype=torch.int64) for _ in self._names])
        self._check_interval = _SHORTEST_CHECK
        self._misses = 0  # in a row
        self._next: int | None = 0  # step or epoch of the next selection
        self._n_selections = 0
        self._last_overlap: float | None = None

    def start_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next step belongs to; counts where the selection strategy is "epoch"."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Columns selected last, and the time of the next selection."""
        return {
            "current": list(self._current.host),
            "check_interval": self._check_interval,
            "misses": self._misses,
            "next": self._next,
            "epoch": self.epoch,
            "n_selections": self.n_selections,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._current = self._from_host(state["current"])
        self._check_interval, self._next = state["check_interval"], state["next"]
        self._misses = state["misses"]
        self._epoch, self._n_selections = state["epoch"], state["n_selections"]

    def measures(self, step: int) -> bool:
        """Whether the gradient of `step`, or of the present epoch's first step, is to be measured for a selection."""
        return self._next is not None and (self.epoch if self._by_epoch else step) >= self._next

    def new_column_norms(self) -> ColumnSquaredNorms:
        """New sums for the proxies of one step."""
        return ColumnSquaredNorms(self._layout, self._device)

    def owned_norm_share(self, column_norms: ColumnSquaredNorms) -> Tensor:
        """Share of the gradient's squared norm in the present columns by reduced proxies, see `importance`. Does not wait."""
        return owned_norm_share(column_norms.flat, self._current.owned)

    def select(self, column_norms: ColumnSquaredNorms, step: int) -> list[Columns | None] | None:
        """Chooses columns by reduced proxies. Waits for the device.

        Returns:
            For each parameter its columns, None standing for all; or None if nothing is to change, because the present choice still
            fits or because the step was not finite (then the next one is measured).
        """
        fresh = self._by_importance(column_norms) if self._callable is None else self._by_callable(column_norms, step)
        if fresh is None:
            return None
        if self.n_selections > 0:
            self._last_overlap = fresh.overlap
        fits = self._interval == "auto" and self._still_fits()
        self._schedule_next(step)
        if fits:
            return None
        self._current = fresh
        self._n_selections += 1
        return [
            None if n == 0 or host.numel() == n else Columns(device=device, host=host)
            for n, host, device in zip(self._layout.columns, fresh.host, fresh.device, strict=True)
        ]

    def _by_importance(self, column_norms: ColumnSquaredNorms) -> _Choice | None:
        # On the device, all matrices of a width at once: a large model has hundreds, and the host takes half a millisecond for each. One
        # copy brings to the host all that it needs.
        flat, positions = self._largest(column_norms)
        kept = count_kept(self._current.owned, positions)
        copied = AsyncHostCopy(torch.cat([torch.stack([kept, column_norms.is_finite().long()]), flat])).read()
        n_kept, is_finite = copied[:2].tolist()
        if not is_finite:
            return None
        numbers = [column_count(n, self._topk_ratio) if n else 0 for n in self._layout.columns]
        host, device = (self._layout.of_parameters(chosen, numbers) for chosen in (copied[2:], flat))
        return _Choice(host, device, self._layout.mask(positions), n_kept)

    def _largest(self, column_norms: ColumnSquaredNorms) -> tuple[Tensor, Tensor]:
        """Columns with the largest norms, in the order of the layout, and their positions: int64 on the device."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        columns, positions, begin = [none], [none], 0
        for norms in column_norms.by_width():
            of_width = select_columns(norms, self._topk_ratio)
            begins = torch.arange(begin, begin + norms.numel(), norms.shape[1], device=self._device)
            columns.append(of_width.view(-1))
            positions.append((of_width + begins.unsqueeze(1)).view(-1))
            begin += norms.numel()
        return torch.cat(columns), torch.cat(positions)

    def _by_callable(self, column_norms: ColumnSquaredNorms, step: int) -> _Choice | None:
        flat = AsyncHostCopy(column_norms.flat).read()
        if not torch.isfinite(flat).all():
            return None
        proxies = self._layout.of_parameters(flat)
        chosen = [self._ask(i, p, step) if p.numel() else p.long() for i, p in enumerate(proxies)]
        before = self._layout.mask(self._layout.positions(self._current.host))
        return self._from_host(chosen, int(count_kept(before, self._layout.positions(chosen))))

    def _ask(self, parameter: int, proxies: Tensor, step: int) -> Tensor:
        assert self._callable is not None
        k = column_count(proxies.numel(), self._topk_ratio)
        context = SelectionContext(
            parameter=self._names[parameter], step=step, epoch=self.epoch, k=k, current=self._current.host[parameter]
        )
        chosen = self._callable(proxies, context)
        return _validated(chosen, columns=proxies.numel(), k=k, parameter=self._names[parameter])

    def _from_host(self, columns: Sequence[Tensor], kept: int = 0) -> _Choice:
        both = torch.stack([torch.cat(list(columns)), self._layout.positions(columns)])
        # From page-locked memory, so that the host does not wait for the copy.
        runtime = runtime_of(self._device)
        flat, positions = runtime.to_device(runtime.empty_on_host(both.shape, both.dtype).copy_(both))
        device = torch.split(flat, [c.numel() for c in columns])
        return _Choice(columns, device, self._layout.mask(positions), kept)

    def _still_fits(self) -> bool:
        """Whether enough columns stay the same; lengthens the interval between checks while they do, or while they never do."""
        if self.last_overlap is None:
            return False
        fits = self.last_overlap >= _SMALLEST_OVERLAP
        self._misses = 0 if fits else self._misses + 1
        longer, shorter = 2 * self._check_interval, self._check_interval // 2
        lengthens = fits or self._misses > _MISSES_IN_A_ROW
        self._check_interval = min(longer, LONGEST_CHECK) if lengthens else max(shorter, _SHORTEST_CHECK)
        return fits

    def _schedule_next(self, step: int) -> None:
        if self._interval == 0:
            self._next = None
        elif self._interval == "auto":
            self._next = self.epoch + 1 if self._by_epoch else step + self._check_interval
        else:
            self._next = (self.epoch if self._by_epoch else step) + self._interval


def import_strategy(path: str) -> SelectStrategy:
    """The callable behind ``pkg.mod:fn`` or ``pkg.mod.fn``.

    Raises:
        MisconfigurationException: there is none.
    """
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise MisconfigurationException(
            f"ZenFlowConfig: select_strategy={path!r}: cannot be imported: {error}"
        ) from error
    if not callable(found):
        raise MisconfigurationException(
            f"ZenFlowConfig: select_strategy={path!r}: must be a callable (proxies, context) -> indices, got a {type(found).__name__}"
        )
    return found  # type: ignore[no-any-return]


def _validated(chosen: Any, *, columns: int, k: int, parameter: str) -> Tensor:
    allowed = f"a 1-D int64 tensor of at most {k} distinct column numbers from 0 to {columns - 1}"
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.int64 or chosen.dim() != 1:
        raise ValueError(f"select_strategy must return {allowed}, got {chosen!r} for {parameter}")
    ordered: Tensor = torch.unique(chosen.cpu())
    if (
        ordered.numel() != chosen.numel()
        or ordered.numel() > k
        or (ordered.numel() and not 0 <= ordered[0] <= ordered[-1] < columns)
    ):
        raise ValueError(f"select_strategy must return {allowed}, got {chosen.tolist()} for {parameter}")
    return ordered
