"""The algorithm on the training thread: blocks, their windows and jobs, device-owned columns, and the phases of a step.

`step` has the phases, `jobs` the asynchronous protocol with the worker, `fill` a gradient's way. Nothing here knows DeepSpeed, or where the
weights come from. `tests/support/zenflow_reference.py` has the algorithm without anything asynchronous, to be read first.
"""
