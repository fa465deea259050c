"""Random cases against the oracles, on every backend: what the tests and ``rl-triton selftest`` share."""
