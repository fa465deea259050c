"""Networks this small lose time to several threads."""

from process_state import one_thread  # noqa: F401
