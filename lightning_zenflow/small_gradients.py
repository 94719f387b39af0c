"""Gradients of biases and norms, which are many and small: kept where they arrive, and handled all at once at the end of backward."""

import torch
from torch import Tensor

from lightning_zenflow.kernels import Kernels
from lightning_zenflow.ownership import Ownership
from lightning_zenflow.partition import Partition
from lightning_zenflow.rounds import Rounds
from lightning_zenflow.tracing import Tracer
from lightning_zenflow.traffic import Traffic

_LARGEST_NUMEL = 1 << 16
"""Of a slice that is handled so. What is kept takes memory on the device, and larger ones are worth a pass of their own."""


class SmallGradients:
    """Owner of one step's gradients of small vectors, one after the other in one tensor on the device.

    A transformer has two to three vectors for every matrix, and what a vector costs is not its elements but the calls that are made for
    it: here one when it arrives, the others for all of them together. They have no columns to choose from, so there are no proxies and no
    stand-in to wait for.

    Args:
        partition: the rank's partition.
        rounds: where gradients go.
        ownership: which entries' gradients are kept on the device.
        kernels: passes over gradients.
        tracer: records the copies.
        traffic: where copied bytes are counted.
        device: where gradients come from.
        dtype: the model's type.
    """

    def __init__(
        self,
        partition: Partition,
        rounds: Rounds,
        ownership: Ownership,
        kernels: Kernels,
        tracer: Tracer,
        traffic: Traffic,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._rounds = rounds
        self._ownership = ownership
        self._kernels = kernels
        self._tracer = tracer
        self._traffic = traffic
        small = {i: s for i, s in enumerate(partition.slices) if not s.is_matrix and s.numel <= _LARGEST_NUMEL}
        self._values = torch.zeros(sum(s.numel for s in small.values()), device=device, dtype=dtype)
        self._of_slice = dict(zip(small, torch.split(self._values, [s.numel for s in small.values()]), strict=True))
        self._parts: list[int] = []
        self._of_parts: list[Tensor] = []
        for index, tile in enumerate(partition.tiles):
            if tile.slice in small:
                begin = tile.begin - partition.slices[tile.slice].begin
                self._parts.append(index)
                self._of_parts.append(
                    self._of_slice[tile.slice].narrow(0, begin, tile.numel).view(tile.rows, tile.width)
                )

    def __contains__(self, slice_index: int) -> bool:
        return slice_index in self._of_slice

    def keep(self, slice_index: int, gradient: Tensor | None) -> None:
        """Takes one slice's gradient of the whole step.

        Args:
            slice_index: one that it contains.
            gradient: [slice.numel], model dtype, on the device; None: it is zero.
        """
        kept = self._of_slice[slice_index]
        if gradient is None:
            kept.zero_()
        else:
            kept.copy_(gradient)

    def finish(self) -> Tensor | None:
        """Phase *fill* of `Rounds` for all slices, each of which has been kept in this step.

        Returns:
            Sum of squares: 0-D float64 on the device; None if there are no slices.
        """
        if not self._parts:
            return None
        n_bytes = self._values.numel() * self._values.element_size()
        with self._tracer.span("copies down", n_bytes=n_bytes):
            pages = [self._rounds.page(part) for part in self._parts]
            torch._foreach_copy_(pages, self._of_parts, non_blocking=True)
        self._traffic.down_bytes += n_bytes
        targets, sources = [], []
        for part, gradient in zip(self._parts, self._of_parts, strict=True):
            for selection in self._ownership.selections(part):
                targets.append(selection.target)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        return self._kernels.statistics(self._values.view(1, -1), directions=False).total
