"""Memory, traffic and step times of ZenFlow, by formula and by a simulation of its schedule. Pure Python."""

from collections.abc import Sequence
from functools import cache

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.estimate.byte_counts import MOMENT_BYTES, STATE_BYTES, arena_bytes_of, replay_bytes
from lightning_zenflow.estimate.machine import GB, Machine, Workload
from lightning_zenflow.estimate.simulation import SimulatedStep, simulate
from lightning_zenflow.schedule.auto_policy import SchedulePolicy
from lightning_zenflow.schedule.candidates import candidates_of, that_fit
from lightning_zenflow.schedule.staggered import UpdateSchedule, blocks_wanted, bucket_size

BACKWARD_SHARE = 2 / 3
"""Share of backward in a step's time: it computes two matrix products for each one of the forward pass."""

_SIMULATED_STEPS, _SETTLED_STEPS = 1000, 256
"""Length of a simulation with `auto`, and its part at the end that is averaged. A fixed schedule needs fewer steps to settle."""


def replay_core_s(n_steps: int) -> float:
    """Arithmetic of one job on one core, in seconds per parameter.

    In its first-level cache, an Intel core took 0.42 ns for an update with 512-bit vectors, which division and square root bound, and 0.05
    to 0.1 ns more for a job. In `benchmarks.kernel`, where memory takes part, S = 4, 8 and 16 took 1.9, 3.7 and 7.3 ns of a core there, and
    1.4, 3.2 and 6.1 ns on a Zen core.
    """
    return (0.1 + 0.42 * n_steps) * 1e-9


