"""What is measured on a GPU, in the order of its worth: step times under every method, copies, memory, and losses beside AdamW's."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.cpu_adam import compile_cpu_adam
from benchmarks.common.machine import summary
from benchmarks.common.processes import run_process
from benchmarks.common.provenance import with_origin
from benchmarks.common.results import markdown
from benchmarks.gpu.calls import Calls
from benchmarks.step_time.methods import DECIDING, METHODS
from benchmarks.step_time.report import table
from benchmarks.step_time.run import StepResult, StepSpec, run


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its batches, under several methods."""

    title: str
    methods: tuple[str, ...]
    spec: Mapping[str, Any]
    """Fields of `StepSpec`."""
    steps: int = 24
    """Timed ones; of peers, whose steps are long, a third."""
    warm_up: int = 8
    """Steps before them, beside those in which a method decides; of peers half."""
    timeout: float = 180
    """Seconds of a run. One that has ended later in its own call is a failure; one that the end of the call cut is repeated."""
    losses: bool = False
    """Whether the losses are the result."""

    def spec_of(self, method: str, device: str) -> StepSpec:
        """The run of a method."""
        steps, warm_up = self.steps, self.warm_up
        if METHODS[method].peer and not self.losses:
            steps, warm_up = max(4, steps // 12 * 4), warm_up // 2
        warm_up += DECIDING * (device in METHODS[method].decides_on)
        return StepSpec(device=device, method=method, steps=steps, warm_up=warm_up, **self.spec)  # type: ignore[arg-type]


_BILLION = "1.5e9 parameters, {} x 1024 tokens"
_RATIOS = ("none", *(f"zenflow_exact_ratio_{percent}" for percent in (100, 75, 50, 34, 0)), "zenflow_exact")
_TRUE = (*(f"zenflow_adamw_ratio_{percent}" for percent in (100, 34, 0)), "offload_adamw", "offload_adamw_fsdp2")
_FEW_BITS = ("zenflow_exact_bfloat16", "zenflow_exact_int8")
_OTHERS = ("zero_offload", "zenflow", "zenflow_adamw", "zenflow_exact_half", "deepspeed_zenflow", "zenflow_auto")
_PEERS = ("torchao", "fsdp2", "zenflow_no_provisional")
CASES: dict[str, dict[str, Case]] = {
    "cuda": {
        "1.5B_8x1024": Case(
            title=_BILLION.format(8),
            # The first of them in one call.
            methods=_RATIOS + _TRUE + _FEW_BITS + _OTHERS + _PEERS,
            spec={"params": 1.5e9, "batch": 8, "tokens": 1024},
        ),
        "1.5B_32x1024": Case(
            title=_BILLION.format(32),
            methods=("none", "zenflow_exact_ratio_100", "zenflow_adamw_ratio_100", "zenflow_exact"),
            spec={"params": 1.5e9, "batch": 32, "tokens": 1024},
        ),
        "losses": Case(
            title="losses on text, 150e6 parameters, 16 x 256 tokens",
            methods=("none", "zenflow_exact", "zenflow"),
            spec={"params": 150e6, "batch": 16, "tokens": 256, "text": True},
            steps=200,
            warm_up=0,
            losses=True,
        ),
        # In the order of their host memory: 97, 115 GiB and, with torch's rounding of page-locked memory, more; the last one has none.
        "7B_8x2048": Case(
            title="6.5e9 parameters, 8 x 2048 tokens, activation checkpointing",
            methods=(
                *("floor", "zenflow_exact_ratio_100", "zenflow_exact_ratio_75", "zenflow_exact", "zenflow_s2"),
                *("zero_offload", "none"),
            ),
            spec={"params": 7e9, "batch": 8, "tokens": 2048, "recompute": True},
            steps=12,
            warm_up=4,
            timeout=360,
        ),
        # 52 GiB of host memory, DeepSpeed's 62; each method fetches the weights twice a step.
        "3B_stage_3": Case(
            title="2.9e9 parameters, 8 x 2048 tokens, activation checkpointing, stage 3 with parameters in host memory",
            methods=("floor3", "zenflow3", "zero3_offload", "superoffload", "zenflow3_bf16", "zenflow3_on_device"),
            spec={"params": 3e9, "batch": 8, "tokens": 2048, "recompute": True},
            steps=12,
            warm_up=4,
            timeout=360,
        ),
        "1.5B_1x1024": Case(
            title=_BILLION.format(1),
            methods=_RATIOS + _TRUE + _OTHERS + _PEERS,
            spec={"params": 1.5e9, "batch": 1, "tokens": 1024},
        ),
    },
    "cpu": {
        "narrow_1x16": Case(
            title="all tensors but few weights, 1 x 16 tokens, activation checkpointing",
            methods=(
                *("floor", "zenflow", "zenflow_exact_ratio_50", "zenflow_adamw_ratio_0", "zenflow_exact_int8"),
                *("offload_adamw", "offload_adamw_fsdp2"),
            ),
            spec={"params": 25e6, "narrow": True, "recompute": True},
            steps=4,
            warm_up=4,
        ),
        "losses": Case(
            title="losses on text",
            methods=("none", "zenflow_exact"),
            spec={"params": 25e6, "narrow": True, "text": True, "batch": 2},
            steps=8,
            warm_up=0,
            losses=True,
        ),
        "stage_3": Case(
            title="stage 3", methods=("floor3", "zenflow3"), spec={"params": 25e6, "narrow": True}, steps=4, warm_up=4
        ),
    },
}
"""Device -> name -> case, the most important first."""


def run_bench(options: argparse.Namespace, calls: Calls) -> int:
    """Runs what no call has finished while there is time; the exit status is 0 when all is done and nothing has failed."""
    cases = CASES[options.device]
    runs = [(f"{name}/{method}", case, method) for name, case in cases.items() for method in case.methods]
    left = [(key, case, method) for key, case, method in runs if key not in calls.done]
    if any(METHODS[method].peer for _, _, method in left):
        compile_cpu_adam()
    if left:
        calls.begin()
    for key, case, method in left:
        if calls.left() < case.timeout / 3:
            break
        result = _measure(case.spec_of(method, options.device), min(case.timeout, calls.left()))
        if "error" in result and calls.left() <= 0:
            break
        calls.put(key, result)
        print(f"{key}: {_outcome(result)}", flush=True)
    text = report(cases, calls)
    calls.path.with_suffix(".md").write_text(text)
    n_left = sum(key not in calls.done for key, _, _ in runs)
    print(f"{text}\n{calls.path}: {f'{n_left} runs are left: call again' if n_left else 'complete'}", flush=True)
    return 1 if n_left or any("error" in result for result in calls.done.values()) else 0


def _measure(spec: StepSpec, timeout: float) -> dict[str, Any]:
    try:
        return {"result": dataclasses.asdict(run_process(run, spec, timeout=timeout, forks=True))}
    except RuntimeError as error:
        return {"error": str(error)}


def _outcome(result: Mapping[str, Any]) -> str:
    if "error" in result:
        return f"FAILED: {result['error']}"
    step_s = result["result"]["step_s"]
    return f"{1e3 * sum(step_s) / len(step_s):.0f} ms a step"


def report(cases: Mapping[str, Case], calls: Calls) -> str:
    """Markdown with a table for each case that has results, and what has failed."""
    return "\n\n".join(["# Measured on a GPU", *_sections(cases, calls)]) + "\n"


def _sections(cases: Mapping[str, Case], calls: Calls) -> Iterator[str]:
    for name, case in cases.items():
        done = {method: calls.done[key] for method in case.methods if (key := f"{name}/{method}") in calls.done}
        results = [_parse(result["result"]) for result in done.values() if "result" in result]
        if results:
            text = losses_table(results) if case.losses else table([results])
            about = calls.calls[next(iter(done.values()))["call"]]
            yield f"## {case.title}\n\n" + with_origin(text, about, summary(about["machine"]))
        for method, result in done.items():
            if "error" in result:
                yield f"{case.title}, {METHODS[method].title}: failed\n\n```\n{result['error'][-1500:]}\n```"


def _parse(written: Mapping[str, Any]) -> StepResult:
    return StepResult(**{**written, "spec": StepSpec(**written["spec"])})


def losses_table(results: Sequence[StepResult]) -> str:
    """Losses at a few steps, and each method's largest and mean difference to the first one's."""
    reference, n_steps = results[0].losses, results[0].spec.steps
    shown = sorted({1, *(max(1, n_steps * quarter // 4) for quarter in (1, 2, 3, 4))})
    rows = []
    for result in results:
        row = {"method": METHODS[result.spec.method].title}
        row |= {f"step {step}": f"{result.losses[step - 1]:.4f}" for step in shown}
        gaps = [abs(loss - other) for loss, other in zip(result.losses[:n_steps], reference[:n_steps], strict=True)]
        rows.append(row | {"largest difference": f"{max(gaps):.4f}", "mean difference": f"{sum(gaps) / n_steps:.4f}"})
    return markdown(rows)
