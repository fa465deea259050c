"""Measurements: what is computed, by whom, how it is timed, and the pages and figures made from the results.

* `equations`, `workloads`, `suites`: what is computed; `providers`: by whom, ours among them.
* `harness`: how calls are timed; `files`: result files and the arguments of every script.
* `run`: all suites of calls. Every other script that measures has a subject of its own, and says how it is called.
* `end_to_end`: training loops of frameworks; `learning`: whether they learn the same.
* `pages`, `tables`, `plots`: parts of pages and figures; `measured`, `targets`, `compare`: what follows from `run`.
"""
