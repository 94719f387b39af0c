"""Set-up of all tests."""

import torch

# The models are tiny and the worker's cores are the trainer's: threads that wait for each other actively only slow one another down.
torch.set_num_threads(1)
