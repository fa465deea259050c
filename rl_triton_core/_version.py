"""The version, in its only place."""

__version__ = "1.0.0rc2"
