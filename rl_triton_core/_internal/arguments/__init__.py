"""Checks of what a user gives."""
