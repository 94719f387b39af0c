"""Words that all rooms share: the partition of a rank, inputs of a step, domains of values, errors on all ranks.

Only pure functions, records and collectives of plain objects enter; nothing here knows the worker, DeepSpeed or Lightning's trainer.
"""
