"""resolve_config: every form of a config, precedence, and one error for each mistake."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.zero.config_sources import resolve_config

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
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
}


def without_block(config: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(config)
    del result["zero_optimization"]["zenflow"]
    return result


def with_block(**block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, "zenflow": block}}


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


class TestForms:
    def test_keywords_only(self) -> None:
        assert resolve_config(None, {}) == (ZenFlowConfig(), None)
        assert resolve_config(None, {"topk_ratio": 0.5}) == (ZenFlowConfig(topk_ratio=0.5), None)

    def test_instance(self) -> None:
        config = ZenFlowConfig(update_interval=2)
        assert resolve_config(config, {"topk_ratio": 0.5}) == (ZenFlowConfig(update_interval=2, topk_ratio=0.5), None)
        assert config == ZenFlowConfig(update_interval=2)

    def test_changed_instance_is_validated_again(self) -> None:
        config = ZenFlowConfig()
        config.topk_ratio = 7
        with pytest.raises(ValueError, match="topk_ratio must be .*, got 7"):
            resolve_config(config, {})

    @pytest.mark.parametrize("kind", ["dict", "DictConfig", "yaml", "yml", "json"])
    @pytest.mark.parametrize("form", ["flat", "sections", "deepspeed"])
    def test_every_form_in_every_kind(self, kind: str, form: str, tmp_path: Path) -> None:
        flat = {"topk_ratio": 0.25, "update_interval": 2}
        deepspeed = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
        content: dict[str, Any] = {
            "flat": flat,
            "sections": {"zenflow": flat, "deepspeed": deepspeed},
            "deepspeed": {**deepspeed, "zero_optimization": {"stage": 2, "zenflow": flat}},
        }[form]
        before = copy.deepcopy(content)
        source: Any = {
            "dict": lambda: content,
            "DictConfig": lambda: OmegaConf.create(content),
            "yaml": lambda: write(tmp_path / "c.yaml", OmegaConf.to_yaml(OmegaConf.create(content))),
            "yml": lambda: str(write(tmp_path / "c.yml", OmegaConf.to_yaml(OmegaConf.create(content)))),
            "json": lambda: str(write(tmp_path / "c.json", json.dumps(content))),
        }[kind]()
        config, resolved = resolve_config(source, {})
        assert config == ZenFlowConfig(topk_ratio=0.25, update_interval=2)
        assert resolved == (None if form == "flat" else deepspeed)
        assert content == before
        if isinstance(resolved, dict):
            assert type(resolved["zero_optimization"]) is dict

    def test_structured_dict_config(self) -> None:
        structured = OmegaConf.structured(ZenFlowConfig(topk_ratio=0.25))
        assert resolve_config(structured, {}) == (ZenFlowConfig(topk_ratio=0.25), None)
        assert resolve_config({"zenflow": structured}, {}) == (ZenFlowConfig(topk_ratio=0.25), None)
        assert resolve_config({"zenflow": ZenFlowConfig(topk_ratio=0.25)}, {})[0] == ZenFlowConfig(topk_ratio=0.25)

    @pytest.mark.parametrize("empty", ["", "zenflow:\n", "zenflow: {}\ndeepspeed:\n", "{}"])
    def test_empty_file(self, empty: str, tmp_path: Path) -> None:
        assert resolve_config(write(tmp_path / "c.yaml", empty), {}) == (ZenFlowConfig(), None)

    def test_empty_deepspeed_section_is_not_none(self) -> None:
        assert resolve_config({"deepspeed": {}}, {}) == (ZenFlowConfig(), {})

    def test_deepspeed_dict_may_hold_objects(self) -> None:
        config, deepspeed = resolve_config({"data_types": {"grad_accum_dtype": torch.float32}, "fp16": {}}, {})
        assert config == ZenFlowConfig()
        assert deepspeed == {"data_types": {"grad_accum_dtype": torch.float32}, "fp16": {}}

    def test_callers_containers_are_neither_changed_nor_shared(self) -> None:
        original = copy.deepcopy(TUTORIAL)
        _, deepspeed = resolve_config(TUTORIAL, {})
        assert deepspeed is not None
        deepspeed["bf16"]["enabled"] = False
        deepspeed["optimizer"]["params"]["betas"].append(1)
        assert original == TUTORIAL

    def test_scientific_notation_in_yaml_is_a_number(self, tmp_path: Path) -> None:
        _, deepspeed = resolve_config(write(tmp_path / "c.yaml", "gradient_clipping: 1e-2"), {})
        assert deepspeed == {"gradient_clipping": 0.01}

    def test_interpolations_are_resolved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("S", "2")
        content = (
            "zenflow:\n  update_interval: ${oc.decode:${oc.env:S}}\n  topk_ratio: ${oc.decode:${oc.env:UNSET,0.25}}\n"
            "deepspeed:\n  gradient_clipping: ${zenflow.topk_ratio}\n"
        )
        expected = (ZenFlowConfig(update_interval=2, topk_ratio=0.25), {"gradient_clipping": 0.25})
        assert resolve_config(write(tmp_path / "c.yaml", content), {}) == expected
        assert resolve_config(OmegaConf.create(content), {}) == expected
        assert resolve_config({"update_interval": "${oc.decode:${oc.env:S}}"}, {})[0] == ZenFlowConfig(
            update_interval=2
        )


class TestPrecedence:
    def test_keyword_over_section_over_block_over_default(self) -> None:
        content = {
            "zenflow": {"topk_ratio": 0.2, "update_interval": 2},
            "deepspeed": with_block(topk_ratio=0.3, update_interval=3, full_warm_up_rounds=3),
        }
        config, deepspeed = resolve_config(content, {"topk_ratio": 0.1})
        assert config == ZenFlowConfig(topk_ratio=0.1, update_interval=2, full_warm_up_rounds=3)
        assert deepspeed == {"zero_optimization": {"stage": 2}}

    def test_keyword_heals_a_wrong_value(self) -> None:
        assert resolve_config({"topk_ratio": 7}, {"topk_ratio": 0.1})[0].topk_ratio == 0.1

    def test_bounds_are_checked_after_the_merge(self) -> None:
        assert resolve_config({"update_interval": 32}, {"max_update_interval": 32})[0].update_interval == 32
        with pytest.raises(
            ValueError, match="update_interval must be an integer from 1 to max_update_interval=16, got 32"
        ):
            resolve_config({"update_interval": 32}, {})


class TestDeepSpeedBlock:
    def test_tutorial_file_works_unchanged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = write(tmp_path / "zf_config.json", json.dumps(TUTORIAL))
        with caplog.at_level(logging.WARNING, logger="lightning_zenflow"):
            config, deepspeed = resolve_config(path, {})
        assert config == ZenFlowConfig(
            topk_ratio=0.1, select_strategy="auto", update_interval=4, full_warm_up_rounds=5, overlap_step=True
        )
        assert deepspeed == without_block(TUTORIAL)
        assert not caplog.records

    def test_all_keys_of_deepspeed(self, caplog: pytest.LogCaptureFixture) -> None:
        block = {
            "topk_ratio": 0.2,
            "select_strategy": "epoch",
            "select_interval": 10,
            "update_interval": "auto",
            "full_warm_up_rounds": 1,
            "overlap_step": False,
            "offload": True,
            "auto_ratio": 0.9,
            "pt_reserved_cores_perc": 0.25,
            "steps_per_epoch": 100,
        }
        config, _ = resolve_config(with_block(**block), {})
        assert config == ZenFlowConfig(
            topk_ratio=0.2,
            select_strategy="epoch",
            select_interval=10,
            update_interval="auto",
            full_warm_up_rounds=1,
            overlap_step=False,
            offload=True,
            auto_ratio=0.9,
            pt_reserved_cores_perc=0.25,
        )
        assert not caplog.records

    def test_keyword_wins_without_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        config, _ = resolve_config(with_block(update_interval=4), {"update_interval": 8})
        assert config.update_interval == 8
        assert not caplog.records

    def test_long_interval_lifts_the_bound_that_deepspeed_does_not_have(self) -> None:
        config, _ = resolve_config(with_block(update_interval=32), {})
        assert (config.update_interval, config.max_update_interval) == (32, 32)
        with pytest.raises(ValueError, match="max_update_interval=8"):
            resolve_config(with_block(update_interval=32), {"max_update_interval": 8})

    @pytest.mark.parametrize("block", [None, {}])
    def test_empty_block(self, block: Any) -> None:
        assert resolve_config({"zero_optimization": {"stage": 2, "zenflow": block}}, {}) == (
            ZenFlowConfig(),
            {"zero_optimization": {"stage": 2}},
        )

    @pytest.mark.parametrize(
        ("key", "value"),
        [("topk_ratio", 1.5), ("update_interval", 0), ("offload", 1)],
    )
    def test_wrong_value(self, key: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"ZenFlowConfig: {key} must be .*, got {value!r};"):
            resolve_config(with_block(**{key: value}), {})

    @pytest.mark.parametrize("key", ["publish_lag", "topk", "worker_cores"])
    def test_unknown_key(self, key: str) -> None:
        with pytest.raises(MisconfigurationException, match=f"zero_optimization.zenflow: unknown key '{key}'"):
            resolve_config(with_block(**{key: 1}), {})

    def test_no_mapping(self) -> None:
        with pytest.raises(MisconfigurationException, match=r"zero_optimization\.zenflow must be a mapping, got True"):
            resolve_config({"zero_optimization": {"zenflow": True}}, {})


class TestMistakes:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (
                {"topk_ration": 0.1},
                r"unknown key 'topk_ration' \(did you mean 'topk_ratio'\?\); keys are topk_ratio",
            ),
            ({"deferred_update": "replay"}, "deferred_update was removed: every gradient is replayed exactly"),
            ({"zenflow": {"deferred_update": "replay"}}, "section zenflow: deferred_update was removed"),
            ({"zero_optimisation": {}}, r"unknown key 'zero_optimisation' \(did you mean 'zero_optimization'\?\)"),
            (
                {"zenflow": {"topk_rate": 1}},
                r"section zenflow: unknown key 'topk_rate' \(did you mean 'topk_ratio'\?\)",
            ),
            ({"zenflow": {}, "deep_speed": {}}, r"unknown key 'deep_speed' \(did you mean 'deepspeed'\?\)"),
            (
                {"fp16": {}, "gradient_cliping": 1.0},
                r"unknown key 'gradient_cliping' \(did you mean 'gradient_clipping'\?\), which DeepSpeed would ignore",
            ),
            (
                {"deepspeed": {"zero_optimisation": {}}},
                r"unknown key 'zero_optimisation' \(did you mean 'zero_optimization'\?\)",
            ),
            ({"zenflow": 3}, "zenflow must be a mapping, got 3"),
            ({"deepspeed": "zf.json"}, "deepspeed must be a mapping, got 'zf.json'"),
            ({"zenflow": {}, "fp16": {}}, "'fp16' is a key of DeepSpeed; move it into the section `deepspeed:`"),
            (
                {"topk_ratio": 0.1, "fp16": {}},
                "'topk_ratio' is a key of ZenFlow; .* move it into zero_optimization.zenflow",
            ),
            ({"topk_ratio": "${nowhere}"}, "nowhere"),
            ({"topk_ratio": "???"}, "topk_ratio"),
        ],
    )
    @pytest.mark.parametrize("kind", ["dict", "yaml"])
    def test_structure(self, content: dict[str, Any], message: str, kind: str, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        if kind == "yaml":
            OmegaConf.save(OmegaConf.create(content), path)
        with pytest.raises(MisconfigurationException, match=message) as error:
            resolve_config(content if kind == "dict" else path, {})
        assert str(error.value).startswith("config" if kind == "dict" else str(path))

    def test_value_names_its_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "mine.yaml", "topk_ratio: 1.5")
        with pytest.raises(ValueError) as error:
            resolve_config(path, {})
        assert str(error.value).startswith(f"{path}: ZenFlowConfig: topk_ratio must be a number from 0 to 1, got 1.5")

    def test_wrong_keyword_does_not_blame_the_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "mine.yaml", "topk_ratio: 0.5")
        with pytest.raises(ValueError, match=r"^ZenFlowConfig: update_interval must be .*, got 0"):
            resolve_config(path, {"update_interval": 0})

    def test_unknown_keyword(self) -> None:
        with pytest.raises(MisconfigurationException, match="keyword arguments: unknown key 'lag'"):
            resolve_config(None, {"lag": 1})

    @pytest.mark.parametrize("name", ["missing.json", "missing.yaml"])
    def test_missing_file(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(MisconfigurationException, match=f"must be an existing file, got '.*{name}'"):
            resolve_config(tmp_path / name, {})

    def test_directory(self, tmp_path: Path) -> None:
        (tmp_path / "folder.yaml").mkdir()
        with pytest.raises(MisconfigurationException, match="must be an existing file"):
            resolve_config(tmp_path / "folder.yaml", {})

    @pytest.mark.parametrize("name", ["zf.toml", "zf", "zf.json.bak"])
    def test_wrong_suffix(self, name: str, tmp_path: Path) -> None:
        path = write(tmp_path / name, "{}")
        with pytest.raises(MisconfigurationException, match=rf"must be a file named \*\.json .*, got '.*{name}'"):
            resolve_config(path, {})

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.json", "{'topk_ratio': 0.1}"),
            ("a.json", ""),
            ("a.json", '{"fp16": {}, "fp16": {}}'),
            ("a.yaml", "topk_ratio: [0.1"),
            ("a.yaml", "topk_ratio: 0.1\ntopk_ratio: 0.2"),
            ("a.yaml", "4"),
            ("a.yaml", "a: \t- b"),
        ],
    )
    def test_malformed_file(self, name: str, content: str, tmp_path: Path) -> None:
        path = write(tmp_path / name, content)
        kind = path.suffix[1:].upper()
        with pytest.raises(MisconfigurationException, match=f"{name}: cannot be read as {kind}: "):
            resolve_config(path, {})

    def test_undecodable_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_bytes(b'{"fp16": "\xff"}')
        with pytest.raises(MisconfigurationException, match="cannot be read as JSON"):
            resolve_config(path, {})

    @pytest.mark.parametrize(("name", "content"), [("a.json", "[1]"), ("a.json", "null"), ("a.yaml", "- 1")])
    def test_no_mapping_at_the_top(self, name: str, content: str, tmp_path: Path) -> None:
        with pytest.raises(MisconfigurationException, match=f"{name}: the top level must be a mapping"):
            resolve_config(write(tmp_path / name, content), {})

    @pytest.mark.parametrize("config", [3, ["topk_ratio"], OmegaConf.create([1])])
    def test_wrong_type(self, config: Any) -> None:
        with pytest.raises(MisconfigurationException, match=r"^config must be the path of a DeepSpeed JSON"):
            resolve_config(config, {})
