"""Mutants of equations, boundary rule, validation and the fast path, on the backend that compiles nothing."""
