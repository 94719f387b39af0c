"""All other weights: gradient slots, windows, update jobs in flight, published weights, and provisional updates until then.

The asynchronous protocol with the worker is written down once, in `jobs`; code enters that is one of its phases.
"""
