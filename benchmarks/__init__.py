"""Measurements: what is computed, by whom, how it is timed, and the pages and plots made from the results."""
