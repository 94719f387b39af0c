"""The command `lightning-zenflow`: `estimate`, with the formulas of docs/estimate.md, and `doctor`, what this machine has.

`doctor` imports what it needs itself: torch takes seconds, which `estimate` does without.
"""

import argparse
import math
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import psutil
from omegaconf import OmegaConf
from tabulate import tabulate

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.partition import STATE_BYTES
from lightning_zenflow.core.schedule import StaggeredSchedule, UpdateSchedule, blocks_wanted, bucket_size, candidates_of

if TYPE_CHECKING:
    from lightning_zenflow.worker.machine import Place

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

_MOMENTS_BYTES = {"float32": 8.0, "bfloat16": 4.0, "int8": 2 + 8 / 128}
"""Of both moments of a parameter; in 8 bits two scales are shared by 128."""

_GATHERED = 1_000_000_000
"""Parameters at a time under stage 3, at most: DeepSpeed's default of `stage3_max_live_parameters`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 if `doctor` finds that the worker does not run, and 2 where arguments are invalid."""
    parser = argparse.ArgumentParser(prog="lightning-zenflow", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('lightning-zenflow')}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    commands.add_parser("doctor", help="show what this machine has, for issues too")
    summary = "show memory, copies and CPU time of a step, by formula"
    add = commands.add_parser("estimate", help=summary, allow_abbrev=False).add_argument
    add("--params", type=positive_number, required=True, help="number of trained parameters, such as 7B, 350M or 7e9")
    add("--gpus", type=int, default=1, help="number of GPUs, over all hosts, default %(default)s")
    add("--cpu-bw", type=positive_number, help="memory bandwidth of one host, GB/s, default: this host's, measured")
    add("--frozen", type=positive_number, default=0.0, help="number of parameters that are not trained, default 0")
    add("--gpus-per-host", type=int, default=8, help="default %(default)s")
    add("--stage", type=int, choices=(1, 2, 3), default=2, help="of ZeRO, default %(default)s")
    add("--offload-parameters", action="store_true", help="weights are in host memory, under stage 3")
    add("--dtype", choices=tuple(_DTYPE_BYTES), default="bf16", help="dtype of the model, default %(default)s")
    add("--accumulate-grad-batches", type=int, default=1, help="micro-batches in an optimizer step, default 1")
    add(
        "--offload-ratio",
        default="",
        metavar="RATIO,...",
        help="values of the key, each with rows of its own, such as 1,0.5,0",
    )
    add("keys", nargs="*", metavar="key=value", help="keys of ZenFlowStrategy, such as update_interval=4")
    setup, runs = parser.parse_args(arguments), True
    try:
        if setup.command == "doctor":
            text, runs = examine()
        else:
            keys = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(setup.keys)))
            ratios = [{"offload_ratio": float(text)} for text in setup.offload_ratio.split(",") if text] or [{}]
            configs = [ZenFlowConfig(**{**keys, **ratio}) for ratio in ratios]
            setup.cpu_bw = setup.cpu_bw or triad(worker_place()[1])
            text = as_text([(config.offload_ratio, costs(setup, config)) for config in configs])
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        parser.error(str(error))
    sys.stdout.write(text + "\n")
    return 0 if runs else 1


def positive_number(text: str) -> float:
    """7e9, or 7B, 1.5b, 350M."""
    unit = _UNITS.get(text[-1:].upper(), 1.0)
    number = unit * float(text if unit == 1.0 else text[:-1])
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


class Cost(NamedTuple):
    """Bytes of one GPU without activations, and of all ranks of a host; bytes and seconds of a rank in a step, while all work."""

    device_bytes: float
    host_bytes: float
    d2h_bytes: float
    h2d_bytes: float
    cpu_s: float


