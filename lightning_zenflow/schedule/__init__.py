"""S and d: staggered windows, their automatic choice, and the compensation of the staleness that remains.

Mostly pure functions of step numbers and measured times; nothing here touches a gradient.
"""
