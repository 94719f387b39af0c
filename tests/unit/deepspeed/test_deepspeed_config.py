"""resolve_config: every form of a config, precedence, and one error for each mistake. prepare_deepspeed_config: the keys it sets and
refuses; DeepSpeed and torch accept the result.
"""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig as DeepSpeedZenFlowConfig
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lightning_zenflow.config import KEYS, ZenFlowConfig
from lightning_zenflow.deepspeed.config import prepare_deepspeed_config, read_settings, resolve_config

ZERO = {"stage": 2, "contiguous_gradients": True, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
RESULT = {
    "zero_optimization": ZERO,
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "timers": {"throughput": {"synchronized": False}},
}
NAN = float("nan")


def at(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def refusal_of(config: dict[str, Any], **trainer: Any) -> str:
    with pytest.raises(MisconfigurationException) as error:
        prepare_deepspeed_config(config, **trainer)
    return str(error.value)


NOTHING: list[dict[str, Any]] = [
    {},
    {"zero_optimization": None, "optimizer": None, "timers": None},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5}, "contiguous_gradients": False}},
    {"zero_optimization": {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}},
    {"zero_optimization": {"cpu_offload": True, "cpu_offload_use_pin_memory": True, "cpu_offload_param": False}},
    {"train_batch_size": 8, "gradient_accumulation_steps": 1},
    dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
]  # fmt: skip
"""Configurations that say nothing."""


@pytest.mark.parametrize(
    ("config", "trainer", "result"),
    [
        *((config, {}, {}) for config in NOTHING),
        ({"gradient_accumulation_steps": 1}, {"accumulate_grad_batches": 4}, {}),
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 4}, {}),
        ({"gradient_accumulation_steps": 4}, {}, {"gradient_accumulation_steps": 4}),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 1}, {"gradient_clipping": 1.0}),
        ({"gradient_clipping": 0}, {}, {"gradient_clipping": 0}),
        ({"fp16": {"enabled": True}}, {"precision": "16-mixed"}, {"fp16": {"enabled": True}}),
        ({"bf16": {"enabled": False}}, {"precision": "32-true"}, {"bf16": {"enabled": False}}),
    ],
)
def test_what_is_set_and_agrees_with_the_trainer(
    config: dict[str, Any], trainer: dict[str, Any], result: dict[str, Any]
) -> None:
    before = copy.deepcopy(config)
    assert prepare_deepspeed_config(config, **trainer) == {**prepare_deepspeed_config(None), **result}
    assert prepare_deepspeed_config(None) == RESULT
    assert config == before


def test_what_it_does_not_know_stays_and_preparing_again_changes_nothing() -> None:
    config = {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": False,
        "pipeline": {"stages": "auto"},
        "data_types": {"keep_in_fp32_modules": "auto"},
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "bias_correction": True}},
        "timers": {"throughput": {"synchronized": True}},
    }
    once = prepare_deepspeed_config({**config, "zero_optimization": {"reduce_bucket_size": 5e8, "overlap_comm": False}})
    assert once["zero_optimization"] == {**ZERO, "reduce_bucket_size": 5e8, "overlap_comm": False}
    assert {key: once[key] for key in config if key != "optimizer"} == {
        k: v for k, v in config.items() if k != "optimizer"
    }
    assert prepare_deepspeed_config(once) == once


def test_deepspeed_reads_it(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 2, "cpu_offload": True, "offload_param": {"device": "none"}},
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 2,
    }
    caplog.set_level(logging.INFO)
    read = DeepSpeedConfig(prepare_deepspeed_config(config, precision="bf16-true"))
    assert (read.zero_config.stage, read.zero_config.offload_optimizer.device) == (2, "cpu")
    assert read.zero_config.zenflow is None
    assert "train_batch_size=7 is not used" in caplog.text  # the data loader's is
    assert (read.train_batch_size, read.bfloat16_config.enabled) == (2, True)


