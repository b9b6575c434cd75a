"""One replica needs no Ray, and neither does the policy: nothing of them loads it, and its absence is one sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ModelError
from tests.v0_4.test_server_process import served
from v0_10_scale_out.cluster.cluster_args import ClusterArgs

ROOT = Path(__file__).parents[2]
LOOK = "import importlib, json, sys; importlib.import_module(sys.argv[1]); print(json.dumps(sorted(sys.modules)))"


def modules_after(module):
    done = subprocess.run([sys.executable, "-c", LOOK, module], cwd=ROOT, capture_output=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "module", ["cluster", "cluster.routing", "cluster.keys", "cluster.expositions", "cluster.main"]
)
def test_policy_and_command_line_load_neither_ray_nor_torch(module):
    assert not {"ray", "torch", "transformers", "fastapi"} & modules_after(f"v0_10_scale_out.{module}")


@pytest.mark.parametrize("module", ["cluster.ingress", "cluster.replica", "cluster.local"])
def test_ingress_and_replica_load_no_ray(module):
    assert not {"ray", "torch"} & modules_after(f"v0_10_scale_out.{module}")


@pytest.fixture
def without_ray(tmp_path):
    """An environment in which Ray is not installed."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


def test_several_replicas_without_ray_are_refused_in_one_sentence(without_ray):
    command = [sys.executable, "-m", "v0_10_scale_out", "--replicas", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=without_ray)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line == "error: Several replicas need Ray: install it with `pip install -e '.[ray]'`."


def test_one_replica_serves_without_ray(tiny, without_ray):
    with served("--model", tiny.folder, module="v0_10_scale_out", environment=without_ray) as server:
        assert f"\n{tiny.folder}, float32 on cpu\n" in server.text
        assert server.is_healthy


@pytest.mark.parametrize(
    ("args", "needs_ray", "starts_ray", "most"),
    [
        ({}, False, True, 1),
        ({"replicas": 2}, True, True, 2),
        ({"max_replicas": 4}, True, True, 4),
        ({"max_replicas": 1}, False, True, 1),
        ({"ray_address": "auto"}, True, False, 1),
        ({"ray_address": "local"}, True, True, 1),
    ],
)
def test_what_needs_ray_and_what_starts_it(args, needs_ray, starts_ray, most):
    made = ClusterArgs(**args)
    assert (made.needs_ray, made.starts_ray, made.most_replicas) == (needs_ray, starts_ray, most)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replicas": 0}, "replicas must be at least 1, got 0."),
        ({"replicas": 3, "max_replicas": 2}, r"max_replicas must be at least replicas \(3\), got 2."),
        ({"target_requests": 0}, "target_requests must be above 0, got 0."),
        ({"upscale_delay": -1}, "upscale_delay must be at least 0, got -1."),
        ({"target_requests": float("nan")}, "target_requests must be above 0, got nan."),
        ({"drain_timeout": float("inf")}, "drain_timeout must be at least 0, got inf."),
        ({"downscale_delay": -1}, "downscale_delay must be at least 0, got -1."),
        ({"drain_timeout": -1}, "drain_timeout must be at least 0, got -1."),
        ({"replica_cpus": 0}, "replica_cpus must be at least 1, got 0."),
        ({"replica_gpus": -0.5}, "replica_gpus must be at least 0, got -0.5."),
        ({"routing": "best"}, "routing must be one of prefix, balanced, random, got 'best'."),
        ({"routing_threshold": -1}, "routing_threshold must be at least 0, got -1."),
        ({"routing_min_share": 1.5}, "routing_min_share must be from 0 to 1, got 1.5."),
        ({"routing_blocks": 0}, "routing_blocks must be at least 1, got 0."),
    ],
)
def test_values_out_of_their_range_are_refused(args, said):
    with pytest.raises(ModelError, match=said):
        ClusterArgs(**args)
