"""Everything that knows DeepSpeed: the ZeRO-2 subclass, its way into the engine, its configuration, its partitions.

Private names of DeepSpeed are used here and in `checkpoint` only, each with a comment that says which and why.
"""

import contextlib
import sys

# DeepSpeed's logger keeps the standard output that it finds on its first import, and warns right away where there is no GPU. Standard
# output is for the results of a user's program.
with contextlib.redirect_stdout(sys.stderr):
    import deepspeed  # noqa: F401
