"""Ours in the place of Stable-Baselines3's algorithms, for a library that makes them itself."""

import importlib
import sys

import pytest

pytest.importorskip("sb3_contrib")

import sb3_contrib
import stable_baselines3
from stable_baselines3.ppo.ppo import PPO

from rl_triton_adapters.sb3 import TritonA2C, TritonPPO, disable, enable
from rl_triton_adapters.sb3.contrib import TritonMaskablePPO, TritonRecurrentPPO

LIBRARY = """
import stable_baselines3
from stable_baselines3.ppo import PPO as by_name

def make(name="PPO", **options):
    return getattr(stable_baselines3, name)("MlpPolicy", "CartPole-v1", device="cpu", **options)

def load(path):
    return stable_baselines3.PPO.load(path, device="cpu")
"""
PACKAGES = ("stable_baselines3", "stable_baselines3.ppo", "stable_baselines3.a2c", "stable_baselines3.ppo.ppo")
PACKAGES += ("sb3_contrib", "sb3_contrib.ppo_mask", "sb3_contrib.ppo_recurrent", "sb3_contrib.ppo_mask.ppo_mask")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Imports a library of that text, a new one in each call; afterwards all is as before."""
    (tmp_path / "some_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))

    def import_library():
        sys.modules.pop("some_library", None)
        return importlib.import_module("some_library")

    before = list_names()
    yield import_library
    sys.modules.pop("some_library", None)
    disable()
    assert list_names() == before


def list_names():
    return {name: {**vars(sys.modules[name])} for name in PACKAGES}


def test_a_library_makes_ours(library, tmp_path):
    """What was imported by name before stays; a model of either class is loaded by the other."""
    early = library()
    with enable():
        late = library()
        models = [late.make(name, seed=0) for name in ("PPO", "A2C")]
        assert [type(model) for model in models] == [TritonPPO, TritonA2C]
        assert type(early.make()) is late.by_name is TritonPPO and early.by_name is PPO
        assert issubclass(TritonPPO, PPO) and isinstance(models[0], stable_baselines3.PPO)
        assert (sb3_contrib.MaskablePPO, sb3_contrib.RecurrentPPO) == (TritonMaskablePPO, TritonRecurrentPPO)
        for package in (stable_baselines3, sb3_contrib):
            ours = [x for name in package.__all__ if f"Triton{name}" == (x := getattr(package, name)).__name__]
            assert len(ours) == (6 if package is stable_baselines3 else 5)
        models[0].save(tmp_path / "model")
        assert type(late.load(tmp_path / "model")) is TritonPPO
    assert type(late.make()) is type(late.load(tmp_path / "model")) is PPO


def test_calls_that_change_nothing(library, monkeypatch):
    """One that ends with an error, a second one, whose end leaves what the first has changed, and one switched off."""
    with pytest.raises(KeyError), enable():
        raise KeyError
    assert stable_baselines3.PPO is PPO
    enable()
    with enable():
        assert stable_baselines3.PPO is TritonPPO
    assert stable_baselines3.PPO is TritonPPO
    disable()
    disable()
    monkeypatch.setenv("RL_TRITON", "0")
    with enable():
        assert stable_baselines3.PPO is PPO


def test_what_others_have_put_there_stays(library, monkeypatch):
    """Before the call, or meanwhile."""
    mine = type("Mine", (PPO,), {})
    monkeypatch.setattr("stable_baselines3.ppo.PPO", mine)
    with enable():
        assert stable_baselines3.ppo.PPO is mine and stable_baselines3.PPO is TritonPPO
        monkeypatch.setattr("stable_baselines3.PPO", mine)
    assert stable_baselines3.PPO is stable_baselines3.ppo.PPO is mine
    monkeypatch.undo()
