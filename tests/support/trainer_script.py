"""A user's script: trains over two ranks that Lightning or torchrun starts, and writes the weights. Arguments: output file."""

import sys

import torch

from harness import make_trainer
from lightning_zenflow import ZenFlowStrategy
from side_by_side import NOTHING_LATE, Net

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = Net(length=5)
    trainer = make_trainer(
        ZenFlowStrategy(**NOTHING_LATE), devices=2, max_epochs=2, accumulate_grad_batches=3, gradient_clip_val=0.1
    )
    trainer.fit(model)
    assert trainer.world_size == 2
    if trainer.is_global_zero:
        torch.save((trainer.global_step, [p.detach() for p in model.parameters()]), sys.argv[1])
