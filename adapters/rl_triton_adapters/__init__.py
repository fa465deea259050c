"""Adapters that put `rl_triton_core` into reinforcement-learning frameworks.

One module per framework. Importing this package imports none of them: ask for the one in use, for example
``from rl_triton_adapters.sb3 import TritonRolloutBuffer``.
"""
