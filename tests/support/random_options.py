"""Trainings drawn by hypothesis: optimizer, Trainer, DeepSpeed's configuration, and ZenFlow's keys with nothing late or not."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from configurations import FORMS, LAYOUTS, Given, as_deepspeed_block, as_flat, configurations
from random_mistakes import mistakes
from random_modules import FLOAT32_ONLY, NO_WIDER_BUFFERS, ModuleOptions, Part, modules
from random_training import FACTORS, Training
from reference import Group

GROUPS = st.builds(
    Group,
    lr=st.sampled_from([0.0, 1e-8, 1e-4, 1e-3, 1e-2, 0.1]),
    beta1=st.sampled_from([0.0, 0.5, 0.9, 0.95]),
    beta2=st.sampled_from([0.0, 0.9, 0.95, 0.999]),
    eps=st.sampled_from([1e-15, 1e-8, 1e-6, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.0731, 0.5]),
)
FLAGS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{}, {}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": False}],
    "Adam": [{}, {}, {"foreach": True}, {"maximize": False}],
}
TRAINERS = st.sampled_from(
    [{}, {}, {"detect_anomaly": True}, {"deterministic": True}, {"inference_mode": False}, {"gradient_clip_algorithm": "norm"}]
)  # fmt: skip
SMALL_MODULES = st.sampled_from(
    [
        ModuleOptions(),
        ModuleOptions(
            parts=(
                Part(kind="raw", shape=(7, 11)),
                Part(kind="raw", shape=(), used="even steps"),
                Part(kind="layer norm", sizes=(1, 9)),
                Part(kind="embedding", sizes=(5, 3), used="never"),
            ),
            seed=1,
        ),
        ModuleOptions(parts=(Part(kind="tied", sizes=(13, 7)), Part(kind="linear", frozen="vectors")), seed=2),
    ]
)
PRECISIONS = st.sampled_from(["32-true", "32-true", "bf16-true", "bf16-mixed", 32, "bf16"])
MAX_NORMS = st.sampled_from([None, None, 0, 1e-6, 0.1, 1.0, 1e6])


@st.composite
def trainings(draw: st.DrawFn, of: st.SearchStrategy[ModuleOptions], *, mistaken: bool = False) -> Training:
    """Valid but for a mistake, if there is to be one."""
    kind = draw(st.sampled_from(sorted(FLAGS)))
    steps = draw(st.integers(1, 4))
    mistake = draw(mistakes()) if mistaken else None
    module, precision = draw(of), draw(PRECISIONS)
    layers = {part.kind for part in module.parts}
    if layers & {*FLOAT32_ONLY}:
        precision = "32-true"
    elif layers & {*NO_WIDER_BUFFERS} and precision in ("bf16-mixed", "bf16"):
        precision = "bf16-true"
    return Training(
        module=module,
        kind=kind,
        # A group without training would be refused first.
        groups=tuple(draw(st.lists(GROUPS, min_size=1, max_size=1 if mistaken else 3))),
        flags=draw(st.sampled_from(FLAGS[kind])),
        schedule="none" if mistaken else draw(st.sampled_from(list(FACTORS))),
        precision=precision,
        accumulate=draw(st.integers(1, 3)),
        max_norm=draw(MAX_NORMS),
        steps=steps,
        flush_after=tuple(draw(st.lists(st.integers(1, steps), unique=True, max_size=2))),
        trainer=draw(TRAINERS),
        mistake=mistake,
    )


def nothing_late(draw: st.DrawFn, *, block: bool = False) -> dict[str, Any]:
    """Keys of a schedule in which nothing is late; those of DeepSpeed's `zenflow` block only, if `block`."""
    if block:
        return {"update_interval": 1, "overlap_step": False}
    keys = draw(
        st.sampled_from(
            [
                {"publish_lag": 0, "optimizer_in_backward": False},
                {"publish_lag": 0, "optimizer_in_backward": True, "tail": "none"},
                {"publish_lag": 0, "tail": "auto"},
                {"overlap_step": False},
            ]
        )
    )
    return {"update_interval": 1, "weight_prediction": draw(st.sampled_from(["auto", 0])), **keys}


DEEPSPEED: dict[str, list[Any]] = {
    "gradient_clipping": [0, 0.0, 0.5, 1, "auto"],
    "train_batch_size": [4, "auto"],
    "train_micro_batch_size_per_gpu": [1, "auto"],
    "gradient_accumulation_steps": [1, "auto"],
    "zero_optimization.stage": [2],
    "zero_optimization.reduce_bucket_size": [1, 10, 500_000_000, 5e8],
    "zero_optimization.allgather_bucket_size": [2, 10, 500_000_000, 5e8],
    "zero_optimization.overlap_comm": [True, False],
    "zero_optimization.reduce_scatter": [True, False],
    "zero_optimization.allgather_partitions": [True, False],
    "zero_optimization.contiguous_gradients": [True],
    "zero_optimization.round_robin_gradients": [False],
    "zero_optimization.sub_group_size": [1, 1_000_000_000],
    "zero_optimization.use_multi_rank_bucket_allreduce": [True, False],
    "zero_optimization.offload_optimizer": [{"device": "cpu", "pin_memory": True}, {"device": "none"}, None],
    "zero_optimization.offload_param": [{"device": "none"}, None],
    "zero_optimization.cpu_offload": [True],
    "zero_optimization.ignore_unused_parameters": [True],
    "prescale_gradients": [False],
    "gradient_predivide_factor": [1.0],
    "communication_data_type": ["fp32", None],
    "steps_per_print": [1, 1000],
    "wall_clock_breakdown": [False, True],
    "dump_state": [False],
    "zero_allow_untested_optimizer": [True, False],
    "zero_force_ds_cpu_optimizer": [True, False],
    "sparse_gradients": [False],
    "checkpoint": [{"tag_validation": "Warn"}],
    "flops_profiler": [{"enabled": False}],
    "comms_logger": [{"enabled": False}],
    "activation_checkpointing": [{"partition_activations": False}],
    "timers": [{"throughput": {"enabled": True}}, None],
    "optimizer": [None],
    "scheduler": [None],
    "tensorboard": [{"enabled": False}],
    "seed": [3],
}
"""Values that change nothing, by path."""


