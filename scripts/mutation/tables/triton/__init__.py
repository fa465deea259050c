"""Mutants of the parallel scan."""
