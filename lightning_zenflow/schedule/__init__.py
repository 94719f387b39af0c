"""S and d: staggered windows, their automatic choice, and the compensation of the staleness that remains.

Pure functions of step numbers and measured times; nothing here touches a gradient.
"""