@pytest.mark.parametrize(
    ("config", "trainer", "message"),
    [
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 1}, "the Trainer's accumulate_grad_batches (1), got 4"),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, "the Trainer's gradient_clip_val (0.5) or absent, got 1.0"),
        ({"bfloat16": {"enabled": True}}, {"precision": "32-true"}, "bf16.enabled must be False or absent, got True: "),
        *(({}, {"accumulate_grad_batches": n}, f"Trainer: accumulate_grad_batches must be an integer >= 1, got {n}") for n in (0, 1.5)),
        *(({}, {"gradient_clip_val": norm}, f"Trainer: gradient_clip_val must be a number >= 0, got {norm}") for norm in (-1, NAN)),
    ],
)  # fmt: skip
def test_disagrees_with_the_trainer(config: dict[str, Any], trainer: dict[str, Any], message: str) -> None:
    assert message in refusal_of(config, **trainer)


REFUSED: list[tuple[str, list[Any], str]] = [
    ("zero_optimization", [True, 2, "auto"], "a mapping"),
    ("zero_optimization.stage", [0, 4, "2", True, "auto"], "1, 2 or 3, got "),
    ("zero_optimization.parameter_alignment", [True], "False"),
    ("zero_optimization.compute_grad_norm", [False], "True"),
    ("zero_optimization.elastic_checkpoint", [True], "False"),
    ("zero_optimization.load_from_fp32_weights", [False], "True"),
    ("zero_optimization.zero_hpz_partition_size", [2, 8], "1"),
    *((f"zero_optimization.zero_quantized_{key}", [True], "False") for key in ("weights", "nontrainable_weights", "gradients")),
    ("checkpoint.writer", [{"decoupled": True}], "absent"),
    ("expert_parallel.enabled", [True], "False"),
    ("zero_optimization.cpu_offload_param", [True], "False"),
    ("zero_optimization.offload_optimizer", [True], "a mapping"),
    ("zero_optimization.offload_optimizer.device", ["nvme", "gpu"], "'cpu'"),
    ("zero_optimization.offload_param", ["cpu"], "a mapping"),
    ("zero_optimization.offload_param.device", ["nvme"], "'cpu' or 'none'"),
    ("zero_optimization.offload_param.device", ["cpu"], "'none'"),
    ("gradient_clipping", [-1, NAN, float("inf"), "1.0", True, [1]], "a finite number >= 0 (0: off)"),
    ("managed_gradient_accumulation", [False], "True"),
    ("torch_autocast.enabled", [True], "False"),
    ("optimizer", ["AdamW", 3], "a mapping"),
    ("optimizer.type", ["Lamb", "OneBitAdam", "Lion", "SGD", "", 3], "'AdamW' or 'Adam'"),
    *((f"optimizer.params.{key}", [True], "False") for key in ("amsgrad", "maximize", "differentiable")),
    ("optimizer.params.bias_correction", [False], "True"),
    *((path, ["auto"], "a value, which Lightning does not choose") for path in ("optimizer.params.lr", "scheduler.params.steps")),
]  # fmt: skip


@pytest.mark.parametrize(("path", "values", "allowed"), REFUSED)
def test_key_value_and_allowed_are_named(path: str, values: list[Any], allowed: str) -> None:
    for value in values:
        config = at(path, value)
        if path.startswith("optimizer.params"):
            config["optimizer"]["type"] = "AdamW"
        message = refusal_of(config)
        assert message.startswith(f"DeepSpeed config: {path} must be {allowed}") and ", got " in message


