"""prepare_deepspeed_config: the keys it sets and refuses; DeepSpeed and torch accept the result."""

import copy
import logging
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zenflow.zero.config import prepare_deepspeed_config

OFFLOAD = {"device": "cpu", "pin_memory": False}


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def refusal_of(config: dict[str, Any], **trainer: Any) -> str:
    with pytest.raises(MisconfigurationException) as error:
        prepare_deepspeed_config(config, **trainer)
    return str(error.value)


class TestResult:
    @pytest.mark.parametrize("config", [None, {}, {"zero_optimization": {}}, {"zero_optimization": None}])
    def test_from_nothing(self, config: dict[str, Any] | None) -> None:
        assert prepare_deepspeed_config(config) == {
            "zero_optimization": {"stage": 2, "contiguous_gradients": True, "offload_optimizer": OFFLOAD},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "timers": {"throughput": {"synchronized": False}},
        }

    @pytest.mark.parametrize("throughput", [{"enabled": False}, {"synchronized": True}])
    def test_its_throughput_log_waits_for_the_device_only_if_asked_to(self, throughput: dict[str, bool]) -> None:
        result = prepare_deepspeed_config({"timers": {"throughput": throughput}})
        assert result["timers"] == {"throughput": {"synchronized": False, **throughput}}

    def test_neither_changes_nor_shares_its_argument(self) -> None:
        config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}}
        before = copy.deepcopy(config)
        result = prepare_deepspeed_config(config)
        assert config == before
        result["optimizer"]["params"]["betas"].append(0)
        assert config == before

    def test_preparing_again_changes_nothing(self) -> None:
        config = {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "bf16"},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "bias_correction": True}},
        }
        once = prepare_deepspeed_config(config)
        assert prepare_deepspeed_config(once) == once

    def test_what_it_does_not_know_stays(self) -> None:
        config = {
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": False},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "wall_clock_breakdown": False,
            "zero_allow_untested_optimizer": False,
            "pipeline": {"stages": "auto"},
            "data_types": {"keep_in_fp32_modules": "auto", "grad_accum_dtype": None},
        }
        result = prepare_deepspeed_config(config)
        for key in ("scheduler", "wall_clock_breakdown", "zero_allow_untested_optimizer", "pipeline", "data_types"):
            assert result[key] == config[key]
        assert result["zero_optimization"].items() >= {"reduce_bucket_size": 5e8, "overlap_comm": False}.items()

    @pytest.mark.parametrize("device", [None, "cpu", "none"])
    def test_offload_optimizer(self, device: str | None, caplog: pytest.LogCaptureFixture) -> None:
        offload = None if device is None else {"device": device, "pin_memory": True, "buffer_count": 4}
        with caplog.at_level(logging.INFO):
            result = prepare_deepspeed_config({"zero_optimization": {"offload_optimizer": offload}})
        assert result["zero_optimization"]["offload_optimizer"] == OFFLOAD
        assert ("offload_optimizer.device='none' is not used" in caplog.text) == (device == "none")

    @pytest.mark.parametrize(
        "old", [{"cpu_offload": True}, {"cpu_offload_use_pin_memory": True}, {"cpu_offload_param": False}]
    )
    def test_old_offload_keys_go(self, old: dict[str, bool]) -> None:
        zero = prepare_deepspeed_config({"zero_optimization": old})["zero_optimization"]
        assert zero == {"stage": 2, "contiguous_gradients": True, "offload_optimizer": OFFLOAD}

    @pytest.mark.parametrize("offload", [None, {}, {"device": "none"}])
    def test_offload_param_that_is_off_goes(self, offload: dict[str, str] | None) -> None:
        assert (
            "offload_param"
            not in prepare_deepspeed_config(nested("zero_optimization.offload_param", offload))["zero_optimization"]
        )

    def test_sparse_gradients_false_goes(self) -> None:
        assert "sparse_gradients" not in prepare_deepspeed_config({"sparse_gradients": False})

    def test_lightnings_default(self) -> None:
        config = DeepSpeedStrategy(reduce_bucket_size=1000).config
        zero = prepare_deepspeed_config(config)["zero_optimization"]
        assert zero["reduce_bucket_size"] == 1000
        assert zero["offload_optimizer"] == OFFLOAD

    def test_deepspeed_reads_it(self) -> None:
        config = {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "cpu_offload": True, "offload_param": {"device": "none"}},
            "sparse_gradients": False,
            "train_batch_size": 7,
            "train_micro_batch_size_per_gpu": 2,
        }
        read = DeepSpeedConfig(prepare_deepspeed_config(config))
        assert read.zero_config.stage == 2
        assert read.zero_config.offload_optimizer.device == "cpu"
        assert read.zero_config.zenflow is None
        assert read.train_batch_size == 2
        assert not read.zero_force_ds_cpu_optimizer


