"""`ZenFlowAccelerator` beside Accelerate's own AdamW, what it saves, and the errors that name what it does not do."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, DummyOptim, DummyScheduler
from torch import nn

import accelerate_loops
from accelerate_loops import EXACT, LATE, Loop, Net, new_process, train_plain
from lightning_zenflow.accelerate import ZenFlowAccelerator
from lightning_zenflow.core.errors import MisconfigurationException
from lightning_zenflow.core.schedule import bucket_size
from lightning_zenflow.fabric import ZenFlowStrategy
from rank_processes import free_port


def accelerator_of_stage_3(**options: Any) -> ZenFlowAccelerator:
    return ZenFlowAccelerator(DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.0), **EXACT, **options)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with new_process():
        yield


@pytest.fixture
def late() -> Iterator[Loop]:
    """A loop with deferred updates, after an epoch."""
    loop = Loop(ZenFlowAccelerator(**LATE)).train()
    yield loop
    loop.accelerator.free_memory()


def test_losses_and_weights_are_adamws() -> None:
    theirs, weights = train_plain(epochs=2, accumulate=2, max_norm=0.5)
    loop = Loop(accelerator_of_stage_3(gradient_accumulation_steps=2)).train(epochs=2, max_norm=0.5)
    torch.testing.assert_close(loop.losses, theirs.losses, rtol=0, atol=2e-6)
    torch.testing.assert_close(loop.norms, theirs.norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(loop.weights(), weights, rtol=0, atol=5e-6)
    model = loop.accelerator.unwrap_model(loop.model)
    loop.accelerator.end_training()
    # A script may save the model when training has ended, and ask the accelerator how.
    assert loop.accelerator.distributed_type == DistributedType.DEEPSPEED
    torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=5e-6)


def test_evaluation_and_state_dict_have_exact_weights(late: Loop) -> None:
    x, y = torch.ones(2, 16, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)
    model = late.accelerator.unwrap_model(late.model)
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x), y)
    exact = Net()
    exact.load_state_dict(late.weights())
    torch.testing.assert_close(nn.functional.cross_entropy(exact(x), y), loss)
    assert late.accelerator.strategy.metrics()["zenflow/overlap/update_interval_steps"] == 4
    assert late.accelerator.strategy.summary()
    of_engine = late.accelerator.strategy.config["zero_optimization"]
    assert of_engine["reduce_bucket_size"] == bucket_size(sum(p.numel() for p in model.layers.parameters()))


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """And load what they have saved; on with the same bits goes `ZenFlowTrainer`, which saves by the engine, too (`test_transformers`)."""
    theirs, weights = train_plain(max_norm=0.5)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    subprocess.run([*command, accelerate_loops.__file__, str(tmp_path)], check=True, timeout=240)
    for stage in (2, 3):
        losses, norms, ours = torch.load(tmp_path / f"{stage}.pt")
        torch.testing.assert_close(losses, theirs.losses, rtol=0, atol=2e-6)
        torch.testing.assert_close(norms, theirs.norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(ours, weights, rtol=0, atol=5e-6)


def test_configuration_of_the_seeds_in_a_plugin() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=str(Path(__file__).parents[2] / "conf" / "zf_config.json"))
    accelerator = ZenFlowAccelerator(deepspeed_plugin=plugin, worker_cores=1)
    model = Net()
    optimizer = DummyOptim(model.layers.parameters(), lr=1e-2)
    scheduler = DummyScheduler(
        optimizer, lr_scheduler_callable=lambda of: torch.optim.lr_scheduler.LambdaLR(of, lambda step: 0.5**step)
    )
    engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    config = engine.optimizer.training.config
    assert (config.topk_ratio, config.update_interval) == (0.1, 4)
    assert accelerator.strategy.config["gradient_clipping"] == 1.0
    accelerator.backward(engine(torch.ones(2, 16, dtype=torch.bfloat16)).float().mean())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e-5
    accelerator.free_memory()


def test_accumulation_under_no_sync_and_a_second_training() -> None:
    # Without the size of a micro-batch.
    config = {"train_batch_size": "auto", "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    accelerator = ZenFlowAccelerator(DeepSpeedPlugin(hf_ds_config=config), **LATE)
    (x, y), plain = (torch.ones(2, 16, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)), Net()
    optimizer = torch.optim.AdamW(plain.layers.parameters(), lr=1e-2)
    for _ in range(2):
        (2 * nn.functional.cross_entropy(plain(x), y)).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    for _ in range(2):
        loop = Loop(accelerator)
        with accelerator.no_sync(loop.model):
            accelerator.backward(2 * loop.loss(x, y), scale_wrt_gas=False)
        accelerator.backward(4 * loop.loss(x, y))
        trained = [p for p in loop.model.parameters() if p.requires_grad]
        torch.testing.assert_close(nn.utils.get_total_norm([p.grad for p in trained]), norm, rtol=1e-5, atol=0)
        torch.testing.assert_close(accelerator.clip_grad_norm_(trained, 0.5), norm, rtol=1e-5, atol=0)
        loop.optimizer.step()
        torch.testing.assert_close(loop.weights()["layers.4.weight"], plain.layers[4].weight.data, rtol=0, atol=1e-6)
        accelerator.free_memory()


def backward(loop: Loop) -> None:
    loop.accelerator.backward(loop.loss(*next(iter(loop.loader))))


def clip(loop: Loop, *, end: int | None = None, sync: bool = True) -> None:
    """A part of the parameters, or in a micro-batch that is not the last one of a step."""
    loop.accelerator.gradient_state._set_sync_gradients(sync)
    loop.accelerator.clip_grad_norm_(list(loop.model.parameters())[:end], 1.0)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda loop: [backward(loop), backward(loop)], "must not be read between .*under `accelerator.accumulate"),
        (clip, "clip_grad_norm_ must come after `accelerator.backward"),
        (lambda loop: clip(loop, sync=False), "call it `if accelerator.sync_gradients`"),
        (lambda loop: [backward(loop), clip(loop, end=-1)], "got all but 1, of which the first is layers.4.bias"),
        (lambda loop: Loop(loop.accelerator), "call `accelerator.free_memory"),
    ],
)
def test_mistakes_in_the_loop(act: Callable[[Loop], object], message: str, late: Loop) -> None:
    with pytest.raises((RuntimeError, MisconfigurationException), match=message):
        act(late)
    late.optimizer.zero_grad()


def test_nothing_late_on_the_device_names_the_optimizer_for_it() -> None:
    for keys in (EXACT, {"overlap_step": False, "worker_cores": 1}):
        accelerator = ZenFlowAccelerator(**keys)
        with pytest.warns(UserWarning, match="ZenFlowAccelerator: no weight is late.*OffloadAdamW"):
            Loop(accelerator)
        accelerator.free_memory()


def test_mistakes_before_the_loop() -> None:
    zero = {"stage": 2, "zenflow": {"async_checkpoints": True}}
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero, "gradient_accumulation_steps": 1})
    for given in ({"async_checkpoints": True}, {"deepspeed_plugin": plugin}, {"deepspeed_plugins": plugin}):
        with (
            new_process(),
            pytest.raises(MisconfigurationException, match="async_checkpoints must be absent, got True"),
        ):
            ZenFlowAccelerator(**given)
    has_gpu = mock.patch("torch.cuda.is_available", lambda: True)
    with new_process(), has_gpu, pytest.raises(MisconfigurationException, match="cpu must be False where there is a"):
        ZenFlowAccelerator(cpu=True)
    with pytest.raises(ValueError, match="topk_ratio"):
        ZenFlowAccelerator(topk_ratio=2)
    accelerator, model = ZenFlowAccelerator(), Net()
    # A scheduler counts the groups.
    two_groups = torch.optim.AdamW([{"params": model.layers.parameters()}, {"params": []}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(two_groups, lambda step: 1.0)
    prepared: list[tuple[list[Any], str]] = [
        ([torch.optim.AdamW(model.parameters())], "one model together with its one optimizer, got 0 models"),
        ([model], "one optimizer, got 1 models and 0 .* `accelerator.device`"),
        ([model, torch.optim.SGD(model.parameters())], "exactly one of torch.optim.AdamW.*got torch.optim.sgd.SGD"),
        ([model, two_groups, scheduler], "group 1: params must be a list with a trainable parameter"),
    ]
    for given, message in prepared:
        with pytest.raises(MisconfigurationException, match=message):
            accelerator.prepare(*given)
    with pytest.raises(RuntimeError, match="clip_grad_norm_ must come after `accelerator.prepare`"):
        accelerator.clip_grad_norm_([], 1.0)
    with pytest.raises(RuntimeError, match="backward: no model has been set up; call .*accelerator.prepare"):
        accelerator.backward(torch.ones((), dtype=torch.float32))
    assert accelerator.gather(torch.ones(1, dtype=torch.float32)).item() == 1.0


def test_the_process_and_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ZenFlowAccelerator(**EXACT)
    assert ZenFlowAccelerator().deepspeed_plugin is first.deepspeed_plugin
    with new_process(), pytest.raises(MisconfigurationException, match="no other Accelerator must have been made"):
        Accelerator(cpu=True)
        ZenFlowAccelerator()
    two_ranks = mock.patch.dict("os.environ", WORLD_SIZE="2")
    with new_process(), two_ranks, pytest.raises(MisconfigurationException, match="must know of 2 ranks, got 1"):
        ZenFlowAccelerator()
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.5}}}))
    by_launch = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    with new_process(), mock.patch.dict("os.environ", by_launch):
        assert ZenFlowAccelerator().strategy.zenflow_config.topk_ratio == 0.5
        assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    with new_process():
        by_deepspeeds = ZenFlowAccelerator()
        by_deepspeeds.strategy = None
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("LOCAL_SIZE", "2")
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
        monkeypatch.setattr(ZenFlowStrategy, "setup_environment", lambda _: None)
        assert (by_deepspeeds.start().num_processes, by_deepspeeds.start().num_nodes) == (2, 2)


def test_model_that_is_not_trained_beside_the_trained_one() -> None:
    accelerator = accelerator_of_stage_3()
    accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
    divided, x = accelerator.prepare(Net()), torch.ones(2, 16, dtype=torch.float32)
    loop = Loop(accelerator).train(max_norm=0.5)
    with torch.no_grad():
        torch.testing.assert_close(divided(x), Net()(x))
    torch.testing.assert_close(loop.weights(), train_plain(max_norm=0.5)[1], rtol=0, atol=5e-6)
    accelerator.free_memory()
