"""Reads from machine code how a warp's instructions wait: the package of sass_latency.py and of the compiler lane.

Read the files in this order: listing.py (the text), width.py and arithmetic.py (instructions), warp.py (the trace),
dependence.py and rounds.py (the figures), kernel.py and record.py (all kernels). Only abi.py, launch.py and kernel.py
know instep's kernels.
"""
