"""Uses of weights and gradients by the user's code between two steps: weights that are written in place become master weights, as under a
torch optimizer; gradients that backward has taken can be read; weights of which some are updated already must not be used.
"""

import itertools
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves  # private: torch's own way to look at arguments of `__torch_dispatch__`
from typing_extensions import override

from lightning_zenflow.between_steps.full_state import FullState
from lightning_zenflow.between_steps.served_gradients import ServedGradient, StepGradients
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.device import AsyncHostCopy
from lightning_zenflow.core.errors import Calls, MisconfigurationException, other_backward
from lightning_zenflow.core.partition import Slice
from lightning_zenflow.core.shards import as_shard, local_part
from lightning_zenflow.core.step_inputs import GivenFactor
from lightning_zenflow.offload.build import Engine, RankPart
from lightning_zenflow.offload.run_state import StepParts
from lightning_zenflow.offload.step import ZenFlowStep

FOLLOWED = 16
"""Steps after the start, and after each write, in which writes through `parameter.data` are looked for in every one."""


class WrittenWeights:
    """Notices writes to a model's weights by torch's counters of writes in place: neither our own writes nor DeepSpeed's gathers change
    those of the parameters, and of the pieces only the end of `GatheredParameters` does. Writes through `parameter.data` change no counter.
    Sums find them, behind flushes and `FOLLOWED` steps, in which the host waits for the device, and behind one step in 32 others, in which
    they are refused when the device is there. All ranks call all methods together.

    In the order of a step: `begin_updates` where updates begin, `note_arrival` for each gradient from there on, `refuse` before the step,
    `note` behind it. Before the next step's first pass, and before each flush, `look` copies what differs from what was noted; right after
    the flush, `take_over` makes the copies the master weights.
    """

    def __init__(self, steps: ZenFlowStep, parts: StepParts, part: RankPart, calls: Calls) -> None:
        self._steps, self._jobs, self._rank, self._moves = steps, parts.jobs, parts.rank, parts.moves
        self._calls, self._piece_of, self._slices = calls, part.piece_of, parts.rank.partition.slices
        self._names, self._parameters = list(part.parameters), list(part.parameters.values())
        self._numels = [shape.numel() for shape in part.shapes.values()]
        self._followed_until, self._found = 0, False
        self._kept = dict[int, Tensor]()  # by the slice's index
        self._compared: tuple[AsyncHostCopy, set[int]] | None = None
        self.note()

    @property
    def follows_step(self) -> bool:
        """Whether the last step was one of the `FOLLOWED` behind a write: a flush behind it makes what the next write meets exact."""
        return self._steps.number <= self._followed_until

    def note(self, *, behind_step: bool = False) -> None:
        """Takes what the model shows now for our own, behind a step and its gather, or behind a flush."""
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
        """Notes that updates in backward may write a parameter from here on; autograd refuses to use it then (`naming_late_reads`)."""
        self._arrived.add(number)
        torch.autograd.graph.increment_version(self._parameters[number])

    def begin_updates(self) -> None:
        """Notes that our own updates change weights from here on, until `note`."""
        self._sums = None

    def look(self) -> bool:
        """Copies what the user has written since `note`, before a flush, or refuses it; returns whether any rank has to `take_over`."""
        found, on_any_rank = self._counted(), self._found
        # Between passes only what differs has been written.
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
        schedule = self._jobs.schedule
        # Whether the weights were those of all steps before. Behind a change of the schedule, gradients may be late from before it.
        nothing_late = self._jobs.shows_exact and (schedule.update_interval, schedule.publish_lag) == (1, 0)
        if found and not (self._steps.is_flushed or nothing_late):
            self._refuse(
                found,
                "in place while updates of it are pending: call the strategy's `flush()` before the first write, or set"
                " update_interval=1 and publish_lag=0",
            )
        # An interruption may cut the copies: a flush must not take what is missing for noticed.
        written = [(index, s) for index, s in enumerate(self._slices) if s.parameter in found]
        self._kept |= {index: self._weights(s).to("cpu", copy=True) for index, s in written}
        self._found = bool(found) or on_any_rank
        if self._found:
            self._followed_until = self._steps.number + FOLLOWED
        if found:
            self.note_gather()
        return self._found

    @torch.no_grad()
    def take_over(self) -> bool:
        """Makes what `look` has found the model's weights and, where elements differ, the master weights; right after a flush."""
        if self._kept:
            self._moves.write_by_owners(self._steps.number)
        for index, written in self._kept.items():
            masters = list(self._rank.masters_of(index))
            for master, part in zip(masters, torch.split(written, list(map(len, masters))), strict=True):
                theirs = part.to(master.device)
                master.copy_(torch.where(theirs == master.to(theirs.dtype), master, theirs.to(master.dtype)))
            self._weights(self._slices[index]).copy_(written)
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
        pieces = [] if self._piece_of is None else [counter(self._piece_of(p)) for p in self._parameters]
        return list(map(counter, self._parameters)), pieces

    def _refuse(self, numbers: set[int], how: str) -> None:
        self.note_gather()  # once: what saves on the exception flushes
        name = self._names[min(numbers)]
        raise MisconfigurationException(f"{self._calls.front}: {name} must not be written {how}")

    def _numbers(self, differs: Tensor) -> set[int]:
        return {s.parameter for s, other in zip(self._slices, differs.tolist(), strict=True) if other}

    def _weights(self, s: Slice) -> Tensor:
        return self._rank.weights_at(s.param_group, s.begin, s.numel)

    def _sum(self) -> Tensor:
        """Sum of the bits of each slice: [slices] int32 on the device."""
        sums = [torch.zeros((), dtype=torch.int32, device=self._rank.device)]
        for weights in map(self._weights, self._slices):
            # A CPU adds 32 bits at the speed of memory, others 50 times slower.
            is_aligned = (weights.storage_offset() | weights.numel()) * weights.itemsize % 4 == 0
            sums.append(weights.view(torch.int32 if is_aligned else torch.int16).sum(dtype=torch.int32))
        return torch.stack(sums)[1:]