class TestLightningsKeys:
    def test_auto_goes(self) -> None:
        keys = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        )
        assert prepare_deepspeed_config(dict.fromkeys(keys, "auto")) == prepare_deepspeed_config(None)

    def test_train_batch_size_is_the_data_loaders(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            assert "train_batch_size" not in prepare_deepspeed_config({"train_batch_size": 8})
        assert "train_batch_size=8 is not used" in caplog.text

    @pytest.mark.parametrize(
        ("steps", "trainer", "remains"), [(1, None, False), (1, 4, False), (4, 4, False), (4, None, True)]
    )
    def test_accumulation(self, steps: int, trainer: int | None, remains: bool) -> None:
        result = prepare_deepspeed_config({"gradient_accumulation_steps": steps}, accumulate_grad_batches=trainer)
        assert ("gradient_accumulation_steps" in result) == remains

    @pytest.mark.parametrize(("steps", "trainer"), [(4, 1), (0, None), (-1, 2), (2.0, 2), ("2", 2), (True, 1)])
    def test_accumulation_refused(self, steps: Any, trainer: int | None) -> None:
        message = refusal_of({"gradient_accumulation_steps": steps}, accumulate_grad_batches=trainer)
        assert message.startswith("DeepSpeed config: gradient_accumulation_steps must be an integer >= 1")
        assert "accumulate_grad_batches" in message

    @pytest.mark.parametrize("trainer", [0, -1, 1.5])
    def test_the_trainers_accumulation_refused(self, trainer: Any) -> None:
        message = refusal_of({}, accumulate_grad_batches=trainer)
        assert message.startswith(f"Trainer: accumulate_grad_batches must be an integer >= 1, got {trainer!r}")

    @pytest.mark.parametrize("norm", [-0.5, float("nan")])
    def test_the_trainers_clipping_refused(self, norm: float) -> None:
        message = refusal_of({}, gradient_clip_val=norm)
        assert message.startswith(f"Trainer: gradient_clip_val must be a number >= 0, got {norm!r}")

    @pytest.mark.parametrize(("norm", "trainer"), [(0, None), (1.0, None), (1.0, 1), (0.5, 0.5)])
    def test_clipping(self, norm: float, trainer: float | None) -> None:
        assert (
            prepare_deepspeed_config({"gradient_clipping": norm}, gradient_clip_val=trainer)["gradient_clipping"]
            == norm
        )

    @pytest.mark.parametrize(
        ("key", "value", "allowed"), [("prescale_gradients", True, "False"), ("gradient_predivide_factor", 2.0, "1.0")]
    )
    def test_what_reduce_scatter_excludes(self, key: str, value: Any, allowed: str) -> None:
        message = refusal_of({key: value})
        assert f"{key} must be {allowed}, unless zero_optimization.reduce_scatter is false, got {value!r}" in message
        assert prepare_deepspeed_config({key: value, "zero_optimization": {"reduce_scatter": False}})[key] == value

    @pytest.mark.parametrize("size", [-2, 0, 1, 3, 4.5])
    def test_bucket_sizes_that_deepspeed_only_asserts(self, size: float) -> None:
        message = refusal_of({"zero_optimization": {"allgather_bucket_size": size}})
        assert f"zero_optimization.allgather_bucket_size must be an even integer >= 2, got {size!r}" in message

    @pytest.mark.parametrize("norm", [-1, float("nan"), float("inf"), "1.0", True, [1]])
    def test_clipping_refused(self, norm: Any) -> None:
        message = refusal_of({"gradient_clipping": norm})
        assert message == f"DeepSpeed config: gradient_clipping must be a finite number >= 0 (0: off), got {norm!r}"

    def test_clipping_against_the_trainers(self) -> None:
        message = refusal_of({"gradient_clipping": 1.0}, gradient_clip_val=0.5)
        assert message.startswith("DeepSpeed config: gradient_clipping must be the Trainer's gradient_clip_val (0.5)")


class TestRefused:
    @pytest.mark.parametrize(
        ("key", "value", "allowed"),
        [
            ("zero_optimization.stage", 0, "2"),
            ("zero_optimization.stage", 1, "2"),
            ("zero_optimization.stage", 3, "2"),
            ("zero_optimization.stage", "2", "2"),
            ("zero_optimization.stage", True, "2"),
            ("zero_optimization.stage", "auto", "2"),
            ("zero_optimization.contiguous_gradients", False, "True"),
            ("zero_optimization.contiguous_gradients", 1, "True"),
            ("zero_optimization.round_robin_gradients", True, "False"),
            ("zero_optimization.compute_grad_norm", False, "True"),
            ("zero_optimization.elastic_checkpoint", True, "False"),
            ("zero_optimization.cpu_offload_param", True, "False"),
            ("zero_optimization.offload_optimizer.device", "nvme", "'cpu'"),
            ("zero_optimization.offload_param.device", "cpu", "'none'"),
            ("zero_optimization.offload_param.device", "nvme", "'none'"),
            ("zero_optimization.offload_optimizer", True, "a mapping"),
            ("zero_optimization.offload_param", "cpu", "a mapping"),
            ("zero_optimization", True, "a mapping"),
            ("zero_optimization", 2, "a mapping"),
            ("fp16", True, "a mapping"),
            ("sparse_gradients", True, "False"),
            ("managed_gradient_accumulation", False, "True"),
            ("torch_autocast.enabled", True, "False"),
            ("fp16.fp16_master_weights_and_grads", True, "False"),
            ("bf16.bf16_master_weights_and_grads", True, "False"),
            ("bf16.bf16_optimizer_states", True, "False"),
            ("bfloat16.bf16_master_weights_and_grads", True, "False"),
            ("bfloat16.bf16_optimizer_states", True, "False"),
            ("data_types.grad_accum_dtype", "bf16", "null"),
            ("data_types.grad_accum_dtype", "fp32", "null"),
        ],
    )
    def test_key_value_and_allowed_are_named(self, key: str, value: Any, allowed: str) -> None:
        assert refusal_of(nested(key, value)).startswith(f"DeepSpeed config: {key} must be {allowed}")

    @pytest.mark.parametrize(
        "key",
        [
            "optimizer.params.lr",
            "optimizer.params.weight_decay",
            "scheduler.params.total_num_steps",
            "zero_optimization.reduce_bucket_size",
            "bf16.enabled",
            "fp16.loss_scale",
        ],
    )
    def test_auto_without_a_value_from_lightning(self, key: str) -> None:
        message = refusal_of({"optimizer": {"type": "AdamW"}, **nested(key, "auto")})
        assert message.startswith(f"DeepSpeed config: {key} must be a value (Lightning replaces 'auto' only in ")

    @pytest.mark.parametrize(
        ("mode", "accepted", "refused"),
        [
            ("fp16", ["fp16", "half", None], ["fp32", "bf16"]),
            ("bf16", ["bf16", "bfloat16", None], ["fp32", "fp16", 16]),
        ],
    )
    def test_gradient_dtype_is_the_models(self, mode: str, accepted: list[Any], refused: list[Any]) -> None:
        for dtype in accepted:
            prepare_deepspeed_config({mode: {"enabled": True}, "data_types": {"grad_accum_dtype": dtype}})
        for dtype in refused:
            message = refusal_of({mode: {"enabled": True}, "data_types": {"grad_accum_dtype": dtype}})
            assert message.startswith(f"DeepSpeed config: data_types.grad_accum_dtype must be null or {mode!r}")

    def test_zenflow_block_has_been_taken_out_before(self) -> None:
        with pytest.raises(AssertionError):
            prepare_deepspeed_config({"zero_optimization": {"zenflow": {}}})


class TestOptimizer:
    def prepare(self, kind: str, **params: Any) -> dict[str, Any]:
        optimizer: dict[str, Any] = prepare_deepspeed_config({"optimizer": {"type": kind, "params": params}})[
            "optimizer"
        ]
        assert optimizer["type"] == kind
        prepared: dict[str, Any] = optimizer["params"]
        return prepared

    def test_deepspeeds_optimizer_becomes_torchs_with_deepspeeds_defaults(self) -> None:
        assert self.prepare("AdamW", lr=1e-3) == {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}
        assert self.prepare("adam", weight_decay=0.1, adam_w_mode=False) == {
            "weight_decay": 0.1,
            "adam_w_mode": False,
            "torch_adam": True,
        }

    def test_torchs_optimizer_keeps_torchs_defaults(self) -> None:
        assert self.prepare("AdamW", torch_adam=True) == {"torch_adam": True}

    def test_no_params(self) -> None:
        assert prepare_deepspeed_config({"optimizer": {"type": "AdamW"}})["optimizer"]["params"]["torch_adam"] is True
        assert "optimizer" not in prepare_deepspeed_config({"optimizer": None})

    def test_arguments_that_torch_does_not_have_go(self) -> None:
        params = self.prepare("AdamW", bias_correction=True, fp32_optimizer_states=True, amsgrad=False)
        assert params == {"amsgrad": False, "weight_decay": 0.0, "torch_adam": True}

    @pytest.mark.parametrize(
        ("kind", "params", "decoupled"),
        [
            ("AdamW", {}, True),
            ("Adam", {}, True),
            ("Adam", {"adam_w_mode": False}, False),
            ("AdamW", {"adam_w_mode": False}, True),
        ],
    )
    def test_torch_takes_the_params(self, kind: str, params: dict[str, Any], decoupled: bool) -> None:
        """As ``DeepSpeedEngine._configure_basic_optimizer`` reads them."""
        prepared = self.prepare(kind, lr=2e-5, betas=[0.9, 0.99], eps=1e-8, bias_correction=True, **params)
        adam_w_mode = prepared.pop("adam_w_mode", True)
        assert prepared.pop("torch_adam") is True
        constructor = torch.optim.AdamW if kind.lower() == "adamw" or adam_w_mode else torch.optim.Adam
        assert (constructor is torch.optim.AdamW) == decoupled
        optimizer = constructor([torch.nn.Parameter(torch.zeros(2))], **prepared)
        assert optimizer.param_groups[0]["weight_decay"] == 0.0

    @pytest.mark.parametrize("kind", ["Lamb", "OneBitAdam", "Lion", "Muon", "SGD", "", None, 3])
    def test_other_types_are_refused(self, kind: Any) -> None:
        message = refusal_of({"optimizer": {"type": kind}})
        assert message == f"DeepSpeed config: optimizer.type must be 'AdamW' or 'Adam', got {kind!r}"

    def test_missing_type(self) -> None:
        assert "optimizer.type must be 'AdamW' or 'Adam', got None" in refusal_of({"optimizer": {"params": {}}})

    @pytest.mark.parametrize(
        ("key", "value", "allowed"),
        [
            ("amsgrad", True, "False"),
            ("maximize", True, "False"),
            ("differentiable", True, "False"),
            ("bias_correction", False, "True"),
            ("fp32_optimizer_states", False, "True"),
            ("adam_w_mode", 1, "true or false"),
            ("torch_adam", "yes", "true or false"),
            ("max_grad_norm", 1.0, "absent (set `gradient_clipping`"),
        ],
    )
    def test_params_refused(self, key: str, value: Any, allowed: str) -> None:
        message = refusal_of({"optimizer": {"type": "AdamW", "params": {key: value}}})
        assert message.startswith(f"DeepSpeed config: optimizer.params.{key} must be {allowed}")

    def test_unknown_param(self) -> None:
        message = refusal_of({"optimizer": {"type": "AdamW", "params": {"weight_deacy": 0.1}}})
        start = "DeepSpeed config, optimizer.params: unknown key 'weight_deacy' (did you mean 'weight_decay'?); keys are lr, betas, "
        assert message.startswith(start)
