"""Stable-Baselines3, sb3-contrib and TorchRL are switched on where a program imports them, without a line of it."""

import pytest
from processes import run_program

pytest.importorskip("sb3_contrib")
pytest.importorskip("torchrl")

PROGRAM = """
import importlib, pickle, site, subprocess, sys
from threading import Thread

if __name__ == "__main__":
    if sys.argv[1] == "line":
        importlib.import_module("rl_triton_adapters.sb3").enable()
    threads = [Thread(target=importlib.import_module, args=[f"stable_baselines3.{x}"]) for x in ("ppo", "common")]
    [x.start() for x in threads], [x.join() for x in threads]
    from stable_baselines3.ppo import PPO
    from stable_baselines3.ppo.ppo import PPO as Stock
    print("others", {"sb3_contrib", "torchrl", "rl_zoo3", "ray"} & {*sys.modules}, sys.argv[1:], site.of_user)
    import sb3_contrib, stable_baselines3, torchrl.objectives
    importlib.reload(stable_baselines3)
    from stable_baselines3.common.env_util import SubprocVecEnv, make_vec_env
    env = make_vec_env("CartPole-v1", seed=0, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "spawn"})
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu").learn(64)
    model.save("model")
    print("result", PPO.__module__, [x.double().sum().item() for x in model.policy.parameters()], sys.stdin.read())
    assert type(PPO.load("model")) is PPO is pickle.loads(pickle.dumps(PPO)) is stable_baselines3.PPO
    assert isinstance(model, Stock) and Stock is pickle.loads(pickle.dumps(Stock)) and "rl_triton" not in str(Stock)
    print(sb3_contrib.QRDQN, torchrl.objectives.value.GAE, type(model).__mro__[0])
    subprocess.run([sys.executable, "-c", "from stable_baselines3 import PPO; print('started', PPO.__module__)"])
    sys.exit(7)
"""


def test_a_program_trains_as_with_a_line(tmp_path):
    """To the last bit, whatever it imports first, and in the processes that it starts; each line is said once."""
    (tmp_path / "program.py").write_text(PROGRAM)
    text, results, status = run_program(tmp_path, "-m", "program", "--", "-x", run=["--off", "rllib"])
    _, wanted, _ = run_program(tmp_path, "program.py", "line", RL_TRITON_REPORT="1")
    assert results.pop().startswith("rl-triton: 1 iterations, without the first: acting 0.")
    assert status == 7 and "others set() ['--', '-x'] True\n" in text and results == wanted, text
    ours = "rl_triton_adapters.sb3.captured"
    assert results[0].startswith(f"result {ours} [") and results[0].endswith(" in") and f"started {ours}\n" in text
    assert results[1:] == [f"rl-triton: 2 updates of {ours}.TritonPPO: updates are compiled"]
    assert [text.count(f"rl-triton: {x} is switched on\n") for x in ("sb3", "sb3-contrib", "torchrl")] == [1, 1, 1]
    assert "TritonQRDQN" in text and "TritonGAE" in text


IMPORT = "import sb3_contrib; from stable_baselines3 import PPO; print(PPO.__module__, sb3_contrib.TQC.__module__)"
CASES = [({"RL_TRITON_OFF": "sb3,verl"}, "sb3-contrib is switched on"), ({"RL_TRITON": "0"}, "")]
CASES += [({"RL_TRITON": "no"}, "sb3 stays as it is: ValueError: RL_TRITON: got 'no'")]


@pytest.mark.parametrize(("environment", "line"), CASES)
def test_what_is_left_as_it_is(environment, line, tmp_path):
    """What is asked for, and what cannot be: no error ends a program."""
    text, _, status = run_program(tmp_path, "-c", IMPORT, RL_TRITON_AUTO="1", **environment)
    contrib = "rl_triton_adapters.sb3.contrib_off_policy" if "switched on" in line else "sb3_contrib.tqc.tqc"
    assert status == 0 and f"stable_baselines3.ppo.ppo {contrib}\n" in text, text
    assert bool(line) == ("rl-triton: " in text) and line in text


def test_what_runs_nothing_says_so(tmp_path):
    text, _, status = run_program(tmp_path, "-c", IMPORT, run=[], RL_TRITON="0")
    assert text.count("rl-triton: ") == 1 and status == 0 and "stable_baselines3.ppo.ppo sb3_contrib.tqc.tqc\n" in text
    assert "rl-triton: nothing is switched on: RL_TRITON=0 in the environment\n" in text
