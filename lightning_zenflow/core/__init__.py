"""What all rooms share: the partition of a rank, inputs of a step, domains of values, errors on all ranks, the device's streams and events.

Only pure functions, records, collectives of plain objects and calls of torch enter; nothing here knows the worker, DeepSpeed or Lightning's trainer.
"""
