"""Python's mirror of ``csrc/``: structures of the shared memory and the socket, and paths of what was compiled.

Nothing enters that is not defined by a C++ header.
"""
