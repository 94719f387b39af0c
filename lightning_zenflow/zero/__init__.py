"""Everything that knows DeepSpeed: the ZeRO-2 subclass, its way into the engine, its configuration, its partitions.

Private names of DeepSpeed are used here and in `checkpoint` only, each with a comment that says which and why.
"""