def test_stages() -> None:
    """DeepSpeed has one class for stages 1 and 2."""
    for stage, prepared_stage in ((1, 2), (2, 2), (3, 3)):
        prepared = prepare_deepspeed_config({"zero_optimization": {"stage": stage}})
        assert prepared["zero_optimization"] == {**ZERO, "stage": prepared_stage}
    # Of trained parameters torch would keep the page-locked memory that they have before they are in the arena.
    expected = {**ZERO, "stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}
    for key, value in (("offload_param", {"device": "cpu", "pin_memory": True}), ("cpu_offload_param", True)):
        prepared = prepare_deepspeed_config({"zero_optimization": {"stage": 3, key: value}})
        assert prepared["zero_optimization"] == prepare_deepspeed_config(prepared)["zero_optimization"] == expected
        for stage in (1, 2):
            assert "set stage to 3" in refusal_of({"zero_optimization": {"stage": stage, key: value}})


def test_keywords_of_lightning_that_it_would_ignore() -> None:
    beside: dict[str, Any] = {"bf16": {}}
    read_settings(None, {"stage": 3, "offload_optimizer_device": "cpu", "remote_device": None}, DeepSpeedStrategy)
    read_settings(beside, {"stage": None, "remote_device": None, "logging_level": 30}, DeepSpeedStrategy)
    for option, value in (("stage", 3), ("offload_parameters", False), ("loss_scale", 128.0)):
        must = f"ZenFlowStrategy: {option} must be None or absent, got {value}: beside a DeepSpeed config .* write the setting into it"
        with pytest.raises(MisconfigurationException, match=must):
            read_settings(beside, {option: value}, DeepSpeedStrategy)
    for option in ("offload_optimizer_device", "offload_params_device"):
        with pytest.raises(MisconfigurationException, match=f"{option} must be 'cpu' or absent, got 'nvme'"):
            read_settings(None, {option: "nvme"}, DeepSpeedStrategy)


@pytest.mark.parametrize(
    ("kind", "params", "decoupled"),
    [
        ("AdamW", {}, True),
        ("adam", {}, True),
        ("Adam", {"adam_w_mode": False}, False),
        ("AdamW", {"adam_w_mode": False}, True),
    ],
)
def test_torch_takes_the_params(kind: str, params: dict[str, Any], decoupled: bool) -> None:
    """As ``DeepSpeedEngine._configure_basic_optimizer`` reads them, with DeepSpeed's defaults."""
    given = {"lr": 2e-5, "betas": [0.9, 0.99], "eps": 1e-8, "bias_correction": True, "fp32_optimizer_states": True}
    prepared = prepare_deepspeed_config({"optimizer": {"type": kind, "params": {**given, **params}}})["optimizer"]
    assert prepared["type"] == kind and prepared["params"].pop("torch_adam") is True
    adam_w_mode = prepared["params"].pop("adam_w_mode", True)
    constructor = torch.optim.AdamW if kind.lower() == "adamw" or adam_w_mode else torch.optim.Adam
    assert (constructor is torch.optim.AdamW) == decoupled
    optimizer = constructor([torch.nn.Parameter(torch.zeros(2))], **prepared["params"])
    assert optimizer.param_groups[0]["weight_decay"] == 0.0


OF_DEEPSPEED = Path(__file__).parents[3] / "conf" / "zf_config.json"


def with_block(**block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, "zenflow": block}}


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


FLAT = {"topk_ratio": 0.25, "update_interval": 2}


@pytest.mark.parametrize(("form", "rest"), [(FLAT, None), (with_block(**FLAT), {"zero_optimization": {"stage": 2}})])
def test_every_form_in_every_kind(form: dict[str, Any], rest: Any, tmp_path: Path) -> None:
    content = copy.deepcopy(form)
    sources: list[Any] = [
        content,
        OmegaConf.create(content),
        write(tmp_path / "c.yaml", OmegaConf.to_yaml(OmegaConf.create(content))),
        str(write(tmp_path / "c.json", json.dumps(content))),
    ]
    for source in sources:
        config, resolved = resolve_config(source, {})
        assert (config, resolved) == (ZenFlowConfig(topk_ratio=0.25, update_interval=2), rest)
        if isinstance(resolved, dict):
            # The caller's is neither changed nor shared.
            resolved["zero_optimization"]["stage"] = 3
    assert content == form


def test_keywords_instances_and_nothing(tmp_path: Path) -> None:
    assert resolve_config(None, {"topk_ratio": 0.5}) == (ZenFlowConfig(topk_ratio=0.5), None)
    config = ZenFlowConfig(update_interval=2)
    assert resolve_config(config, {"topk_ratio": 0.5}) == (ZenFlowConfig(update_interval=2, topk_ratio=0.5), None)
    # A keyword before the block before the default.
    found = resolve_config(with_block(topk_ratio=7, update_interval=3), {"topk_ratio": 0.1})
    assert found == (ZenFlowConfig(topk_ratio=0.1, update_interval=3), {"zero_optimization": {"stage": 2}})
    with pytest.raises(ValueError, match=r"^ZenFlowConfig: update_interval must be .*, got 0"):
        resolve_config({"topk_ratio": 0.5}, {"update_interval": 0})
    for empty in ("", "{}"):
        assert resolve_config(write(tmp_path / "c.yaml", empty), {}) == (ZenFlowConfig(), None)
    objects = {"data_types": {"grad_accum_dtype": torch.float32}, "fp16": {}}
    assert resolve_config(objects, {}) == (ZenFlowConfig(), objects)
    # Hydra's lists are of its own type, with interpolations.
    by_hydra = {"worker_cores": OmegaConf.create({"core": 1, "worker_cores": [0, "${core}"]}).worker_cores}
    for given in (None, {"topk_ratio": 0.1}):
        assert resolve_config(given, by_hydra)[0].worker_cores == (0, 1)
    for wrong in (3, ["topk_ratio"], OmegaConf.create([1])):
        with pytest.raises(MisconfigurationException, match="^config must be a mapping, a ZenFlowConfig, or the path"):
            resolve_config(wrong, {})  # type: ignore[arg-type]


