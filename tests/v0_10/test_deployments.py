"""What Ray is told: flags as they come from `serve run` and from a file, and the two deployments made of them."""

from pathlib import Path

import pytest

from common.errors import ModelError
from tests.v0_10.ray_kit import needs_ray
from v0_10_scale_out.cluster.cluster_args import ClusterArgs
from v0_10_scale_out.server.server_args import ServerArgs

CONFIG = Path(__file__).parents[2] / "v0_10_scale_out" / "cluster" / "serve_config.yaml"
pytestmark = needs_ray


def parse(**args):
    from v0_10_scale_out.cluster.deployments import parse

    return parse(args)


def deployments(**args):
    """The ingress's and the replicas', as Ray will make them."""
    from v0_10_scale_out.cluster import app

    ingress = app(args)._bound_deployment
    return ingress, ingress.init_args[0]._bound_deployment


def test_flags_come_as_text_from_the_command_line_and_typed_from_a_file():
    as_text = parse(
        replicas="3", routing="random", enable_prefix_caching="false", served_model_name="a", num_blocks="9"
    )
    typed = parse(replicas=3, routing="random", enable_prefix_caching=False, served_model_name=["a"], num_blocks=9)
    assert as_text == typed
    cluster_args, server_args, engine_args = typed
    assert (cluster_args.replicas, cluster_args.routing) == (3, "random")
    assert server_args.served_model_name == ["a"]
    assert (engine_args.num_blocks, engine_args.enable_prefix_caching) == (9, False)


def test_without_flags_they_are_the_command_lines():
    cluster_args, server_args, _ = parse(model=None)
    assert cluster_args == ClusterArgs()
    assert server_args == ServerArgs()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replica": 3}, "--replica"),
        ({"replicas": "many"}, "many"),
        ({"replicas": 0}, "replicas must be at least 1, got 0."),
        ({"routing": "best"}, "best"),
        ({"replicas": 4, "max_replicas": 2}, "max_replicas must be at least replicas"),
    ],
)
def test_what_is_wrong_is_said(args, said):
    with pytest.raises(ModelError, match=said):
        parse(**args)


def test_the_file_names_the_application_and_flags_that_there_are():
    yaml = pytest.importorskip("yaml")
    [application] = yaml.safe_load(CONFIG.read_text())["applications"]
    assert application["import_path"] == "v0_10_scale_out.cluster:app"
    parse(**application["args"])


def test_the_engine_refuses_before_ray_does():
    ingress, replicas = deployments(max_num_seqs=4, max_queued_requests=7)
    assert replicas._deployment_config.max_ongoing_requests > 4 + 2 * 7
    assert ingress._deployment_config.max_ongoing_requests > 100_000
    assert replicas._deployment_config.max_queued_requests == ingress._deployment_config.max_queued_requests == -1


def test_a_fixed_number_and_a_range():
    _, fixed = deployments(replicas=3)
    assert fixed._deployment_config.num_replicas == 3
    assert fixed._deployment_config.autoscaling_config is None
    _, ranged = deployments(replicas=2, max_replicas=5, target_requests=9, upscale_delay=3, downscale_delay=4)
    scaling = ranged._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 10)  # and a stream
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (3, 4)
    _, ranged = deployments(replicas=2, max_replicas=5, target_requests=9, joint_answers=False)
    assert ranged._deployment_config.autoscaling_config.target_ongoing_requests == 9


def test_cores_and_gpus_are_the_replicas_and_the_ingress_takes_none():
    ingress, replicas = deployments(replica_cpus=2, replica_gpus=0.5)
    assert replicas.ray_actor_options["num_cpus"] == 2
    assert replicas.ray_actor_options["num_gpus"] == 0.5
    assert ingress.ray_actor_options["num_cpus"] == 0


def test_a_key_goes_to_the_ingress():
    ingress, _ = deployments(api_key="secret")
    assert ingress.init_args[2] == ["secret"]
