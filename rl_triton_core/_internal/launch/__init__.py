"""Launching compiled code: the fast path, tables of launches, threads."""
