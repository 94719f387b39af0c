"""`OffloadAdamW`: a training as a plain `torch.optim.Optimizer`, without DeepSpeed and Lightning, on one rank or with the shards of FSDP2.
Nothing enters that a loop over `loss.backward()` and `optimizer.step()` does not need.
"""
