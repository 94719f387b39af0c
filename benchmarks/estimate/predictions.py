"""Predictions of `lightning-zenflow estimate` for 7B, 13B and 70B parameters on 1 to 64 GPUs: docs/predictions.md.

    python -m benchmarks.estimate.predictions > docs/predictions.md

Nothing is measured. Steps without offload are assumed to reach a share of the GPU's peak.
"""

from dataclasses import dataclass

from benchmarks.common.results import markdown
from lightning_zenflow.estimate.cost import CostComparison, estimate
from lightning_zenflow.estimate.machine import Machine, Workload
from lightning_zenflow.estimate.report import fits_text, is_worth_fixing
from lightning_zenflow.estimate.shapes import shapes_of_count

PARAMS = (7e9, 13e9, 70e9)
GPUS = (1, 4, 8, 16, 64)
TOKENS_PER_GPU = 4096
"""Of one optimizer step."""
SHARE_OF_PEAK = 0.4
"""Of the GPU's dense bf16 peak in a step without offload; 6 floating-point operations a parameter and token."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A host with eight GPUs; nominal rates in GB, GB/s and FLOP/s."""

    name: str
    gpu_mem: float
    pcie: float
    cpu_bw: float
    host_mem: float
    peak_flops: float

    def predict(self, params: float, gpus: int) -> CostComparison:
        seconds = 6 * params * TOKENS_PER_GPU / (SHARE_OF_PEAK * self.peak_flops)
        machine = Machine(
            gpus=gpus, gpu_mem=self.gpu_mem, pcie=self.pcie, cpu_bw=self.cpu_bw, host_mem=self.host_mem, gpus_per_host=8
        )
        return estimate(Workload(model=shapes_of_count(params), step_ms=round(1e3 * seconds)), machine)


SYSTEMS = (
    System(name="80 GB, PCIe 4.0", gpu_mem=80, pcie=25, cpu_bw=300, host_mem=1000, peak_flops=312e12),
    System(name="192 GB, PCIe 5.0", gpu_mem=192, pcie=50, cpu_bw=600, host_mem=2000, peak_flops=2250e12),
)


def row(prediction: CostComparison) -> dict[str, str]:
    none, offload, zenflow = prediction.none, prediction.zero_offload, prediction.zenflow
    schedule, best = prediction.schedule, prediction.fastest_schedule
    fixed = f"{best.update_interval}, {best.publish_lag}: {1e3 * prediction.fastest.step_s:.0f} ms"
    return {
        "parameters": f"{prediction.workload.model.numel / 1e9:g}B",
        "GPUs": str(prediction.machine.gpus),
        "step without offload": f"{1e3 * none.step_s:.0f} ms",
        "fits without offload": fits_text(none),
        "ZeRO-Offload": f"{1e3 * offload.step_s:.0f} ms",
        "ZenFlow": f"{1e3 * zenflow.step_s:.0f} ms ({none.step_s / zenflow.step_s:.0%})",
        "S, d": f"{schedule.update_interval}, {schedule.publish_lag}",
        "faster if fixed": fixed if is_worth_fixing(prediction) else "",
        "ZenFlow fits": fits_text(zenflow),
        "GPU GB": f"{zenflow.device_bytes / 1e9:.0f}",
        "host GB": f"{zenflow.host_bytes / 1e9:.0f}",
        "what limits": prediction.limit,
    }


def page() -> str:
    parts = [
        "# Predictions",
        "Written by `python -m benchmarks.estimate.predictions > docs/predictions.md`. **Nothing on this page was measured**; "
        "[estimate.md](estimate.md) says how the numbers come about and what they leave out.",
        f"A step has {TOKENS_PER_GPU} tokens on each GPU, one micro-batch in bf16. Without offload it is taken to reach "
        f"{SHARE_OF_PEAK:.0%} of the GPU's peak at 6 floating-point operations a parameter and token, on any number of GPUs. "
        "Hosts have eight GPUs. GPU GB is one GPU's memory without activations, host GB that of the fullest host; in brackets is "
        "the share of the speed without offload. Times are given also where memory does not suffice.",
    ]
    for system in SYSTEMS:
        parts.append(f"## GPUs of {system.name}")
        parts.append(
            f"{system.peak_flops / 1e12:g} TFLOP/s and {system.pcie:g} GB/s each way a GPU; "
            f"{system.cpu_bw:g} GB/s and {system.host_mem:g} GB of memory a host."
        )
        parts.append(markdown(row(system.predict(params, gpus)) for params in PARAMS for gpus in GPUS))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(page())