def merged(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration with settings at dotted paths."""
    result = {**config}
    for path, value in settings.items():
        *folders, name = path.split(".")
        at = result
        for folder in folders:
            at[folder] = dict(at.get(folder) or {})
            at = at[folder]
        if isinstance(at.get(name), dict) and isinstance(value, dict):
            value = {**at[name], **value}
        at[name] = value
    return result


@dataclass(frozen=True)
class WithDeepSpeed:
    """A layout with further settings of DeepSpeed."""

    layout: Any
    settings: tuple[tuple[str, Any], ...]

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        content = self.layout(config)
        if self.layout is as_deepspeed_block:
            return merged(content, dict(self.settings))
        return {**content, "deepspeed": merged(content["deepspeed"], dict(self.settings))}


@st.composite
def configured(draw: st.DrawFn, *, kind: str) -> tuple[Given, Training]:
    """A configuration in any form and a training.

    Args:
        kind: "nothing late", "any", "junk" (a key has a value that may be wrong) or "mistake".
    """
    given = draw(configurations(junk=kind == "junk", forms=FORMS[:-1] if kind != "any" else FORMS))
    training = draw(trainings(SMALL_MODULES, mistaken=kind == "mistake"))
    if kind == "nothing late":
        if given.form not in ("keywords", "dotlist", "command line"):
            given = replace(given, layout=draw(st.sampled_from(LAYOUTS)))
        block = given.layout is as_deepspeed_block
        if block:
            given = replace(given, config={})
        given = replace(given, config={**given.config, **nothing_late(draw, block=block)})
    if training.mistake is not None and training.mistake.where == "deepspeed":
        given = replace(
            given,
            form=draw(st.sampled_from(["dict", "json", "yaml", "DictConfig"])),
            layout=as_deepspeed_block,
            config={},
        )
    if training.mistake is not None and training.mistake.where == "keywords":
        given = replace(given, form="keywords", layout=as_flat)
    settings: dict[str, Any] = {}
    if given.layout is not as_flat:
        paths = draw(st.lists(st.sampled_from(sorted(DEEPSPEED)), unique=True, max_size=5))
        settings = {path: draw(st.sampled_from(DEEPSPEED[path])) for path in paths}
        if settings.get("zero_optimization.reduce_scatter") is False and draw(st.booleans()):
            settings.update({"prescale_gradients": True, "gradient_predivide_factor": 2.0})
        # The Trainer's is another, if both are given.
        training = replace(training, max_norm=None)
        if "gradient_accumulation_steps" not in settings and draw(st.booleans()):
            settings["gradient_accumulation_steps"] = training.accumulate
    if training.mistake is not None and training.mistake.where == "deepspeed":
        key = training.mistake.key
        settings = {key: training.mistake.value}
    if settings:
        given = replace(given, layout=WithDeepSpeed(given.layout, tuple(settings.items())))
    return given, training


MODULE_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "topk_ratio": st.sampled_from([0, 0.05, 0.3, 1]),
    "moments_dtype": st.sampled_from(["float32", "float32", "bfloat16"]),
    "accumulate_on": st.sampled_from(["device", "host"]),
    "full_warm_up_rounds": st.sampled_from([0, 2]),
    "select_interval": st.sampled_from(["auto", 0, 1]),
    "offload": st.booleans(),
    "worker_cores": st.just(1),
    "worker_timeout": st.just(250),
}
"""Keys that change neither what a random module's weights are nor when they are shown."""


@st.composite
def of_modules(draw: st.DrawFn) -> tuple[Given, Training]:
    """A random module with nothing late; one in eight has a mistake."""
    mistaken = draw(st.sampled_from([False] * 7 + [True]))
    training = draw(trainings(modules(), mistaken=mistaken))
    if mistaken:
        training = replace(training, mistake=draw(mistakes("module")))
    keys = {key: draw(values) for key, values in MODULE_KEYS.items()}
    return Given(form="keywords", layout=as_flat, config={**keys, **nothing_late(draw)}, junk=None), training


KINDS = ["nothing late"] * 5 + ["any"] * 2 + ["junk"] * 2 + ["mistake"] * 2


def of_configurations() -> st.SearchStrategy[tuple[Given, Training]]:
    """A random configuration of any kind of `configured`."""
    return st.sampled_from(KINDS).flatmap(lambda kind: configured(kind=kind))
