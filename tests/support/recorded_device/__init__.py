"""A training device on CPU tensors that declares streams and events and checks their order.

Every operation runs at once, so results are right; what is checked is whether the declared order (streams, events, waits, words to the
worker, its answers) would be enough on a device that runs behind the host. `clocks` has the vector clocks, `device` the streams, the
accelerator, memory and kernels, `tensors` which memory is the device's and what the host waits for, `watch` sees the operations of torch
and of the worker.
"""
