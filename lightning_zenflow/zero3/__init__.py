"""ZeRO stage 3: DeepSpeed's optimizer around a step, and its way into the engine. Weights are partitioned as well, and are gathered where
they are used.
"""

import lightning_zenflow.engine  # noqa: F401  # DeepSpeed's first import
