"""Memory, traffic and CPU time of a training on a machine that is not at hand.

Pure functions of sizes and speeds enter; nothing is measured or allocated.
"""
