"""Existing methods under comparison, as Lightning strategies and optimizers."""
