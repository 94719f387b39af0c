"""One number for each column of the model's matrices, in one flat tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor


class ColumnLayout:
    """Where the columns of each matrix lie. Matrices with equally many columns lie beside each other, so that a call can work on all.

    Args:
        columns: for each parameter of the model, the length of a row of its [out, rest] view; 0 where it has no columns to choose from.
    """

    def __init__(self, columns: Sequence[int]) -> None:
        self.columns = list(columns)
        self._order = sorted(range(len(self.columns)), key=self.columns.__getitem__)
        self._places = sorted(range(len(self.columns)), key=self._order.__getitem__)  # the inverse
        self.numel = sum(self.columns)
        """Number of columns of all matrices."""
        widths = sorted(set(self.columns) - {0})
        self._by_width = [(width, self.columns.count(width)) for width in widths]

    def of_parameters(self, flat: Tensor, numbers: Sequence[int] | None = None) -> list[Tensor]:
        """Every parameter's part of `flat`, a view.

        Args:
            flat: entries of all parameters, in the order of this layout.
            numbers: for each parameter its number of entries; None: its number of columns.
        """
        numbers = numbers or self.columns
        parts = torch.split(flat, [numbers[parameter] for parameter in self._order])
        return [parts[place] for place in self._places]

    def by_width(self, flat: Tensor) -> list[Tensor]:
        """For each number of columns, ascending, the parts of its matrices: [matrices, columns], views."""
        parts = torch.split(flat, [width * count for width, count in self._by_width])
        return [part.view(-1, width) for part, (width, _) in zip(parts, self._by_width, strict=True)]

    def positions(self, of_parameters: Sequence[Tensor]) -> Tensor:
        """Positions of columns, given for each parameter: 1-D int64, on their device."""
        begin, positions = 0, []
        for parameter in self._order:
            positions.append(of_parameters[parameter] + begin)
            begin += self.columns[parameter]
        return torch.cat(positions)

    def mask(self, positions: Tensor) -> Tensor:
        """Of all columns, whether they are at one of the positions: bool, on their device. Does not wait for it."""
        none = torch.zeros(self.numel, dtype=torch.bool, device=positions.device)
        return none.index_fill_(0, positions, True)


class ColumnSquaredNorms:
    """Column proxies of all matrices of the model; one all-reduce adds them over the ranks.

    Args:
        layout: of the columns.
        device: the training device.
    """

    def __init__(self, layout: ColumnLayout, device: torch.device) -> None:
        self._layout = layout
        self.flat = torch.zeros(layout.numel, device=device)
        """float32; of this rank's rows until it is reduced."""
        self._views = layout.of_parameters(self.flat)

    def of_parameter(self, parameter: int) -> Tensor:
        """[columns], a view."""
        return self._views[parameter]

    def by_width(self) -> list[Tensor]:
        """See `ColumnLayout.by_width`."""
        return self._layout.by_width(self.flat)

    def is_finite(self) -> Tensor:
        """0-D bool on the device: whether all of them are."""
        return torch.isfinite(self.flat).all()
