"""The worker process as the trainer sees it: shared memory, start, restart, cores, memory checks.

Code enters that talks to the process or to the machine it runs on; which jobs the process gets is decided in `offload`.
"""