def test_interpolations_and_numbers_of_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S", "2")
    content = (
        "zero_optimization:\n  zenflow:\n    update_interval: ${oc.decode:${oc.env:S}}\n    topk_ratio: 1e-2\n"
        "gradient_clipping: ${zero_optimization.zenflow.topk_ratio}\n"
    )
    expected = (ZenFlowConfig(update_interval=2, topk_ratio=0.01), {"zero_optimization": {}, "gradient_clipping": 0.01})
    assert resolve_config(write(tmp_path / "c.yaml", content), {}) == expected
    assert resolve_config({"update_interval": "${oc.decode:${oc.env:S}}"}, {})[0].update_interval == 2


def test_deepspeeds_block() -> None:
    """The file of its examples works unchanged; the block may have all of our keys."""
    config, deepspeed = resolve_config(OF_DEEPSPEED, {})
    whole = json.loads(OF_DEEPSPEED.read_text())
    assert config == ZenFlowConfig(**whole["zero_optimization"].pop("zenflow"))
    assert deepspeed == whole
    assert set(DeepSpeedZenFlowConfig.model_fields) - {"steps_per_epoch"} <= set(KEYS)
    assert resolve_config(with_block(steps_per_epoch=100, publish_lag=1), {})[0] == ZenFlowConfig(publish_lag=1)
    assert resolve_config({"zero_optimization": {"zenflow": None}}, {}) == (ZenFlowConfig(), {"zero_optimization": {}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"topk_ration": 0.1}, r"unknown key 'topk_ration' \(did you mean 'topk_ratio'\?\); keys are topk_ratio"),
        ({"zenflow": {"topk_ratio": 1}}, "unknown key 'zenflow'; keys are topk_ratio"),
        ({"zenflow": {}, "fp16": {}}, "zenflow must be absent beside keys of DeepSpeed, got {}: write it into zero_optimization.zenflow"),
        ({"topk_ratio": 0.1, "fp16": {}}, "topk_ratio must be absent beside keys of DeepSpeed, got 0.1: "),
        (with_block(lag=1), "zero_optimization.zenflow: unknown key 'lag'"),
        ({"zero_optimization": {"zenflow": True}}, r"zero_optimization\.zenflow must be a mapping, got True"),
        ({"topk_ratio": "${nowhere}"}, "nowhere"),
        ({"topk_ratio": 1.5}, r"ZenFlowConfig: topk_ratio must be a number from 0 to 1, got 1.5"),
        # Of files alone, in JSON where there are braces.
        ('{"fp16": {}, "fp16": {}}', "cannot be read: Duplicate keys"),
        ('{"fp16": "\xff"}', "cannot be read: .*codec"),
        ("topk_ratio: [0.1", "cannot be read: "),
        ("topk_ratio: 0.1\ntopk_ratio: 0.2", "cannot be read: .*duplicate"),
        ("- 1", r"mine.yaml must be a mapping, .*, got \[1\]"),
        (None, "cannot be read: .*No such file"),
    ],
)  # fmt: skip
def test_mistakes_name_their_source(content: dict[str, Any] | str | None, message: str, tmp_path: Path) -> None:
    is_json = isinstance(content, str) and content.startswith("{")
    sources: dict[str, Any] = {str(path := tmp_path / ("mine.json" if is_json else "mine.yaml")): path}
    if isinstance(content, str):
        path.write_text(content, encoding="latin-1")
    elif content is not None:
        OmegaConf.save(OmegaConf.create(content), path)
        sources["config"] = content
    for name, source in sources.items():
        with pytest.raises((MisconfigurationException, ValueError), match=f"(?s){message}") as error:
            resolve_config(source, {})
        assert str(error.value).startswith(name)
