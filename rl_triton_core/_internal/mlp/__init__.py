"""Whole updates of actors and critics that are multilayer perceptrons, in compiled code on the CPU."""
