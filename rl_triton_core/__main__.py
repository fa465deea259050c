"""Print what a bug report needs: ``python -m rl_triton_core``."""

from rl_triton_core.system_info import system_info

if __name__ == "__main__":
    info = system_info()
    width = max(map(len, info))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in info.items()))
