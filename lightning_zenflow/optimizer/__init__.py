"""`OffloadAdamW`: a training as a plain `torch.optim.Optimizer`, without DeepSpeed, Lightning and a process group. Nothing enters that a
loop over `loss.backward()` and `optimizer.step()` does not need.
"""
