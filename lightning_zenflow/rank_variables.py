"""The variables by which the processes of one training find each other, and which Lightning's launcher and DeepSpeed leave behind."""

import os

_NAMES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")


class RankVariables:
    """What the environment says about ranks when this is made."""

    def __init__(self) -> None:
        self._values = {name: os.environ.get(name) for name in _NAMES}

    def restore(self) -> None:
        """Makes the environment say that again: whoever inherits it afterwards would take itself for a rank of the former training."""
        for name, value in self._values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
