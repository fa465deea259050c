"""Mutants: what breaks the code on purpose, and how it finds the code."""
