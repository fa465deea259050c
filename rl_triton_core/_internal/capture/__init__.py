"""What captured steps are made of."""
