"""Columns that the device updates at once: their importance, selection, ownership and exact state.

Everything enters that is about device-owned entries; all other weights belong to `deferred`.
"""
