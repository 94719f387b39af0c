"""Passes over gradients and device-owned entries, with one interface and three implementations: torch, compiled loops for the CPU, Triton.

Code enters that runs once per gradient and must be fast; it decides nothing and keeps no state.
"""
