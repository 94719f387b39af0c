"""What the user's code finds and does between two steps: weights that it writes in place become master weights, as under a torch optimizer;
and in `parameter.grad` stands a mark, from a backward pass to `zero_grad`, of gradients that have been taken in backward.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves  # private: torch's own way to look at arguments of `__torch_dispatch__`
from typing_extensions import Self

from lightning_zenflow.core.device import AsyncHostCopy
from lightning_zenflow.core.errors import Calls, MisconfigurationException
from lightning_zenflow.deepspeed.parameters import is_divided
from lightning_zenflow.offload.rank_state import RankState
from lightning_zenflow.offload.run_state import StepParts
from lightning_zenflow.offload.step import ZenFlowStep
from lightning_zenflow.offload.weights_in_update import WeightsInUpdate

FOLLOWED = 16
"""Steps after the start, and after each write, in which writes through `parameter.data` are looked for in every one."""


def _instead(calls: Calls) -> str:
    return (
        f"under {calls.front} gradients are taken in backward: read them with `deepspeed.utils.safe_get_full_grad` {calls.read}; change"
        f" them in backward, with `parameter.register_hook(lambda gradient: ...)`; clip them by `{calls.clip}`; drop those of a whole step"
        " with `optimizer.zero_grad()`; to leave a parameter as it is, call `parameter.requires_grad_(False)` before the forward pass"
    )


class WrittenWeights:
    """Notices what the user has written to a model's weights, by torch's counters of writes in place: neither our own writes nor
    DeepSpeed's gathers change those of the parameters, and of the pieces only the end of `GatheredParameters` does.

    Writes through `parameter.data` change no counter. Sums find them, behind flushes and `FOLLOWED` steps, in which the host waits for the
    device, and behind one step in 32 others, in which they are refused when the device is there. All ranks call all methods together.

    Args:
        rank: the rank's weights and master weights.
        names: of all parameters that are trained, in the order in which `Slice.parameter` counts them.
        group: data-parallel ranks.
        calls: the front's, for messages.
    """

    def __init__(self, rank: RankState, names: dict[Any, str], *, group: dist.ProcessGroup, calls: Calls) -> None:
        self._calls = calls
        self._rank, self._names, self._parameters, self._group = rank, names, list(names), group
        self._n_ranks, self._is_divided = dist.get_world_size(group), any(map(is_divided, names))
        self._slices = {s.parameter: s for s in rank.partition.slices}
        self._followed_until, self._found = 0, False
        self._kept = dict[int, Tensor]()
        self._compared: tuple[AsyncHostCopy, set[int]] | None = None
        self.note()

    def follows(self, step: int) -> bool:
        """Whether a write was shortly before a step. The next one is likely then, and a flush behind the step makes what it meets exact."""
        return step <= self._followed_until

    def note(self, step: int | None = None) -> None:
        """Takes what the model shows now for our own, behind a step, whose gather comes before, or a flush (None)."""
        if step is None:
            self.note_gather()
        self._is_followed = step is None or step <= max(self._followed_until, FOLLOWED)
        # Others by Knuth's multiplicative hash, to meet what is written in every n-th step. In place, counters of pieces tell.
        sums = not self._rank.in_place and (self._is_followed or step * 2654435761 % 2**32 < 2**27)  # type: ignore[operator]
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

    def look(self, step: int, *, shows_exact: bool, between_passes: bool = False) -> bool:
        """Copies what the user has written since `note`, before a flush overwrites it.

        Args:
            step: number of steps so far.
            shows_exact: whether the model's weights were those of all steps before the user's write.
            between_passes: whether there was a backward pass since the last step, behind which only what is other by now has been written.

        Returns:
            Whether there is something for `take_over`, on any rank.

        Raises:
            MisconfigurationException: the write cannot be taken over.
        """
        found, on_any_rank = self._counted(), self._found
        if self._sums is not None:
            differs = self._sum() != self._sums
            if self._is_followed or found:
                with self._rank.telemetry.measure("flush"):
                    if self._n_ranks > 1:
                        dist.all_reduce(any_differs := differs.any().int(), op=dist.ReduceOp.MAX, group=self._group)
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
        if found and not shows_exact:
            self._refuse(
                found,
                "in place while updates of it are pending: call the strategy's `flush()` before the first write, or set"
                " update_interval=1 and publish_lag=0",
            )
        # An interruption may come in the copies: a flush must not take what it cuts for noticed.
        self._kept |= {n: self._weights(n).to("cpu", copy=True) for n in self._slices.keys() & found}
        self._found = bool(found) or on_any_rank
        if self._found:
            self._followed_until = step + FOLLOWED
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
        if not self._is_divided:
            return written
        parameters = self._parameters
        missed = all(p.partition_numel() * (self._n_ranks - 1) >= p.ds_numel for p in (parameters[i] for i in kept))
        if lost := written - kept or (kept if missed else set()):
            instead = (
                "in `deepspeed.zero.GatheredParameters(..., modifier_rank=0)`, and some rank must not have padding only"
            )
            self._refuse(lost, f"under stage=3 but {instead}, or with `deepspeed.utils.safe_set_full_fp32_param`")
        return kept

    def _read_counters(self) -> tuple[list[int], list[int]]:
        counter = attrgetter("_version")  # private: torch's
        pieces = list(map(counter, [p.ds_tensor for p in self._names])) if self._is_divided else []
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


class TakenGradient(Tensor):
    """Of the shape and type of a parameter's gradient, with memory for one element; refuses to be read or changed."""

    _calls: Calls

    @staticmethod
    def __new__(cls, parameter: Tensor, calls: Calls) -> Self:
        """The one for parameters of this shape, type and device."""
        # Private: torch's constructor of subclasses that see operations.
        taken: Self = Tensor._make_subclass(cls, parameter.detach().new_zeros(()).expand(parameter.shape))
        taken._calls = calls
        return taken

    # Functions of torch go on to `__torch_dispatch__`; what compiles a module may look at shapes and types.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's documentation has it

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]  # torch's has no `func`
        """Refuses every operation."""
        (taken, *_) = (t for t in tree_leaves((args, kwargs)) if isinstance(t, cls))
        taken._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise MisconfigurationException(
            f"`parameter.grad` must not be used between backward and `zero_grad`: {_instead(self._calls)}"
        )

    # What torch refuses in its own name, or answers without an operation.
    tolist = numpy = storage = map_ = __array__ = __reduce_ex__ = __format__ = _refuse
    __bool__ = __float__ = __int__ = __index__ = _refuse


