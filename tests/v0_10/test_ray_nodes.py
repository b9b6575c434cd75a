"""Two nodes of a Ray cluster, both on this machine, with a replica on each: one node is lost."""

import threading
import time
from collections import Counter

import httpx
import pytest

from tests.kit.server import wait_until
from tests.v0_10.ray_kit import KEY, Cluster, needs_ray, ray_of_our_own
from v0_10_scale_out.cluster import local
from v0_10_scale_out.cluster.cluster_args import ClusterArgs
from v0_10_scale_out.engine_args import EngineArgs
from v0_10_scale_out.server.app import ServerArgs, listening

pytestmark = needs_ray


@pytest.fixture
def nodes():
    """A cluster with a head of one core and a second node of one."""
    from ray.cluster_utils import Cluster as Nodes

    made = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    try:
        yield made
    finally:
        made.shutdown()


def test_a_lost_node_costs_what_ran_there_and_the_other_serves_on(nodes, tiny):
    with listening.bind(ServerArgs(port=0)) as listener:
        port = listener.getsockname()[1]
    server_args = ServerArgs(port=port, api_key=[KEY], served_model_name=["tiny"])
    args = ClusterArgs(replicas=2, ray_address=nodes.address)
    with ray_of_our_own():
        local.start(args, server_args, EngineArgs(model=str(tiny.folder), num_blocks=200))
        cluster = Cluster(port)
        cluster.wait_for_replicas(2)
        statuses, ended = Counter(), threading.Event()

        def ask(number):
            client = Cluster(port)
            while not ended.is_set():
                try:
                    statuses[client.complete(prompt=f"{number}", max_tokens=20, ignore_eos=True).status_code] += 1
                except httpx.TransportError as error:
                    statuses[type(error).__name__] += 1

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: statuses[200] >= 20, "the load runs")
        nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
        lost = time.monotonic()
        at_the_loss = statuses[200]
        wait_until(lambda: statuses[200] >= at_the_loss + 40, "the other one serves", 60)
        assert time.monotonic() - lost < 30
        wait_until(lambda: len(cluster.states()) == 1, "the loss is known", 60)
        ended.set()
        for thread in threads:
            thread.join(60)
        assert sum(number for status, number in statuses.items() if status != 200) <= 2, statuses
