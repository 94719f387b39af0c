"""The worker process as the trainer sees it: shared memory, start, restart; cores and memory of its host.

Code enters that talks to the process or to the machine it runs on; which jobs the process gets is decided in `offload`.
"""
