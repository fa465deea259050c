"""The recurrence: from a validated call to its results, on every backend."""
