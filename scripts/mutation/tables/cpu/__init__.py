"""Mutants of the serial walk."""
