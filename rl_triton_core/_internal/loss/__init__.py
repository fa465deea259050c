"""The losses: equations, arguments and every backend."""
