"""What the public modules are made of. Nothing here is for import by users; `rl_triton_core.extending` is."""
