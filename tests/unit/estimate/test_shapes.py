"""Counts of a model's parameters for the cost model."""

import sys
from pathlib import Path

import pytest

from lightning_zenflow.config import ConfigValueError
from lightning_zenflow.estimate.shapes import shapes_of_count, shapes_of_hugging_face_config, shapes_of_module
from networks import SmallNet


def test_counts_a_module() -> None:
    model = SmallNet()
    shapes = shapes_of_module(model)
    assert shapes.name == "SmallNet"
    assert shapes.numel == sum(p.numel() for p in model.parameters())
    assert shapes.largest_numel == 11 * 5 * 7 * 13
    assert shapes.vector_numel == 5 + 11 + 11 + 11 + 3
    # Columns: 13 of the embedding, 9 of the convolution, 455 and 11 of the linear layers; a tenth of each.
    assert shapes.device_owned_numel(0.1) == 23 * 1 + 5 * 1 + 11 * 46 + 3 * 1 + shapes.vector_numel
    assert shapes.device_owned_numel(0) == 0
    assert shapes.device_owned_numel(1) == shapes.numel
    assert shapes.factor_numel == (23 + 13) + (5 + 9) + (11 + 455) + (3 + 11)


@pytest.mark.parametrize("params", [1, 2, 1000, 12345, 124e6, 7e9, 70e9, 1e12])
def test_a_number_of_parameters_becomes_matrices(params: float) -> None:
    shapes = shapes_of_count(params)
    assert shapes.numel == params
    if params >= 1e6:
        assert shapes.device_owned_numel(0.05) == pytest.approx(0.05 * params, rel=0.02)
    if params == 7e9:
        assert 4000 <= shapes.matrices[0].columns <= 4300


def test_counts_by_a_hugging_face_config(gpt2_config: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(gpt2_config))
    expected = sum(p.numel() for p in model.parameters())
    for path in (gpt2_config, gpt2_config / "config.json"):
        shapes = shapes_of_hugging_face_config(str(path))
        assert (shapes.name, shapes.numel) == ("small-gpt2", expected)
    assert shapes == shapes_of_module(model, "small-gpt2")


def test_invalid_hugging_face_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    for path in (str(tmp_path), str(tmp_path / "missing" / "config.json")):
        with pytest.raises(ConfigValueError, match="hf_config must be a folder with a config.json") as caught:
            shapes_of_hugging_face_config(path)
        assert caught.value.key == "hf_config"
        assert path in str(caught.value)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigValueError, match="pip install"):
        shapes_of_hugging_face_config("gpt2")
