"""Trainings of Stable-Baselines3 change nothing that other threads of the process see.

Two things are left out, which a capture puts back: states of default random generators, and a switch of PyTorch's for
advice on streams of gradients.
"""

import threading

import pytest
import torch

pytest.importorskip("sb3_contrib")
from process_state import assert_same, read_from_another_thread, read_state
from test_sb3_refusals import HOW, make_model
from torch.distributions import Distribution


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", ["box", "multibinary", "own policy", "a2c multibinary", "maskable", "recurrent box"])
def test_nothing_of_the_process_changes(case, how, monkeypatch):
    """While a rollout is collected, within the policy's calls of acting and of updates, and after the training."""
    model = make_model(case, how, monkeypatch, False, nan_from=1000)
    found, before = [], read_state()
    model.policy.register_forward_hook(lambda *_: found.append(read_from_another_thread()))
    model.policy.action_net.register_forward_hook(lambda *_: found.append(read_from_another_thread()))
    model.learn(64, callback=lambda *_: found.append(read_from_another_thread()) or True)
    assert len(found) > 64
    for state in (*found, read_state()):
        assert_same(state, before)


@pytest.mark.parametrize("case", ["multibinary", "own policy"])
def test_rollouts_of_two_threads_overlap(case, monkeypatch):
    """Checks are on in each of them, and after both; the one that began last ends last."""
    monkeypatch.setattr(Distribution, "_validate_args", True)
    began, ended = (threading.Event(), threading.Event()), threading.Event()
    models = [make_model(case, "cpu", monkeypatch, False, nan_from=1000) for _ in range(2)]
    refused = []

    def wait_in_rollout(i):
        def wait(*_):
            began[i].set()
            assert (ended if i else began[1]).wait(60)
            with pytest.raises(ValueError, match="Expected parameter loc"):
                torch.distributions.Normal(torch.tensor(torch.nan), torch.tensor(1.0))
            refused.append(i)
            return True

        return wait

    def learn(i):
        models[i].learn(1, callback=wait_in_rollout(i))
        if i == 0:
            ended.set()

    threads = [threading.Thread(target=learn, args=(i,)) for i in range(2)]
    threads[0].start()
    assert began[0].wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(120)
    assert sorted(set(refused)) == [0, 1] and Distribution._validate_args
