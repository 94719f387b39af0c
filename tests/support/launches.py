"""Counts what the optimizer step launches on a CUDA device, without one: `TritonKernels`, whose launches are counted and not run.

A launch is a kernel of torch, a kernel of Triton or a copy.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_zenflow.offload.provisional_update import ProvisionalUpdate
from lightning_zenflow.offload.step import ZenFlowStep

_FOREACH, _CAT = 64, 128
"""Tensors that one kernel of `torch._foreach_copy_` and of `torch.cat` takes."""


class LaunchCounter(TorchDispatchMode):
    """Counts torch's launches while it is entered, and all others at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.of_steps: list[Counter[str]] = []
        self.host: list[Tensor] = []
        """What is taken for the host's memory."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "_foreach_copy_":
            on_host = [self._is_host(target) or self._is_host(source) for target, source in zip(*args[:2], strict=True)]
            # Between device and host memory, torch copies tensor by tensor.
            self.counts[name] += sum(on_host) + -(-on_host.count(False) // _FOREACH)
        elif name == "cat":
            # Those of several types are copied one by one.
            self.counts[name] += -(-len(args[0]) // (_CAT if len({part.dtype for part in args[0]}) == 1 else 1))
        elif name == "pow" and isinstance(args[0], (int, float)):
            self.counts[name] += 2  # the base becomes a tensor
        elif not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view", "detach")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def _is_host(self, tensor: Tensor) -> bool:
        begin = tensor.data_ptr()
        return any(
            h.data_ptr() <= begin < h.untyped_storage().data_ptr() + h.untyped_storage().nbytes() for h in self.host
        )


class _NotRun:
    """In the place of a Triton kernel."""

    def __init__(self, name: str, counter: LaunchCounter) -> None:
        self._name, self._counter = name, counter

    def __getitem__(self, grid: Any) -> "_NotRun":
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        self._counter.counts[self._name] += 1
        if self._name == "route":
            # Squared norms that are finite, so that the run goes on as usual.
            for parts in args[1:4]:
                parts.numpy().fill(1.0)
        elif self._name == "block_word":
            # With the factor 1.
            one, step = 0x3F800000, args[10]
            args[8].numpy()[:] = one | (one ^ step) << 32, step


@contextmanager
def counted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchCounter]:
    """Trainings in this context run the code of CUDA; `of_steps` has the launches of `ZenFlowStep` in each of their steps."""
    from lightning_zenflow.kernels import triton

    counter = LaunchCounter()

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(step: ZenFlowStep, *args: Any, **options: Any) -> Any:
            arena = step._rank.arena
            counter.host = [arena.slots, arena.publish]
            with counter:
                result = method(step, *args, **options)
            if method.__name__ == "step":
                counter.of_steps.append(Counter(counter.counts))
                counter.counts.clear()
            return result

        return call

    keep = ProvisionalUpdate._keep

    def keep_on_device(*args: Any) -> None:
        counter.counts["clone"] += 1
        keep(*args)

    with monkeypatch.context() as patch:
        patch.setattr("lightning_zenflow.offload.build.kernels_for", lambda device: triton.TritonKernels())
        for name in (
            *("route", "factored_step", "provisional_update", "adamw", "gather_columns", "write_columns"),
            "block_word",
        ):
            patch.setattr(triton.device, name, _NotRun(name, counter))
        for method in (ZenFlowStep.begin_backward, ZenFlowStep.receive, ZenFlowStep.step):
            patch.setattr(ZenFlowStep, method.__name__, counting(method))
        patch.setattr(ProvisionalUpdate, "_keep", keep_on_device)
        yield counter
