"""Whole updates of actors and critics that are MLPs, in compiled code on the CPU."""