class ZenFlowCost:
    """Cost of one rank.

    Gradients are copied during the last micro-batch's backward; the excess delays the step. Each step copies 1/S of the weights to the
    device. These copies hide in backward if there is a lag, or if gradients are submitted in backward (d = 0),
    except for one block whose job may be done too late; otherwise they are exposed.

    Copies and worker share the host's memory bandwidth; with few cores, the worker's arithmetic takes longer than its memory traffic. The
    device's own work, provisional updates and AdamW of the device-owned columns, is assumed to take as long as the AdamW that it replaces.

    With `accumulate_on: host`, sums over micro-batches cross PCIe in both directions on the training stream; auto counts as device.
    Gradients that are reapplied after a publish stay on the device where it has room, and are read back over PCIe elsewhere.

    Args:
        workload: the training.
        machine: the hardware.
        config: ZenFlow's keys.

    Attributes:
        tail: largest share of the blocks in the tail.
        owns_tail: whether the device owns their weights.
    """

    def __init__(self, workload: Workload, machine: Machine, config: ZenFlowConfig) -> None:
        self._workload, self._machine, self._config = workload, machine, config
        self._in_backward = config.submits_in_backward
        self._partition = workload.partition_numel(machine.gpus)
        self._n_blocks = blocks_wanted(config.update_intervals, in_backward=self._in_backward, numel=self._partition)
        self._moment_bytes = MOMENT_BYTES[config.moments_dtype]
        self._weight_bytes = workload.dtype_bytes * self._partition
        self._upload_s = self._weight_bytes / machine.pcie_bytes_per_s
        self._last_backward_s = BACKWARD_SHARE * workload.step_s / workload.accumulate_grad_batches
        self._sums = workload.accumulate_grad_batches - 1 if config.accumulate_on == "host" else 0
        self._has_provisional_update = config.compensation.updates_provisionally
        self._factor_bytes = self._has_provisional_update * 4 * workload.model.factor_numel / machine.gpus
        self._owned_numel = workload.model.device_owned_numel(config.owned_ratio) / machine.gpus
        self._owned_bytes = (STATE_BYTES + workload.dtype_bytes) * self._owned_numel
        self._device_bytes = self._fixed_device_bytes()
        self._cores = self._worker_cores()
        self._steps = self._simulate()
        self._schedules = sorted({step.schedule for step in self._steps})
        self.tail, self.owns_tail = max(step.tail for step in self._steps), False
        tail_bytes = (STATE_BYTES + workload.dtype_bytes) * self.tail * self._partition
        has_room = self._device_bytes + self._late_bytes() + tail_bytes <= machine.gpu_mem * GB
        may_own = config.tail == "device" or (config.tail == "auto" and has_room and not config.offload)
        self.owns_tail = self.tail > 0 and may_own
        if self.owns_tail:
            self._device_bytes += tail_bytes

    def settled_steps(self) -> list[SimulatedStep]:
        """The last simulated steps, whose schedule no longer changes."""
        return self._steps[-_SETTLED_STEPS:]

    def peak_device_bytes(self) -> float:
        """Device memory without activations, with the most gradients kept that any schedule of the run keeps."""
        return self._device_bytes + self._late_bytes() + max(map(self._kept_bytes, self._schedules))

    def host_bytes(self) -> float:
        """Host memory of the arena."""
        return self._arena_bytes(self._schedules, n_late=round(self.tail * self._n_blocks))

    def _arena_bytes(self, schedules: Sequence[UpdateSchedule], *, n_late: int) -> float:
        return arena_bytes_of(
            self._partition,
            n_blocks=self._n_blocks,
            schedules=schedules,
            dtype_bytes=self._workload.dtype_bytes,
            owned_numel=self._owned_numel,
            offload=self._config.offload,
            in_backward=self._in_backward,
            n_late=n_late,
            moment_bytes=self._moment_bytes,
        )

    def d2h_bytes(self) -> float:
        """Gradients and sums over micro-batches in a step."""
        return self._weight_bytes * (1 + self._sums)

    def h2d_bytes(self, schedule: UpdateSchedule) -> float:
        """Published weights, sums over micro-batches and gradients read back in a step."""
        shown = 1 - self.tail if self.owns_tail and schedule.publish_lag == 0 else 1.0
        return self._weight_bytes * (shown / schedule.update_interval + self._sums) + self._read_back_bytes(schedule)

    def exposed_copy_s(self, schedule: UpdateSchedule) -> float:
        """Copies in a step that no computation hides."""
        late_s = max(0.0, self._upload_s - self._last_backward_s)
        read_back_s = self._read_back_bytes(schedule) / self._machine.pcie_bytes_per_s
        hidden = schedule.publish_lag > 0 or self._in_backward
        at_the_end = 1 / self._n_blocks if hidden else 1 / schedule.update_interval
        return late_s + self._upload_s * at_the_end + 2 * self._sums * self._upload_s + read_back_s

    def _simulate(self) -> list[SimulatedStep]:
        workload, config = self._workload, self._config
        policy = self._policy()
        job_s = cache(self._job_s)
        return simulate(
            policy,
            n_steps=_SIMULATED_STEPS if config.measures else 2 * _SETTLED_STEPS,
            n_blocks=self._n_blocks,
            device_s=lambda step: workload.step_s + self.exposed_copy_s(policy.schedule),
            job_s=lambda step, n_gradients: job_s(n_gradients, policy.schedule),
            early_share=self._last_backward_s / workload.step_s if self._in_backward else 0.0,
            # The largest matrix is usually the embedding, whose gradient is the last.
            last_share=min(0.9, workload.model.largest_numel / workload.model.numel),
        )

    def _policy(self) -> SchedulePolicy:
        """`auto`, with the schedules that the host has memory for."""
        config, host_mem = self._config, self._machine.host_mem

        def fits(schedules: Sequence[UpdateSchedule], *, tail: bool = config.requires_tail) -> bool:
            # Any rank's tail may be all of its blocks; memory is set aside for that.
            n_late = self._n_blocks if tail else 0
            n_bytes = self._arena_bytes(schedules, n_late=n_late) * self._machine.ranks_per_host
            return host_mem is None or n_bytes <= host_mem * GB

        candidates = candidates_of(config.update_intervals, config.publish_lags)
        kept = that_fit(candidates, fits)
        has_room = config.requires_tail or not kept or fits(kept, tail=True)
        return SchedulePolicy(
            kept or candidates,
            hides_in_backward=self._in_backward,
            allows_tail=config.allows_tail and has_room,
        )

    def _job_s(self, n_gradients: int, schedule: UpdateSchedule) -> float:
        """Seconds of the worker for one block, while the block's copies use the host's memory too.

        A job that is submitted in backward commits as many gradients, and applies one more tentatively.
        """
        b = self._workload.dtype_bytes
        n_applied = n_gradients + (self._in_backward and schedule.publish_lag == 0)
        traffic = replay_bytes(n_applied, b, self._moment_bytes) + b * (n_gradients + 1)
        arithmetic_s = 0.0 if self._cores is None else replay_core_s(n_applied) / self._cores
        return max(traffic / self._machine.rank_bytes_per_s, arithmetic_s) * self._partition / self._n_blocks

    def _worker_cores(self) -> float | None:
        """Cores of the worker, as `cores.worker_cores` assigns them; None: enough."""
        config, machine = self._config, self._machine
        if isinstance(config.worker_cores, int):
            return config.worker_cores
        if not isinstance(config.worker_cores, str):
            return len(config.worker_cores) / machine.ranks_per_host
        if machine.cpu_cores is None:
            return None
        of_rank = machine.cpu_cores / machine.ranks_per_host
        return max(1.0, of_rank - round(config.pt_reserved_cores_perc * of_rank))

    def _fixed_device_bytes(self) -> float:
        """Weights, buckets, accumulated gradients."""
        workload, model = self._workload, self._workload.model
        sums = 0
        if workload.accumulate_grad_batches > 1:
            on_host = self._config.accumulate_on == "host"
            sums = min(model.largest_numel, self._partition) if on_host else self._partition
        return workload.weight_bytes + workload.bucket_bytes(bucket_size(model.numel)) + workload.dtype_bytes * sums

    def _late_bytes(self) -> float:
        """State and gradients of device-owned columns, where anything was late in the run, and factors of the provisional update of all
        that was; the update itself works in place (`kernels.triton`).
        """
        if not all(schedule.is_immediate for schedule in self._schedules):
            return self._owned_bytes + self._factor_bytes
        lags = self.tail > 0 and not self.owns_tail
        return lags * (self._owned_bytes + self.tail * self._factor_bytes)

    def _read_back_bytes(self, schedule: UpdateSchedule) -> float:
        """Gradients that are copied to the device again in a step, to be reapplied after a publish."""
        reapplied = self._weight_bytes * schedule.publish_lag / schedule.update_interval
        return 0.0 if self._kept_bytes(schedule) else self._has_provisional_update * reapplied

    def _kept_bytes(self, schedule: UpdateSchedule) -> float:
        """Gradients that stay on the device for that: all or none."""
        kept = self._has_provisional_update * self._weight_bytes * schedule.kept_share
        needed = self._device_bytes + self._owned_bytes + self._factor_bytes + kept
        return kept if needed <= self._machine.gpu_mem * GB else 0.0
