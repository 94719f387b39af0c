"""ZeRO stage 1 and 2: DeepSpeed's optimizer around a step, its way into the engine, and its flat buffers, whose order is ours."""

import lightning_zenflow.engine  # noqa: F401  # DeepSpeed's first import
