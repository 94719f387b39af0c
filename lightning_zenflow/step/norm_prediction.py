"""Prediction of the gradient norm during backward, from the norms of the steps before."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import predicted_squared_norm, smoothed_ratio
from lightning_zenflow.kernels.base import add_up


class NormPrediction:
    """Squared norms of a step's gradients up to each block's arrival, and their ratios to the whole in steps whose norm was finite.

    Nothing here is read by the host. The prediction is a function of the gradients alone, so that runs repeat; ranks predict from their own
    parts.

    Args:
        n_blocks: number of blocks.
        device: of the gradients.
    """

    def __init__(self, n_blocks: int, device: torch.device) -> None:
        self._partial = torch.zeros(n_blocks, dtype=torch.float64, device=device)
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._ratio = torch.full((n_blocks,), torch.nan, dtype=torch.float64, device=device)
        self._last = torch.zeros((), dtype=torch.float64, device=device)
        self.knows_last = False
        """Whether there has been a step to predict from."""

    def open(self) -> None:
        """Begins a step."""
        self._sum.zero_()
        self._partial.zero_()

    def add(self, block: int, squared_norms: list[Tensor]) -> Tensor:
        """Adds the gradients that have arrived up to a block's last one.

        Args:
            block: index into `Partition.blocks`.
            squared_norms: `SquaredNorms.parts` since the last call in the step.

        Returns:
            0-D float64: their sum in this step; not finite if any gradient so far is not.
        """
        if squared_norms:
            self._sum.add_(add_up(squared_norms))
        self._partial[block] = self._sum
        return self._partial[block]

    def predict(self, block: int, *, loss_scale: float) -> Tensor:
        """Squared norm of the step's whole gradient, of all ranks and with loss scale: 0-D float64."""
        return predicted_squared_norm(self._partial[block], self._ratio[block], self._last * loss_scale**2)

    def end_step(self, squared_norm: Tensor, *, finite: Tensor, loss_scale: float) -> None:
        """Takes the step's own squared norm, 0-D float64; one that is not finite is not predicted from."""
        ratio = smoothed_ratio(self._ratio, squared_norm, self._partial)
        self._ratio.copy_(torch.where(finite, ratio, self._ratio))
        self._last.copy_(torch.where(finite, squared_norm / loss_scale**2, self._last))
        self.knows_last = True

    def state_dict(self) -> dict[str, Any] | None:
        """Ratio and norm that the next step is predicted from, on the CPU; None: nothing yet."""
        return {"ratio": self._ratio.cpu(), "last": self._last.cpu()} if self.knows_last else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of `state_dict`, for the same blocks."""
        self.knows_last = state is not None
        if state is not None:
            self._ratio.copy_(state["ratio"])
            self._last.copy_(state["last"])