def costs(setup: argparse.Namespace, config: ZenFlowConfig) -> dict[UpdateSchedule, Cost]:
    """Cost by S and d, the least stale first, for all that the configuration allows; `setup` has the options of `estimate`."""
    if min(setup.gpus, setup.gpus_per_host, setup.accumulate_grad_batches) < 1:
        raise ValueError("--gpus, --gpus-per-host and --accumulate-grad-batches must be at least 1")
    b, on_host, ranks = _DTYPE_BYTES[setup.dtype], setup.offload_parameters, min(setup.gpus, setup.gpus_per_host)
    if on_host and setup.stage != 3:
        raise ValueError(f"--stage must be 3 with --offload-parameters, got {setup.stage}")
    config = config.with_weights_on_host() if on_host else config
    numel, frozen = math.ceil(setup.params / setup.gpus), setup.frozen / setup.gpus
    weights = setup.params + setup.frozen
    if setup.stage == 3:
        weights = min(weights, _GATHERED + (0 if on_host else numel + frozen))
    in_backward, state_bytes = config.submits_in_backward, 4 + _MOMENTS_BYTES[config.moments_dtype]
    n_blocks = blocks_wanted(config.update_intervals, in_backward=in_backward, numel=numel, awaited_singly=on_host)
    hosted = 1.0 if config.offload_ratio == "auto" else config.offload_ratio
    resident_bytes = (1 - hosted) * numel * (STATE_BYTES + b)
    found = {}
    for schedule in candidates_of(config.update_intervals, config.publish_lags):
        s, d = schedule.update_interval, schedule.publish_lag
        owned = 0.0 if schedule.is_immediate else config.topk_ratio * hosted * numel
        kept = hosted * schedule.kept_share if config.compensation.updates_provisionally else 0.0
        gradients = 2 * bucket_size(math.ceil(setup.params)) + numel * ((setup.accumulate_grad_batches > 1) + kept)
        staggered = StaggeredSchedule(**asdict(schedule), n_blocks=n_blocks, in_backward=in_backward, in_place=on_host)
        buffers = (staggered.n_slots + staggered.n_publish_buffers) / n_blocks
        # A job reads and writes the states, reads S gradients, one more with d = 0 in backward, and writes weights; copies are beside.
        job_bytes = 2 * state_bytes + b * (s + (in_backward and d == 0) + 1) + b * (s + 1)
        # Parameters in host memory are fetched by forward and backward of each micro-batch.
        fetched = 2 * setup.accumulate_grad_batches * (numel + frozen) if on_host else hosted * numel / s
        found[schedule] = Cost(
            device_bytes=b * (weights + gradients + owned) + STATE_BYTES * owned + resident_bytes,
            host_bytes=ranks * (numel * (state_bytes + b * buffers) + b * frozen * on_host),
            d2h_bytes=b * hosted * numel,
            h2d_bytes=b * fetched,
            cpu_s=hosted * numel * job_bytes * ranks / (setup.cpu_bw * 1e9) / s,
        )
    return found


def as_text(by_ratio: Sequence[tuple[object, Mapping[UpdateSchedule, Cost]]]) -> str:
    """The costs, by `offload_ratio`, as a table, and what its columns mean."""
    rows = [
        [f"S = {s.update_interval}, d = {s.publish_lag}", ratio, *(n / 1e9 for n in c[:-1]), 1e3 * c.cpu_s]
        for ratio, costs in by_ratio
        for s, c in costs.items()
    ]
    headers = ("schedule", "offload_ratio", "GPU GB", "host GB", "d2h GB", "h2d GB", "CPU ms")
    formats = ("", "g", *[".1f"] * 4, ".0f")
    table = tabulate(rows, headers=headers, colalign=("left", *["right"] * 6), floatfmt=formats)
    return (
        f"{table}\n\nGPU: one, without activations. Host: all ranks of one. d2h, h2d, CPU: one rank, a step.\n"
        "The CPU's work hides behind backward where d = 0, and behind the whole step where d > 0."
    )


def examine() -> tuple[str, bool]:
    """A table of what this machine has, for issues too, and whether its worker runs; takes some seconds."""
    import torch

    from lightning_zenflow.worker.machine import free_host_memory

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    (place, cores), free = worker_place(), free_host_memory()
    limit = "" if place.cpu_limit == math.inf else f"; a control group grants {place.cpu_limit:g} CPUs"
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rows = {
        "versions": ", ".join(f"{name} {version(name)}" for name in ("lightning-zenflow", "lightning", "deepspeed")),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical; of this process"
        f" {len(place.allowed)}, of the GPU's NUMA node {len(place.gpu_cores) or 'unknown'}{limit}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB, {free.n_bytes / 1e9:.1f} GB free ({free.limit})",
        "memlock": "unlimited" if memlock == resource.RLIM_INFINITY else f"{memlock / 1e9:.3g} GB",
    }
    rows |= {f"GPU {i}": f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB" for i, gpu in enumerate(gpus)}
    if not gpus:
        rows["GPU"] = "none: training runs on the CPU, for tests and small models"
    try:
        rows["worker"], runs = f"{triad(cores):.1f} GB/s of host memory on cores {cores}", True
    except RuntimeError as error:
        rows["worker"], runs = f"training cannot start: {error}", False
    return str(tabulate(rows.items(), tablefmt="plain", disable_numparse=True)), runs


def worker_place() -> tuple["Place", Sequence[int]]:
    """The place of a rank on the first GPU, or else on a CPU, and the cores that its worker has by default."""
    import torch

    from lightning_zenflow.worker.machine import read_place, worker_cores

    place = read_place(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    reserved_share = ZenFlowConfig().pt_reserved_cores_perc
    return place, worker_cores("auto", places=[place], index=0, reserved_share=reserved_share).cores


def triad(cores: Sequence[int]) -> float:
    """Memory bandwidth in GB/s by STREAM's triad, in the worker's own benchmark on these cores; RuntimeError if that does not run."""
    from lightning_zenflow.native import worker_environment, worker_executable

    command = [str(worker_executable()), "--bench", ",".join(map(str, cores))]
    try:
        done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"the worker's benchmark did not end: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"the worker's benchmark failed with status {done.returncode}: {done.stderr.strip()}")
    return median(map(float, done.stdout.split()))
