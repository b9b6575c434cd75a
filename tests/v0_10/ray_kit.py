"""Ray on this machine for tests, and what they look at from outside: replicas, processes, and sockets."""

import contextlib
import importlib.util
import os
import re
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.server import RunningServer, wait_until

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="several replicas need Ray: pip install -e '.[ray]'"
)
KEY = "s3cret"
ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0",  # it would end replicas where other tests fill the memory
}


@contextlib.contextmanager
def ray_of_our_own():
    """Whatever is started of Ray in this block ends with it."""
    import ray
    from ray import serve

    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


class Cluster:
    """A server on Ray: its address, a client with the key, and its replicas' states."""

    chat, complete = RunningServer.chat, RunningServer.complete

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(
            base_url=self.url, timeout=60, trust_env=False, headers={"Authorization": f"Bearer {KEY}"},
            limits=httpx.Limits(max_connections=100),
        )  # fmt: skip

    def states(self):
        """Of each replica; see `Replica.state`."""
        return self.http.get("/replicas").json()["replicas"]

    def is_idle(self):
        return all(
            state["num_running"] == state["num_waiting"] == 0 and state["num_free_blocks"] == state["num_blocks"]
            for state in self.states()
        )

    def num_running(self):
        return sum(state["num_running"] for state in self.states())

    def pace(self, seconds):
        """Of every replica: so long from one step to the next."""
        response = self.http.post("/events/control", json={"delay": seconds})
        assert response.json() == {"paused": False, "delay": seconds}

    @contextlib.contextmanager
    def slowed(self, seconds=0.05):
        self.pace(seconds)
        try:
            yield
        finally:
            self.pace(0)

    def samples(self, name):
        """The values of /metrics with this name, by their labels, as a strict parser reads them."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }

    def counts(self, name, label):
        """Those values, added up by one of their labels."""
        counts = Counter()
        for labels, value in self.samples(name).items():
            counts[dict(labels)[label]] += int(value)
        return +counts

    def answered(self):
        """How many prompts each replica has answered."""
        return self.counts("vllm:request_prompt_tokens_count", "replica")

    def wait_for_replicas(self, number, seconds=60):
        wait_until(lambda: len(self.states()) == number, f"there are {number} replicas", seconds)


def kill(state):
    os.kill(state["pid"], signal.SIGKILL)


def descendants(pid):
    """The processes that this one has started, and those that they have."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, left = set(), [pid]
    while left:
        new = children.get(left.pop(), [])
        found.update(new)
        left += new
    return found


def listening_addresses(pids):
    """The addresses, in hexadecimal as the kernel writes them, on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found