class ServedGradients:
    """`ServedGradient` in `grad` of the parameters that have a gradient of the step that is next, of a DTensor as its local shard: from its
    arrival on if the engine has `add_gradient`, otherwise from the end of a backward pass to the next one.

    Attributes:
        follows_factors: whether a factor of the user's can be in all weights that a forward pass sees, or is learned.
        max_norm: to which the front has clipped the gradients; None: it has not.
    """

    def __init__(self, state: FullState, engine: Engine, config: ZenFlowConfig, calls: Calls) -> None:
        self.state, self._engine, self._calls, self._add = state, engine, calls, engine.add_gradient
        # Who puts them at their arrival has its factors learned.
        is_true = self._add is not None or not (config.predicts_clipping and config.submits_in_backward)
        self.follows_factors = config.is_immediate and is_true
        self._of_parameter = {
            p: as_shard(ServedGradient(local_part(p), state.shapes[name], name, weakref.proxy(self)), p)
            for p, name in state.names.items()
        }
        self._put: dict[Tensor, None] = {}
        self._asked: StepGradients | None = None
        self.max_norm: float | None = None

    def put(self, parameter: Tensor) -> None:
        """Puts the stand-in into a parameter whose gradient has been received."""
        # First: `clear` after an interruption removes what has been put in.
        self._put[parameter] = None
        served = self._of_parameter[parameter]
        if served.shape == parameter.shape:
            parameter.grad = served
        else:
            assert isinstance(served, ServedGradient), "a DTensor has its parameter's shape"
            served.put_into(parameter)

    def stands_in(self, parameter: Tensor) -> bool:
        """Whether `grad` of a parameter is the stand-in."""
        return parameter.grad is not None and parameter.grad is self._of_parameter.get(parameter)

    def begin_pass(self) -> None:
        """Before a backward pass; as `change`."""
        self.change()
        self.max_norm = None
        if self._add is None:
            self.clear()

    def change(self) -> None:
        """Before a gradient arrives, behind which nothing holds that has been asked of them; MisconfigurationException: some are scaled."""
        if self._asked is not None and self._asked.factors:
            raise self.error(
                "a backward pass must not add to gradients that have been scaled: scale or clip behind the last one"
            )
        self._asked = None

    def mark(self, trained: Iterable[bool]) -> None:
        """Behind a backward pass: puts those of all parameters that the step updates, unless each is put at its arrival."""
        if self._add is None:
            for p in itertools.compress(self.state.names, trained):
                self.put(p)

    def clear(self) -> None:
        """Removes them: before a backward pass, where the step is dropped, and at the end of training."""
        for p in self._put:
            if self.stands_in(p):
                p.grad = None
        # Last: after an interruption `clear` does it again.
        self._put.clear()
        self.forget()

    def forget(self) -> None:
        """Forgets what has been asked of the gradients, which are there no longer or change."""
        self._asked = self.max_norm = None

    def are_dropped(self, *, pending: bool) -> bool:
        """Whether the user's code has removed them, by `module.zero_grad()`; refuses others, and some while a step is `pending`."""
        replaced = {self.state.names[p]: p.grad for p in self._put if not self.stands_in(p)}
        in_part = 0 < len(replaced) < len(self._put)
        if (pending and in_part) or any(gradient is not None for gradient in replaced.values()):
            raise self.error(f"`grad` of {', '.join(replaced)} must not be assigned between backward and step")
        return bool(replaced) and not in_part

    @property
    def are_there(self) -> bool:
        """Whether some stand in, be the step done or not."""
        return any(map(self.stands_in, self._put))

    def factor(self) -> GivenFactor | None:
        """`StepGradients.factor`."""
        return None if self._asked is None else self._asked.factor()

    def of_step(self) -> StepGradients:
        """Gradients of the step that is next; MisconfigurationException: there are none."""
        if not (self._put and self.state.has_gradients):
            raise self.error("`parameter.grad` must be used before `optimizer.step()`, got a use behind it")
        if self._asked is None:
            self._asked = StepGradients(self, (self.state.names[p] for p in self._put), self._engine.loss_scale)
        return self._asked

    def add(self, name: str, gradient: Tensor) -> None:
        """Receives the gradient of a further micro-batch, which autograd adds to the one of a parameter."""
        # Private: as `torch.utils.checkpoint`.
        if torch._C._current_graph_task_id() == -1:
            raise self.error("something other than a backward pass would change it")
        if self._add is None:
            raise other_backward(self._calls)
        self._add(self.state.parameters[name], gradient)

    def error(self, what: str) -> MisconfigurationException:
        """The error for a use of a gradient that cannot be served."""
        calls = self._calls
        return MisconfigurationException(
            f"{calls.front}: {what}: gradients are taken in backward; read them {calls.read}; change them in backward, with"
            f" `parameter.register_hook(lambda gradient: ...)`; clip them all by `{calls.clip}`; drop those of a whole step with"
            " `optimizer.zero_grad()`; to leave a parameter as it is, call `parameter.requires_grad_(False)` before the forward pass"
        )


