"""BenchMARL trains with the registered estimators as with TorchRL's own, on environments of VMAS."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_program

if not find_spec("benchmarl"):
    pytest.skip("BenchMARL is not installed", allow_module_level=True)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "torchrl.md").read_text()
(BLOCK,) = re.findall(r"^## BenchMARL\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
PROGRAM = """
from benchmarl import algorithms
from benchmarl.environments import VmasTask
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig

config = ExperimentConfig.get_from_yaml()
config.max_n_iters, config.max_n_frames, config.checkpoint_interval = 5, None, 0
config.on_policy_collected_frames_per_batch, config.on_policy_n_envs_per_worker = 200, 4
config.on_policy_n_minibatch_iters, config.on_policy_minibatch_size = 5, 50  # 20 steps of each iteration
config.evaluation, config.loggers, config.create_json, config.save_folder = False, [], False, "."
for name, config.prefer_continuous_actions in (("Ippo", True), ("Mappo", False)):
    models = {x: MlpConfig.get_from_yaml() for x in ("model_config", "critic_model_config")}
    algorithm = getattr(algorithms, f"{name}Config").get_from_yaml()
    task = VmasTask.BALANCE.get_from_yaml()
    experiment = Experiment(task=task, algorithm_config=algorithm, seed=0, config=config, **models)
    loss = experiment.losses["agents"]
    experiment.run()
    print("result", [x.double().sum().item() for x in loss.parameters()])
    print("estimator", type(loss.value_estimator).__module__)
"""


def test_trains_as_with_torchrl(tmp_path):
    """Over 100 steps of each, to the last bit."""
    (tmp_path / "program.py").write_text(BLOCK + PROGRAM)
    stock, wanted, _ = run_program(tmp_path, "program.py")
    text, results, _ = run_program(tmp_path, "program.py", run=[])
    assert stock.count("estimator torchrl.objectives.value.advantages\n") == 2
    assert text.count("estimator rl_triton_adapters.torchrl\n") == len(results) == 2, text
    assert results == wanted and "nan" not in str(results), text
