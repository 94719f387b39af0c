"""A user's script with Hydra, without anything of the tests: strategies by `instantiate`, with the keys in each form of a configuration."""

from hydra.utils import instantiate
from omegaconf import OmegaConf

from first_training import main

CONFIG = """
lag: 0
strategy:
  _target_: lightning_zenflow.ZenFlowStrategy
  update_interval: 1
  publish_lag: ${lag}
  worker_cores: [0]
by_config:
  _target_: lightning_zenflow.ZenFlowStrategy
  config:
    gradient_clipping: 1.0
    zero_optimization:
      zenflow: {update_interval: 2, worker_cores: 1}
trainer:
  _target_: lightning.pytorch.Trainer
  accelerator: cpu
  devices: 1
  logger: false
  strategy: ${strategy}
"""

if __name__ == "__main__":
    config = OmegaConf.create(CONFIG)
    trainer = instantiate(config.trainer)
    assert trainer.strategy.zenflow_config.publish_lag == 0 and trainer.strategy.zenflow_config.worker_cores == (0,)
    strategy = instantiate(config.by_config)
    assert strategy.zenflow_config.update_interval == 2 and strategy.config["gradient_clipping"] == 1.0
    main(1, instantiate(config.strategy))
