"""Saving and loading by all ranks together: folders that are complete or absent, other rank counts.

Code enters that reads or writes checkpoint files; what a component keeps is in its own `state_dict`.
"""

import lightning_zenflow.deepspeed  # noqa: F401  # DeepSpeed's first import
