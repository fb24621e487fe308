"""Reads from machine code how a warp's instructions wait: the package of scripts/sass_latency.py.

Order of reading: listing.py (the text), warp.py (the trace), dependence.py and rounds.py (the figures). Nothing here needs
more than Python's own library, and no module depends on a particular kernel except abi.py and launch.py.
"""
