"""What the adapters of all frameworks have in common."""
