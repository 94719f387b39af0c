"""DeepSpeed around a step, whatever the stage of ZeRO: configuration, environment, construction, and what its optimizers have in common.

What depends on how a stage divides parameters is in `zero` and `zero3`. Private names of DeepSpeed are used in these rooms and in
`checkpoint` only, each with a comment that says which and why.
"""

import contextlib
import sys

# DeepSpeed's logger keeps the standard output that it finds on its first import, and warns right away where there is no GPU. Standard
# output is for the results of a user's program.
with contextlib.redirect_stdout(sys.stderr):
    import deepspeed  # noqa: F401
