"""A `Training` without DeepSpeed, Lightning and a process group: the real arena and worker, and gradients of a model or given by hand."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from cases import flatten, show
from harness import Case, Run, snapshot, state_of, untrained
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import Calls
from lightning_zenflow.core.step_inputs import GroupHyperparameters, read_hyperparameters
from lightning_zenflow.offload.build import Engine, RankPart, RankResources
from lightning_zenflow.training import Training
from lightning_zenflow.worker.machine import WorkerCores, allowed_cores
from oracle import slices_of_rank
from scripted_schedule import scripted


class DirectStep(Engine):
    """The step of a training, and the `Engine` around it. The weights lie in one flat tensor for each parameter group, as under DeepSpeed.

    Args:
        groups: weights by parameter group. Parameters then show what the step makes of them; tensors are copied.
        optimizer: of the user, with these groups; None: AdamW with fixed hyperparameters.
        loss_scale: factor of the loss.
        max_norm: largest norm of the gradient; 0: no clipping.
        in_place: whether the weights are in host memory, where the worker writes them.
        **keys: of the configuration.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        *,
        optimizer: Optimizer | None = None,
        loss_scale: float = 1.0,
        max_norm: float = 0.0,
        in_place: bool = False,
        **keys: Any,
    ) -> None:
        self.parameters = [w for group in groups for w in group]
        self.shown = [flatten(group) for group in groups]
        slices, _ = slices_of_rank(groups, rank=0, world_size=1)
        self.masters = [nn.Parameter(flat.float().cpu().clone()) for flat in self.shown]
        self.optimizer = optimizer or torch.optim.AdamW(
            [{"params": [w]} for w in self.masters], lr=0.02, betas=(0.9, 0.99), weight_decay=0.1
        )
        for group, master in zip(self.optimizer.param_groups, self.masters, strict=True):
            group["params"] = [master]
        names = {str(index): w for index, w in enumerate(self.parameters)}
        part = RankPart(
            optimizer=self.optimizer,
            groups=[names],
            masters=self.masters,
            slices=slices,
            weights=self.shown,
            device=self.shown[0].device,
            in_place=in_place,
            shapes={name: w.shape for name, w in names.items()},
            group=None,
        )
        config = ZenFlowConfig(**{"worker_timeout": 60, "worker_cores": 1, **keys})
        config = config.with_weights_on_host() if in_place else config
        cores = tuple(allowed_cores()[: config.worker_cores if isinstance(config.worker_cores, int) else 1])
        resources = RankResources(
            cores=WorkerCores(cores=cores, trainer_threads=1),
            ranks_on_host=1,
            word_timeout_s=config.worker_timeout,
        )
        self._groups, self.in_place, self._fetches = groups, in_place, in_place
        self.loss_scale = loss_scale
        self.training = Training(config, resources, Calls(), {})
        self.training.max_norm = max_norm
        self.training.start(part, self)
        self.parts, self.step = self.training.parts, self.training.steps
        if in_place:
            self._show(self.parts.rank.weights)

    def fetch(self, *indices: int) -> None:
        """Waits for the weights of some slices, or of all, as stage 3 does before it fetches them from where they are in place."""
        for index in (indices or range(len(self.parts.rank.partition.slices))) if self._fetches else ():
            self.parts.jobs.await_slice(index)

    def receive(self, index: int, gradient: Tensor, *, last: bool) -> None:
        """Gives one slice's gradient to the step, times the loss scale."""
        self.step.receive(index, gradient.flatten() * self.loss_scale, last=last)

    def backward(self, gradients: Sequence[Tensor], *, last: bool = True) -> None:
        """A micro-batch whose gradients arrive from the last parameter to the first."""
        for index in reversed(range(len(gradients))):
            self.receive(index, gradients[index], last=last)

    def join(self) -> None:
        """Ends a backward pass as DeepSpeed's optimizer does, behind the copies of gradients to the host."""
        self.parts.rank.d2h.join()

    def state(self) -> list[Tensor]:
        """Copies of master weights, moments and the weights that the model shows; exact right after a flush."""
        return [*state_of(self.parts.rank.arena), *(w.clone() for w in self.shown)]

    @property
    def count(self) -> float:
        """AdamW's step count, as checkpoints hold it."""
        return float(self.optimizer.state[self.masters[0]]["step"])

    def close(self) -> None:
        """Ends the worker and frees the memory; the weights remain."""
        self._fetches = False
        self.training.end(keep_state=False)

    @override
    def read_groups(self) -> list[GroupHyperparameters]:
        return read_hyperparameters(self.optimizer)

    @override
    def take_weights(self) -> None:
        """Shows copies of weights that are in place."""
        if self.in_place:
            self._show([flat.clone() for flat in self.shown])

    def _show(self, flats: Sequence[Tensor]) -> None:
        self.shown = list(flats)
        for flat, group in zip(self.shown, self._groups, strict=True):
            show(flat, group)


@contextmanager
def direct_step(groups: Sequence[Sequence[Tensor]], **options: Any) -> Iterator[DirectStep]:
    """A `DirectStep` that is closed at the end."""
    direct = DirectStep(groups, **options)
    try:
        yield direct
    finally:
        direct.close()


def run_case(case: Case, *, devices: int = 1) -> tuple[Run, list[Tensor]]:
    """As `harness.run_case`, without saves; every gradient goes to the step as soon as autograd has it."""
    assert devices == 1 and case.checkpoint is None
    run = Run()
    model = case.make_model().to(case.dtype)
    optimizer, scheduler = model.optimizer_and_scheduler()
    optimizer._opt_called = True  # private: as after torch's own step, without which schedulers warn
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    options: dict[str, Any] = {k: v for k, v in case.keys().items() if k != "reduce_bucket_size"}
    options["max_norm"] = case.max_norm or 0.0
    with (
        scripted(case.schedules) if case.schedules else nullcontext(),
        direct_step(groups, optimizer=optimizer, **options) as direct,
    ):
        step, last, traffic = direct.step, True, direct.parts.rank.telemetry

        def receive(p: Tensor, index: int) -> None:
            direct.receive(index, p.grad, last=last)
            p.grad = None

        for index, s in enumerate(direct.parts.rank.partition.slices):
            direct.parameters[s.parameter].register_post_accumulate_grad_hook(partial(receive, index=index))
        model.on_train_start()
        for number in range(case.steps):
            direct.fetch()
            run.shown.append(snapshot(model))
            run.losses.append([])
            for micro in range(case.accumulate):
                model.on_train_batch_start(torch.tensor(0), number * case.accumulate + micro)
                if micro == 0:
                    step.follow_freezing()
                loss = model.loss(number, micro, 0)
                last = micro == case.accumulate - 1
                step.begin_backward(last=last)
                before = traffic.h2d_bytes
                (loss / case.accumulate).backward()
                run.losses[-1].append(float(loss.detach() / case.accumulate) * case.accumulate)
                model.on_train_batch_end(None, torch.tensor(0), number * case.accumulate + micro)
            in_backward = traffic.h2d_bytes - before
            run.factors.append(float(step.step()[0].factor))
            run.h2d_bytes.append((in_backward, traffic.h2d_bytes - before - in_backward))
            if scheduler:
                scheduler.step()
            if number + 1 in case.flush_after:
                step.flush()
        step.flush()
        run.weights, run.untrained = snapshot(model), untrained(model)
        run.skipped = int(traffic.skipped)
        run.in_backward_jobs = direct.parts.read_counters().in_backward_jobs
        run.counts = [direct.count] * len(direct.masters)
        return run, state_of(direct.parts.rank.arena)
