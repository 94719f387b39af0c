"""Observation of a run: `StallMonitor`, metrics, summary, TensorBoard.

Code enters that reads `telemetry` and logs, draws or advises; it never changes how a step runs.
"""
