"""Terms that all rooms share: a rank's partition, inputs of a step, errors on all ranks, streams and events.

Only pure functions, records, collectives of plain objects and calls of torch enter; nothing here knows the worker, DeepSpeed or
Lightning's trainer.
"""
