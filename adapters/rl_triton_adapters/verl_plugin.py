"""The plugin of verl, which imports it in each process: installs `rl_triton_adapters.verl` where RL_TRITON is set.

It is no part of that package, which would be imported with it.
"""

import importlib
import logging
import os

if os.environ.get("RL_TRITON"):
    try:
        importlib.import_module("rl_triton_adapters.verl")
    except Exception as error:  # verl would say so at the level DEBUG alone
        logging.getLogger(__name__).warning("RL_TRITON is set, but verl computes with its own functions: %s", error)
        raise
