"""Training loops, end to end: what the advantage step takes of an iteration, and what replacing it gives.

A framework is a file of its name here, and a line in `BENCHMARKS` and `report.LOOPS`.
"""
