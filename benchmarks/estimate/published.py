"""The estimate beside figures that others have published. Their settings are known in part only; what is assumed is in the table."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.recorded_device.rates import DEVICES
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.estimate.cost import estimate
from lightning_zenflow.estimate.machine import GB, Machine, Workload
from lightning_zenflow.estimate.shapes import shapes_of_count

_A100, _H200 = DEVICES["a100"], DEVICES["h200"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A step without offload and one with it, in seconds."""

    source: str
    setting: str
    assumed: str
    without_s: float
    with_s: float
    params: float
    machine: Machine
    in_backward: bool = False
    """The optimizer runs in backward, as here with S = 1, d = 0; else it is ZeRO-Offload."""

    def predict(self) -> float:
        """The estimate of `with_s`."""
        workload = Workload(model=shapes_of_count(self.params), step_ms=1e3 * self.without_s)
        cost = estimate(workload, self.machine, ZenFlowConfig(update_interval=1, publish_lag=0))
        return (cost.zenflow if self.in_backward else cost.zero_offload).step_s


def _prime_rl(tokens: str, without_s: float, with_s: float) -> Published:
    host = 8 * _H200.worker
    return Published(
        source="PrimeIntellect-ai/prime-rl#3234, full offload",
        setting=f"Qwen3-30B-A3B, 8 H200, sequence {tokens}",
        assumed=f"{host / GB:.0f} GB/s a host; one micro-batch",
        without_s=without_s,
        with_s=with_s,
        params=30.5e9,
        machine=Machine(gpus=8, gpu_mem=141, pcie=_H200.pcie / GB, cpu_bw=host / GB),
        in_backward=True,
    )


FIGURES = (
    Published(
        source="DeepSpeed's announcement of ZenFlow, ZeRO-Offload",
        setting="Llama-2-7B, 4 A100",
        assumed=f"PCIe {_A100.pcie / GB:.0f} GB/s, {8 * _A100.worker / GB:.0f} GB/s a host, one micro-batch",
        without_s=0.5,
        with_s=7.0,
        params=6.74e9,
        machine=Machine(gpus=4, gpu_mem=80, pcie=_A100.pcie / GB, cpu_bw=8 * _A100.worker / GB),
    ),
    Published(
        source="torchao's optim/README.md, ZeRO-Offload untuned",
        setting="ViT of 1.1B, 4070 Ti SUPER, Ryzen 5600, DDR4",
        assumed="PCIe 25 GB/s, 40 GB/s of the host",
        without_s=1.27,
        with_s=3.13,
        params=1.1e9,
        machine=Machine(gpus=1, gpu_mem=16, pcie=25, cpu_bw=40),
    ),
    _prime_rl("8K", 1.75, 3.96),
    _prime_rl("16K", 5.17, 5.73),
)


def rows() -> Iterator[dict[str, str]]:
    """The table."""
    for figure in FIGURES:
        predicted = figure.predict()
        yield {
            "source": figure.source,
            "setting": figure.setting,
            "assumed": figure.assumed,
            "without offload s": f"{figure.without_s:g}",
            "published s": f"{figure.with_s:g}",
            "estimate s": f"{predicted:.2f}",
            "difference": f"{predicted / figure.with_s - 1:+.0%}",
        }
