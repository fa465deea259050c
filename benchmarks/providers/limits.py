"""How long rows may be for the arms that a long row is too much for; a page asks without importing their compilers."""

FLAT_LONGEST = 131072
"""The whole row is one block of one program."""
SERIAL_LONGEST = 262144
"""Longer ones take a thread a second."""
