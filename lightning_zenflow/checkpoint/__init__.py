"""Saving and loading by all ranks together. Code enters that reads or writes files; what a component keeps is in its own `state_dict`."""

import lightning_zenflow.deepspeed  # noqa: F401  # DeepSpeed's first import
