"""Weights that the user's code writes in place between two steps, which become master weights, as under a torch optimizer."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zenflow.core.device import AsyncHostCopy
from lightning_zenflow.core.errors import Calls, MisconfigurationException
from lightning_zenflow.offload.run_state import StepParts
from lightning_zenflow.offload.step import ZenFlowStep

FOLLOWED = 16
"""Steps after the start, and after each write, in which writes through `parameter.data` are looked for in every one."""


class WrittenWeights:
    """Notices what the user has written to a model's weights, by torch's counters of writes in place: neither our own writes nor
    DeepSpeed's gathers change those of the parameters, and of the pieces only the end of `GatheredParameters` does.

    Writes through `parameter.data` change no counter. Sums find them, behind flushes and `FOLLOWED` steps, in which the host waits for the
    device, and behind one step in 32 others, in which they are refused when the device is there. All ranks call all methods together.

    In the order of a step: `begin_updates` where updates begin, `note_arrival` for each gradient from there on, `refuse` before the step,
    `note` behind it. Before the next step's first pass, and before each flush, `look` copies what is other than noted, and `take_over`
    makes that the master weights, right after the flush.

    Args:
        steps: the rank's steps.
        parts: their components; the weights and master weights.
        names: of all parameters that are trained, in the order in which `Slice.parameter` counts them.
        numels: elements of the whole parameters, in the same order.
        piece_of: this rank's piece of a parameter that the ranks divide, with padding; None: all parameters are whole.
        calls: the front's, for messages.
    """

    def __init__(
        self,
        steps: ZenFlowStep,
        parts: StepParts,
        names: Mapping[Tensor, str],
        numels: Sequence[int],
        piece_of: Callable[[Tensor], Tensor] | None,
        calls: Calls,
    ) -> None:
        self._steps, self._jobs, self._rank = steps, parts.jobs, parts.rank
        self._calls, self._piece_of = calls, piece_of
        self._names, self._parameters, self._numels = names, list(names), numels
        self._slices = {s.parameter: s for s in parts.rank.partition.slices}
        self._followed_until, self._found = 0, False
        self._kept = dict[int, Tensor]()
        self._compared: tuple[AsyncHostCopy, set[int]] | None = None
        self.note()

    @property
    def follows_step(self) -> bool:
        """Whether a write was shortly before the last step. The next one is likely then, and a flush behind the step makes what it meets
        exact.
        """
        return self._steps.number <= self._followed_until

    def note(self, *, behind_step: bool = False) -> None:
        """Takes what the model shows now for our own, behind a step, whose gather comes before, or behind a flush."""
        step = self._steps.number
        if not behind_step:
            self.note_gather()
        self._is_followed = not behind_step or step <= max(self._followed_until, FOLLOWED)
        # Knuth's multiplicative hash of the step's number, to meet what is written in every n-th step.
        is_sampled = step * 2654435761 % 2**32 < 2**27
        # In place, counters of pieces tell.
        sums = not self._rank.in_place and (self._is_followed or is_sampled)
        self._sums = self._sum() if sums else None

    def note_pass(self) -> None:
        """Takes what the model shows behind a backward pass that is not the step's last for our own: what is put back is no write."""
        if self._sums is None and not self._rank.in_place:
            self._sums = self._sum()

    def note_gather(self) -> None:
        """Takes the counters as our own, while our own updates change weights."""
        self._counters, self._arrived = self._read_counters(), set[int]()
        self.begin_updates()

    def note_arrival(self, number: int) -> None:
        """Notes that our own updates may write a parameter from here on in backward; torch refuses to use it then (`raise_late_read`)."""
        self._arrived.add(number)
        torch.autograd.graph.increment_version(self._parameters[number])

    def begin_updates(self) -> None:
        """Notes that our own updates change weights from here on, until `note`."""
        self._sums = None

    @property
    def _shows_exact(self) -> bool:
        """Whether the model's weights were those of all steps before the user's write."""
        schedule = self._jobs.schedule
        # Behind a change of the schedule, gradients may be late from before.
        nothing_late = self._jobs.shows_exact and (schedule.update_interval, schedule.publish_lag) == (1, 0)
        return self._steps.is_exact or nothing_late

    def look(self) -> bool:
        """Copies what the user has written since `note`, before a flush overwrites it.

        Returns:
            Whether there is something for `take_over`, on any rank.

        Raises:
            MisconfigurationException: the write cannot be taken over.
        """
        found, on_any_rank = self._counted(), self._found
        # Then only what is other by now has been written.
        between_passes = self._steps.micro_batches > 0
        if self._sums is not None:
            differs = self._sum() != self._sums
            if self._is_followed or found:
                with self._rank.telemetry.measure("flush"):
                    if self._rank.group is not None:
                        dist.all_reduce(
                            any_differs := differs.any().int(), op=dist.ReduceOp.MAX, group=self._rank.group
                        )
                        on_any_rank |= bool(any_differs)
                    changed = self._numbers(differs)
                    if between_passes and found - changed:
                        self._counters = self._read_counters()
                    found = changed if between_passes else found | changed
            else:
                self._compared = AsyncHostCopy(differs), found
        if self._compared is not None and self._compared[0].arrived:
            (copy, seen), self._compared = self._compared, None
            if unseen := self._numbers(copy.read()) - seen:
                self._refuse(
                    unseen,
                    "through `parameter.data`, which goes unnoticed behind most steps: write to the parameter itself,"
                    " under `torch.no_grad()`",
                )
        if found and not self._shows_exact:
            self._refuse(
                found,
                "in place while updates of it are pending: call the strategy's `flush()` before the first write, or set"
                " update_interval=1 and publish_lag=0",
            )
        # An interruption may come in the copies: a flush must not take what it cuts for noticed.
        self._kept |= {n: self._weights(n).to("cpu", copy=True) for n in self._slices.keys() & found}
        self._found = bool(found) or on_any_rank
        if self._found:
            self._followed_until = self._steps.number + FOLLOWED
        if found:
            self.note_gather()
        return self._found

    @torch.no_grad()
    def take_over(self) -> bool:
        """Makes what `look` has copied the model's and the master weights, right after a flush; returns whether there was something, on any
        rank. What the user has left as it was keeps its precision there.
        """
        for number, theirs in self._kept.items():
            s = self._slices[number]
            master = self._rank.arena.master.narrow(0, s.begin, s.numel)
            master.copy_(torch.where(theirs == master.to(theirs.dtype), master, theirs.to(master.dtype)))
            self._weights(number).copy_(theirs)
        found, self._found, self._kept = self._found, False, {}
        return found

    def refuse(self) -> None:
        """Refuses writes between backward and step, when updates are under way."""
        if found := self._counted():
            self._refuse(found, f"between backward and step: write it {self._calls.write}")

    def _counted(self) -> set[int]:
        """Numbers of the parameters whose counters have changed."""
        counters = self._read_counters()
        if counters == self._counters:
            return set()
        written, kept = (
            {i for i, (now, before) in enumerate(zip(*both, strict=True)) if now != before}
            for both in zip(counters, self._counters, strict=True)
        )
        # An arrival counts one, unless an interruption has come before.
        written -= {i for i in self._arrived if counters[0][i] == self._counters[0][i] + 1}
        if self._piece_of is None:
            return written
        # The last rank's pieces are padding only.
        pieces = {i: self._piece_of(self._parameters[i]).numel() for i in kept}
        missed = all(numel * (self._rank.n_ranks - 1) >= self._numels[i] for i, numel in pieces.items())
        if lost := written - kept or (kept if missed else set()):
            instead = (
                "in `deepspeed.zero.GatheredParameters(..., modifier_rank=0)`, and some rank must not have padding only"
            )
            self._refuse(lost, f"under stage=3 but {instead}, or with `deepspeed.utils.safe_set_full_fp32_param`")
        return kept

    def _read_counters(self) -> tuple[list[int], list[int]]:
        counter = attrgetter("_version")  # private: torch's
        pieces = [] if self._piece_of is None else [counter(self._piece_of(p)) for p in self._names]
        return list(map(counter, self._names)), pieces

    def _refuse(self, numbers: set[int], how: str) -> None:
        self.note_gather()  # once: what saves on the exception flushes
        name = list(self._names.values())[min(numbers)]
        raise MisconfigurationException(f"{self._calls.front}: {name} must not be written {how}")

    def _numbers(self, differs: Tensor) -> set[int]:
        return {number for number, other in zip(self._slices, differs.tolist(), strict=True) if other}

    def _weights(self, number: int) -> Tensor:
        s = self._slices[number]
        return self._rank.weights_at(s.param_group, s.begin, s.numel)

    def _sum(self) -> Tensor:
        """Sum of the bits of each slice: [slices] int32 on the device."""
        sums = [torch.zeros((), dtype=torch.int32, device=self._rank.device)]
        for weights in map(self._weights, self._slices):
            # A CPU adds 32 bits at the speed of memory, others 50 times slower.
            is_aligned = (weights.storage_offset() | weights.numel()) * weights.itemsize % 4 == 0
            sums.append(weights.view(torch.int32 if is_aligned else torch.int16).sum(dtype=torch.int32))
        return torch.stack(sums)[1:]
