"""Clocks and counters, written by every room and read in `monitor`.

Only what is cheap enough for every step enters, and nothing that logs.
"""
