"""Compiles the Triton kernels for an NVIDIA GPU and prints as JSON how often each float32 instruction occurs; see test_compilation."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# The package's own __init__ imports Lightning and DeepSpeed, which takes longer than all the rest.
sys.modules["lightning_zenflow"] = package = ModuleType("lightning_zenflow")
package.__path__ = [str(Path(__file__).parents[2] / "lightning_zenflow")]

from lightning_zenflow.kernels import triton as triton_kernels  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)

_POINTERS = {"row_parts": "fp32", "column_parts": "fp32", "row_scale": "fp32", "col_scale": "fp32", "noise": "i32", "finite": "i1",
             "master": "fp32", "exp_avg": "fp32", "exp_avg_sq": "fp32", "factor": "fp32", "step_size": "fp64",
             "bias_correction2": "fp64", "columns": "i64"}  # fmt: skip
_OF_THE_MODEL = {"gradient", "weights", "matrix", "selected"}
_FLOATS = {"beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "decay_factor", "size"}

CONSTANTS: dict[str, dict[str, Any]] = {
    "_sums_of_squares": {"per_axis": True, "tile_rows": 16, "tile_columns": 128, "n_tiles": 8},
    "_provisional": {"noise_mask": 65535, "stochastic": True, "block": 1024},
    "_adamw": {"decay": 1, "block": 1024},
    "_copy_columns": {"gather": True, "block": 1024},
}


def type_of(argument: str, dtype: str) -> str:
    if argument in _OF_THE_MODEL:
        return f"*{dtype}"
    if argument in _POINTERS:
        return f"*{_POINTERS[argument]}"
    return "fp32" if argument in _FLOATS else "i32"


def instructions(dtype: str) -> dict[str, Counter[str]]:
    result = {}
    for name, constants in CONSTANTS.items():
        kernel = getattr(triton_kernels, name)
        signature = {a: "constexpr" if a in constants else type_of(a, dtype) for a in kernel.arg_names}
        places = {(kernel.arg_names.index(a),): value for a, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        built = triton.compile(source, target=TARGET, options={"enable_fp_fusion": False})
        assert built.asm["cubin"]
        found = re.findall(r"\b((?:fma|mul|add|sub|sqrt|div)(?:\.\w+)*)\.f32\b", built.asm["ptx"])
        result[name] = Counter(found)
    return result


if __name__ == "__main__":
    print(json.dumps({dtype: instructions(dtype) for dtype in sys.argv[1:]}))
