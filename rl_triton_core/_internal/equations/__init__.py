"""The equations' primitives on every backend, and the compiler that binds them."""
