"""The compiled loops: `scan` for Triton, `serial` for Numba. Equations are bound into them, never written here."""
