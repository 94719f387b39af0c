"""resolve_config: every form of a config, precedence, and one error for each mistake."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig as DeepSpeedZenFlowConfig
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lightning_zenflow.config import KEYS, ZenFlowConfig
from lightning_zenflow.deepspeed.config import resolve_config

# As in the ZenFlow tutorial of DeepSpeed.
TUTORIAL: dict[str, Any] = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {
            "topk_ratio": 0.1,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": 4,
            "full_warm_up_rounds": 5,
            "overlap_step": True,
        },
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
}


def with_block(**block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, "zenflow": block}}


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


FLAT = {"topk_ratio": 0.25, "update_interval": 2}
DEEPSPEED = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
FORMS: dict[str, dict[str, Any]] = {
    "flat": FLAT,
    "sections": {"zenflow": FLAT, "deepspeed": DEEPSPEED},
    "deepspeed": {**DEEPSPEED, "zero_optimization": {"stage": 2, "zenflow": FLAT}},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_every_kind(form: str, tmp_path: Path) -> None:
    content = copy.deepcopy(FORMS[form])
    sources: list[Any] = [
        content,
        OmegaConf.create(content),
        write(tmp_path / "c.yaml", OmegaConf.to_yaml(OmegaConf.create(content))),
        str(write(tmp_path / "c.json", json.dumps(content))),
    ]
    for source in sources:
        config, resolved = resolve_config(source, {})
        assert config == ZenFlowConfig(topk_ratio=0.25, update_interval=2)
        assert resolved == (None if form == "flat" else DEEPSPEED)
        if isinstance(resolved, dict):
            # The caller's is neither changed nor shared.
            resolved["zero_optimization"]["stage"] = 3
    assert content == FORMS[form]


def test_keywords_instances_and_nothing(tmp_path: Path) -> None:
    assert resolve_config(None, {"topk_ratio": 0.5}) == (ZenFlowConfig(topk_ratio=0.5), None)
    config = ZenFlowConfig(update_interval=2)
    assert resolve_config(config, {"topk_ratio": 0.5}) == (ZenFlowConfig(update_interval=2, topk_ratio=0.5), None)
    # A keyword before a section before the block before the default.
    block = with_block(topk_ratio=7, update_interval=3, full_warm_up_rounds=3)
    found = resolve_config(
        {"zenflow": {"topk_ratio": 0.2, "update_interval": 2}, "deepspeed": block}, {"topk_ratio": 0.1}
    )
    config = ZenFlowConfig(topk_ratio=0.1, update_interval=2, full_warm_up_rounds=3)
    assert found == (config, {"zero_optimization": {"stage": 2}})
    with pytest.raises(ValueError, match=r"^ZenFlowConfig: update_interval must be .*, got 0"):
        resolve_config({"topk_ratio": 0.5}, {"update_interval": 0})
    for empty in ("", "zenflow:\n", "zenflow: {}\ndeepspeed:\n", "{}"):
        assert resolve_config(write(tmp_path / "c.yaml", empty), {}) == (ZenFlowConfig(), None)
    objects = {"data_types": {"grad_accum_dtype": torch.float32}, "fp16": {}}
    assert resolve_config(objects, {}) == (ZenFlowConfig(), objects)


def test_interpolations_and_numbers_of_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S", "2")
    content = (
        "zenflow:\n  update_interval: ${oc.decode:${oc.env:S}}\n  topk_ratio: 1e-2\n"
        "deepspeed:\n  gradient_clipping: ${zenflow.topk_ratio}\n"
    )
    expected = (ZenFlowConfig(update_interval=2, topk_ratio=0.01), {"gradient_clipping": 0.01})
    assert resolve_config(write(tmp_path / "c.yaml", content), {}) == expected
    assert resolve_config({"update_interval": "${oc.decode:${oc.env:S}}"}, {})[0].update_interval == 2


def test_deepspeeds_block(tmp_path: Path) -> None:
    """Its tutorial works unchanged; the block may have all of our keys."""
    config, deepspeed = resolve_config(write(tmp_path / "zf_config.json", json.dumps(TUTORIAL)), {})
    zero = dict(TUTORIAL["zero_optimization"])
    assert config == ZenFlowConfig(**zero.pop("zenflow"))
    assert deepspeed == {**TUTORIAL, "zero_optimization": zero}
    assert set(DeepSpeedZenFlowConfig.model_fields) - {"steps_per_epoch"} <= set(KEYS)
    assert resolve_config(with_block(steps_per_epoch=100, publish_lag=1), {})[0] == ZenFlowConfig(publish_lag=1)
    assert resolve_config({"zero_optimization": {"zenflow": None}}, {}) == (ZenFlowConfig(), {"zero_optimization": {}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"topk_ration": 0.1}, r"unknown key 'topk_ration' \(did you mean 'topk_ratio'\?\); keys are topk_ratio"),
        ({"zenflow": {"topk_rate": 1}}, r"section zenflow: unknown key 'topk_rate' \(did you mean 'topk_ratio'\?\)"),
        ({"zenflow": {}, "fp16": {}}, "unknown key 'fp16'; keys are zenflow, deepspeed"),
        (
            {"fp16": {}, "gradient_cliping": 1.0},
            r"unknown key 'gradient_cliping' \(did you mean 'gradient_clipping'\?\), which DeepSpeed would ignore",
        ),
        ({"deepspeed": {"zero_optimisation": {}}}, r"unknown key 'zero_optimisation' \(did you mean 'zero_optimization'"),
        ({"zenflow": 3}, "zenflow must be a mapping, got 3"),
        ({"topk_ratio": 0.1, "fp16": {}}, "'topk_ratio' is a key of ZenFlow; .* move it into zero_optimization.zenflow"),
        (with_block(lag=1), "zero_optimization.zenflow: unknown key 'lag'"),
        ({"zero_optimization": {"zenflow": True}}, r"zero_optimization\.zenflow must be a mapping, got True"),
        ({"topk_ratio": "${nowhere}"}, "nowhere"),
        ({"topk_ratio": 1.5}, r"ZenFlowConfig: topk_ratio must be a number from 0 to 1, got 1.5"),
    ],
)  # fmt: skip
def test_mistakes_name_their_source(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    OmegaConf.save(OmegaConf.create(content), path)
    for source, name in ((content, "config"), (path, str(path))):
        with pytest.raises((MisconfigurationException, ValueError), match=message) as error:
            resolve_config(source, {})
        assert str(error.value).startswith(name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "missing.json: cannot be read: .*No such file"),
        ("a.json", '{"fp16": {}, "fp16": {}}', "cannot be read: Duplicate keys"),
        ("a.json", '{"fp16": "\xff"}', "cannot be read: .*codec"),
        ("a.yaml", "topk_ratio: [0.1", "cannot be read: "),
        ("a.yaml", "topk_ratio: 0.1\ntopk_ratio: 0.2", "cannot be read: .*duplicate"),
        ("a.yaml", "- 1", r"a.yaml must be a mapping, .*, got \[1\]"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(MisconfigurationException, match=f"(?s){message}"):
        resolve_config(tmp_path / name, {})


def test_wrong_type() -> None:
    for config in (3, ["topk_ratio"], OmegaConf.create([1])):
        with pytest.raises(
            MisconfigurationException, match="^config must be a mapping, a ZenFlowConfig, or the path of"
        ):
            resolve_config(config, {})  # type: ignore[arg-type]
