"""Learners on several nodes of a Ray cluster: each has our advantages, and together they train as RLlib's own do.

Both nodes are this machine; Ray treats them as two.
"""

from operator import attrgetter

import pytest

pytest.importorskip("ray.rllib")

import ray
from ray.cluster_utils import Cluster
from small import assert_same_training, name_of_piece, small_ppo, train_algorithm

from rl_triton_adapters.rllib import enable_triton, gae

ROOM = {"room_for_a_learner": 1}


@pytest.fixture(scope="module")
def two_nodes(private_ray):
    """The names of two nodes with room for one learner each."""
    ray.shutdown()
    head = {"num_cpus": 2, "resources": ROOM, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, resources=ROOM)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield {node["NodeID"] for node in ray.nodes()}
    ray.shutdown()
    cluster.shutdown()


def count_calls(learner):
    """From now on, a learner counts the estimator's calls in its process."""
    learner.calls, compute_gae = 0, gae.compute_gae

    def counted(*args, **kwargs):
        learner.calls += 1
        return compute_gae(*args, **kwargs)

    gae.compute_gae = counted


def test_two_learners_on_two_nodes_train_as_those_of_rllib(two_nodes):
    def config():
        return small_ppo(num_learners=2).learners(custom_resources_per_learner=ROOM)

    asked = (name_of_piece, lambda _: ray.get_runtime_context().get_node_id(), attrgetter("calls"))
    stock = train_algorithm(config(), *asked, before=count_calls, iterations=3)
    ours = train_algorithm(enable_triton(config()), *asked, before=count_calls, iterations=3)
    assert len(two_nodes) == 2
    assert set(stock[3]) == set(ours[3]) == two_nodes
    assert stock[2] == ["GeneralAdvantageEstimation"] * 2
    assert ours[2] == ["TritonGeneralAdvantageEstimation"] * 2
    assert (stock[4], ours[4]) == ([0, 0], [3, 3])  # all of a learner's episodes in one call
    assert_same_training(stock, ours)