class TakenGradients:
    """`TakenGradient` in the parameters of a model, as long as torch would have gradients there.

    Args:
        names: of all parameters that are trained.
        calls: the front's, for messages.
    """

    def __init__(self, names: Mapping[Tensor, str], calls: Calls) -> None:
        self._names, self._calls = names, calls
        self._of_shape: dict[torch.Size, TakenGradient] = {}
        self._are_put = self._are_shown = False

    def mark(self) -> None:
        """Puts them into the parameters, after a backward pass."""
        # First: who is interrupted below removes what has been put in.
        self._are_put = True
        for p in self._names:
            # Under stage 3 parameters have another shape where they are gathered.
            if p.shape not in self._of_shape:
                self._of_shape[p.shape] = TakenGradient(p, self._calls)
            p.grad = self._of_shape[p.shape]
        self._are_shown = True

    def show(self) -> None:
        """Ends `hide`."""
        if self._are_put:
            self.mark()

    def hide(self) -> None:
        """Takes them out of the parameters in a forward pass, in which there may be a backward pass of the user's own."""
        if self._are_put:
            self._are_shown = False
            for p in self._names:
                p.grad = None

    def clear(self) -> None:
        """Removes them, before a backward pass and before the parameters are given back."""
        self.hide()
        # Last: who is interrupted before does it again.
        self._are_put = False

    def are_dropped(self, *, pending: bool) -> bool:
        """Whether the user's code has dropped them, by `module.zero_grad()`; refuses others, and some while a step is `pending`."""
        marked = self._names.items() if self._are_shown else ()
        replaced = {name: p.grad for p, name in marked if not isinstance(p.grad, TakenGradient)}
        in_part = 0 < len(replaced) < len(self._names)
        if (pending and in_part) or any(gradient is not None for gradient in replaced.values()):
            raise MisconfigurationException(
                f"{', '.join(replaced)}: `grad` must not be assigned between backward and step: {_instead(self._calls)}"
            )
        return bool(replaced) and not in_part

    def refuse_accumulation(self) -> None:
        """Refuses gradients that were there before a step's first backward pass, to which torch would add."""
        if any(isinstance(p.grad, TakenGradient) for p in self._names):
            raise MisconfigurationException(
                f"`optimizer.zero_grad()` must come before the first backward pass of each step: {self._calls.front} does not keep"
                f" gradients of a step that is done; to accumulate them before it, {self._calls.accumulate}"
            )

    def refuse_second_step(self) -> None:
        """Refuses a step by gradients that a step before has used."""
        if self._are_put:
            raise MisconfigurationException(
                f"{self._calls.front}: a step must have a backward pass of its own, got a second call of `optimizer.step` behind one"
            )


