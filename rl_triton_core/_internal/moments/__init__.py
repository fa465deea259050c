"""Normalisation by moments, on every backend."""
