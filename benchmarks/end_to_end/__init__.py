"""Training loops, end to end: what the advantage step takes of an iteration, and what replacing it gives.

`python -m benchmarks.end_to_end FOLDER` measures. A framework is a file of its name here and a line in `REGISTRY`.
"""
