"""The CleanRL adapter on a GPU: the numbers of the CPU, in CUDA graphs as LeanRL makes them, and nothing waits."""

import pytest
import torch

pytest.importorskip("gymnasium")

from gpu_checks import capture_graph, forbid_waiting
from test_cleanrl import GAMMA, LAMBDA, assert_near, random_rollout

from rl_triton_adapters.cleanrl import gae

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def on_device(tensors):
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def arguments(seed=0):
    return random_rollout(seed=seed)._asdict()


def gae_of(**rollout):
    return gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)


def test_the_numbers_of_the_cpu_without_waiting():
    given = on_device(arguments())
    for _ in range(3):
        gae_of(**given)  # what is compiled and recorded comes before
    with forbid_waiting():
        got = gae_of(**given)
    assert all(x.device.type == DEVICE for x in got)
    assert_near(got, gae_of(**arguments()))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_in_a_cuda_graph(compiled):
    """What was captured computes from what stands in the inputs when it is replayed."""
    torch._dynamo.reset()
    given, call = on_device(arguments()), torch.compile(gae_of, fullgraph=True) if compiled else gae_of
    graph, got = capture_graph(lambda: call(**given), warmups=3)
    for seed in (1, 2):
        for name, x in on_device(arguments(seed)).items():
            given[name].copy_(x)
        for x in got:
            x.fill_(torch.nan)
        graph.replay()
        assert_near(got, gae_of(**arguments(seed)))