# Private: torch's documented way to see each operation, and its stack of those who do. Neither has a public name.
class WeightsInUpdate(TorchDispatchMode):  # type: ignore[no-untyped-call]  # nor are the methods typed
    """Refuses operations of torch that read or write the weights' memory, from `begin` to `end`, in the thread that calls both: a forward
    pass, a copy, `state_dict`, pickling. An operation that is refused has changed nothing. What reads the memory without an operation is
    not seen: `tolist` of a weight on the CPU. `weights` are flat tensors in whose memory all trained weights are, or this rank's pieces.
    While `is_paused` all is allowed, for hooks whose result is dropped.
    """

    def __init__(self, weights: Iterable[Tensor], part: RankPart, calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {_storage(flat) for flat in weights}
        # It may stay on torch's stack when nothing else of the training is left.
        self._names = [(weakref.ref(p), name) for name, p in part.parameters.items()]
        self._piece_of, self._calls = part.piece_of, calls
        self.is_active = self.is_paused = False

    def begin(self) -> None:
        """Refuses from here on."""
        modes = _get_current_dispatch_mode_stack()
        others = [mode for mode in modes if mode is self or not (isinstance(mode, WeightsInUpdate) and mode.is_left)]
        if not others:
            _set_modes([])
            # Compiled code runs as it is written then, and is seen.
            self.__enter__()  # type: ignore[no-untyped-call]
        elif self not in others:
            # Below what the user has entered: torch removes the last one where a `with` ends, whichever that is.
            _set_modes([self, *others])
        self.is_active, self.is_paused = True, False

    def end(self) -> None:
        """Allows all again; may be called at any time."""
        self.is_active = self.is_paused = False
        modes = _get_current_dispatch_mode_stack()
        if modes == [self] and self.old_dispatch_mode_flags:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        elif self in modes:
            _set_modes([mode for mode in modes if mode is not self])

    @property
    def is_left(self) -> bool:
        """Whether it is without effect: paused, ended in another thread, or left by a training that is gone."""
        return self.is_paused or not self.is_active or all(p() is None for p, _ in self._names)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_left:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and _storage(value) in self._storages:
                    self._refuse(value, "written" if func._schema.is_mutable else "read")
        return func(*args, **kwargs)

    def _refuse(self, used: Tensor, how: str) -> None:
        address = used.data_ptr()
        parameters = ((alive, name) for p, name in self._names if (alive := p()) is not None)
        pieces = ((p if self._piece_of is None else self._piece_of(p), name) for p, name in parameters)
        names = [name for piece, name in pieces if 0 <= address - piece.data_ptr() < max(1, piece.nbytes)]
        raise MisconfigurationException(
            f"{self._calls.front}: {(names or ['a weight'])[0]} must not be {how} between backward and step, by a forward pass or"
            f" otherwise, when some weights are updated and others are not: do it {self._calls.write}; for a step of several micro-batches"
            f" {self._calls.accumulate}; or set update_interval=1 and overlap_step=False, which update weights in the step"
        )


def _set_modes(modes: Sequence[TorchDispatchMode]) -> None:
    """Makes these torch's stack, the last one being asked first."""
    for _ in _get_current_dispatch_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def _storage(tensor: Tensor) -> int | None:
    """Address of the tensor's storage object, whose memory may change; None: there is none."""
    # Private: both. Subclasses and sparse tensors may have no storage.
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None