class BetweenSteps:
    """What the user's code finds and does between the steps of one training, in the order of a step: `follow_dropped` and `follow_writes`
    before its first backward pass, `complete` before its updates begin, `end_backward` behind each pass, `end` before the step.

    Args:
        step: the rank's step.
        parts: its components.
        names: of all parameters that are trained, in the order in which `Slice.parameter` counts them.
        group: data-parallel ranks.
        calls: the front's, for messages.
        updates_in_backward: whether weights may be written during backward.
        flush: takes over what was written.

    Attributes:
        taken: what stands in `parameter.grad`.
        written: what notices writes.
        in_update: what refuses uses of weights between backward and step.
    """

    def __init__(
        self,
        step: ZenFlowStep,
        parts: StepParts,
        names: dict[Any, str],
        group: dist.ProcessGroup,
        calls: Calls,
        *,
        updates_in_backward: bool,
        flush: Callable[[], None],
    ) -> None:
        self._step, self._jobs, self._flush = step, parts.jobs, flush
        self._updates_in_backward = updates_in_backward
        self.taken = TakenGradients(names, calls)
        self.written = WrittenWeights(parts.rank, names, group=group, calls=calls)
        self.in_update = WeightsInUpdate(parts.rank.weights, names, calls)

    def follow_dropped(self) -> None:
        """Drops the gradients since the last step if the user's code has, by `module.zero_grad()`; Lightning does before a validation."""
        if self.taken.are_dropped(pending=self._step.micro_batches > 0):
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drops the gradients since the last step."""
        self.end()
        self._step.drop_gradients()

    def follow_writes(self) -> None:
        """Takes over what the user's code has written since the last step. What it writes between two backward passes of a step is for the
        next of them, and may be put back before `complete`.
        """
        if self._step.micro_batches == 0 and self.has_found_writes():
            self._flush()

    def has_found_writes(self) -> bool:
        """`WrittenWeights.look`."""
        step, schedule = self._step, self._jobs.schedule
        # Behind a change of the schedule, gradients may be late from before.
        nothing_late = self._jobs.shows_exact and (schedule.update_interval, schedule.publish_lag) == (1, 0)
        shows_exact = step.is_exact or nothing_late
        return self.written.look(step.number, shows_exact=shows_exact, between_passes=step.micro_batches > 0)

    def complete(self) -> None:
        """`ZenFlowStep.complete`: updates begin. What is still written then is taken over before."""
        if self._step.micro_batches and not self._step.is_complete:
            if self.has_found_writes():
                self._flush()
            self._step.complete()

    def end_backward(self) -> None:
        """Puts marks in the place of the gradients; weights are not to be used where updates are under way."""
        self.taken.mark()
        if not self._step.is_complete:
            self.written.note_pass()
        self._guard()

    def _guard(self) -> None:
        if self._updates_in_backward and self._step.has_gradients:
            self.in_update.begin()

    def gradient_norm(self) -> Tensor:
        """`ZenFlowStep.gradient_norm`."""
        self.in_update.end()
        self.complete()
        norm = self._step.gradient_norm()
        self._guard()
        return norm

    def end(self) -> None:
        """Removes the marks, and allows all uses of weights, until the next backward pass."""
        self.in_update.end()
        self.taken.clear()
