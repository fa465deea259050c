"""Networks this small lose time to several threads; the examples' environments serve the tests too."""

import sys

import gymnasium
from process_state import one_thread  # noqa: F401

sys.modules.setdefault("gym", gymnasium)  # RL-Games 1.6.1 imports the older name
