"""Compiles the Triton kernels for NVIDIA GPUs, in every variant that `TritonKernels` launches; prints JSON. See test_compilation.

    TRITON_INTERPRET=0 python tests/support/triton_build.py COMPUTE_CAPABILITY TYPE ...

The launches are those of `TritonKernels` itself, on small tensors in host memory; each ends where the compiled kernel would start, so no
GPU is needed. Spills are those of the assembler that Triton brings with it.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

# The package's own __init__ imports Lightning and DeepSpeed, which takes longer than all the rest.
sys.modules["lightning_zenflow"] = package = ModuleType("lightning_zenflow")
package.__path__ = [str(Path(__file__).parents[2] / "lightning_zenflow")]

from lightning_zenflow.core.step_inputs import GradientNorms, GroupHyperparameters, StepScale  # noqa: E402
from lightning_zenflow.kernels.base import Elements, RoundingNoise, SecondMoment, Selection  # noqa: E402
from lightning_zenflow.kernels.triton import TritonKernels  # noqa: E402

CPU = torch.device("cpu")


def cases(kernels: TritonKernels, dtype: torch.dtype) -> Iterator[str]:
    """Launches every variant; yields a name after each."""
    for max_norm, speculates in ((0.0, False), (1.0, False), (1.0, True), (math.inf, False)):
        norms_so_far = GradientNorms(1, CPU, speculates=speculates)
        norms_so_far.open(1, max_norm=max_norm, loss_scale=1.0)
        norms_so_far.add([torch.zeros(1), torch.zeros(1, dtype=torch.float64)])
        kernels.block_word(norms_so_far, 0)
        yield f"limit {max_norm}{', speculated' if speculates else ''}"
    for columns, name in ((512, "aligned"), (515, "odd")):
        shape = (96, columns)
        gradient, weights = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        chosen, selected = torch.tensor([0, 3, columns - 1]), torch.zeros(96, 3, dtype=dtype)
        selection = Selection(columns=chosen, entries=selected)
        kernels.route(gradient, (), per_axis=False)
        yield name
        norms = kernels.route(gradient, (), per_axis=True)
        yield f"{name}, per axis"
        factors = kernels.factored_step_(
            SecondMoment.zeros(*shape, CPU), norms, beta2=0.99, lr=0.1, scale=torch.ones(())
        )
        yield name
        noise = RoundingNoise(0, CPU)
        kernels.provisional_update_(weights, gradient, factors, noise)
        yield name
        kernels.column_writer([(weights, selection)])()
        yield name
        one = torch.ones(())
        scale = StepScale(factor=one, finite=one.bool(), norm=one, count=one.double())
        for weight_decay, decoupled in ((0.0, True), (0.1, True), (0.1, False)):
            h = GroupHyperparameters(
                lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay, decoupled=decoupled
            )
            kernels.adamw_(Elements.of(torch.zeros(3, columns), weights[0], weights[0]), h, scale, 1)
            yield f"{name}, decay {weight_decay}{' decoupled' * decoupled}"


def spilled(ptx: str) -> int:
    """Bytes of registers that the assembler spills to memory."""
    architecture = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        # Triton brings up to two assemblers; which one it takes for a GPU depends on its release.
        for assembler in sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*")):
            command = [assembler, "-v", f"--gpu-name={architecture}", "--fmad=false", "-o", "/dev/null", file.name]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode == 0:
                return sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill)", result.stderr)))
    raise RuntimeError(result.stderr)


def loads(ptx: str) -> Counter[int]:
    found = re.findall(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)\b", ptx)
    return Counter(int(n or 1) * int(bits) // 8 for n, bits in found)


def build(capability: int, dtypes: list[str]) -> list[dict[str, Any]]:
    """The compiled variants: the kernel, the case and the type, bytes that are `spilled`, `loads`: bytes of a load from global memory ->
    number of such instructions, `arithmetic`: how often each instruction of float32 occurs.
    """
    # What Triton asks its driver for before a launch.
    no_gpu = {
        "get_current_device": lambda: capability,
        "get_current_stream": lambda _: 0,
        "get_current_target": lambda: GPUTarget("cuda", capability, 32),
    }
    driver.set_active(SimpleNamespace(**no_gpu))
    run, last = JITFunction.run, {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        last[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    built = []
    for dtype in dtypes:
        for case in cases(TritonKernels(), getattr(torch, dtype)):
            ((kernel, compiled),) = last.items()
            last.clear()
            assert compiled.asm["cubin"]
            ptx = compiled.asm["ptx"]
            variant = {"kernel": kernel, "case": case, "dtype": dtype, "spilled": spilled(ptx)}
            arithmetic = Counter(re.findall(r"\b((?:fma|mul|add|sub|sqrt|div)(?:\.\w+)*)\.f32\b", ptx))
            built.append({**variant, "loads": loads(ptx), "arithmetic": arithmetic})
    return built


if __name__ == "__main__":
    print(json.dumps(build(int(sys.argv[1]), sys.argv[2:])))
