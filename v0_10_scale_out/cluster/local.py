"""Ray on this machine for as long as the server runs: started, waited for, and ended in order.

    ray.init ─▶ serve.start (proxy) ─▶ serve.run (ingress, replicas) ─▶ a signal ─▶ drain ─▶ serve and ray.shutdown

As with one replica, after SIGTERM or Ctrl-C requests that run may end within `--shutdown-timeout`, and new ones are
refused. Then the rest is cut short, with an error at the end of each stream. The exit code is 0. A second signal does
not wait.

Nothing is reported to anybody, there is no dashboard, and no other network than this machine's own is needed.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from common import cli
from common.errors import ModelError

from ..engine_args import EngineArgs
from ..server import listening
from ..server.app import api_keys, model_folder, model_names
from ..server.server_args import ServerArgs
from .cluster_args import ClusterArgs

ENVIRONMENT = {  # read while Ray is imported; what is set already stays
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # otherwise similar lines of the access log are left out
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",  # a proxy that has died is replaced within 5 s, not 25
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray hides all GPUs from a replica that asks for none
}
HERE = {  # and this for a Ray of our own
    # Where it is not to make a cluster, Ray takes 127.0.0.1 for this machine's address, and listens on nothing else.
    # The switch was made for Windows and macOS, hence its name, but works on Linux, too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Other users of this machine reach its loopback, too. Ray would make a token as well, and write it into the home.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
OBJECT_STORE_BYTES = 256 * 2**20  # large bodies of requests pass through it


def serve(cluster_args: ClusterArgs, server_args: ServerArgs, engine_args: EngineArgs) -> None:
    """Serve until a signal comes.

    Raises:
        ModelError: the flags cannot be used, or the replicas don't start.
    """
    if server_args.uds is not None:
        raise ModelError("uds: Ray's proxy listens on a port only. Leave it out, or serve with one replica.")
    server_args = _with_port(server_args)
    server_args.read_chat_template()
    name, keys = model_names(server_args, engine_args.model)[0], api_keys(server_args)
    print("Loading the model...", file=sys.stderr)
    with cli.loading():
        model_folder(engine_args)  # what is wrong with it is told at once, and a GGUF file is converted once for all
    prepare(cluster_args)
    signals = _Signals()
    with _stopped(cluster_args, signals):
        start(cluster_args, server_args, engine_args)
        signals.listen()
        url = f"{'http' if server_args.ssl_certfile is None else 'https'}://{server_args.host}:{server_args.port}"
        print(_welcome(name, url + server_args.root_path, cluster_args, bool(keys)), file=sys.stderr)
        signals.wait()
        _drain(server_args.shutdown_timeout, signals)


def prepare(cluster_args: ClusterArgs) -> None:
    """Set what Ray reads while it is imported."""
    for variables in (ENVIRONMENT, *([HERE] if cluster_args.starts_ray else [])):
        for variable, value in variables.items():
            os.environ.setdefault(variable, value)


def start(cluster_args: ClusterArgs, server_args: ServerArgs, engine_args: EngineArgs, **init: Any) -> None:
    """Start Ray, unless there is one, and the application on it; returns once all replicas are ready.

    Args:
        cluster_args: how many, on what.
        server_args: of each.
        engine_args: of each.
        init: arguments of `ray.init`.

    Raises:
        ModelError: the replicas don't start.
    """
    import ray
    from ray import serve as ray_serve

    from . import deployments

    if cluster_args.starts_ray:
        init = {
            "address": "local",
            # By Ray's count; more replicas than cores share them.
            "num_cpus": max(os.cpu_count() or 1, cluster_args.most_replicas * cluster_args.replica_cpus),
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
        } | init
    else:
        init = {"address": cluster_args.ray_address} | init
    if not ray.is_initialized():
        ray.init(logging_level=logging.WARNING, **init)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray_serve.start(
        proxy_location="HeadOnly",  # a cluster behind a load balancer has one on every node: `serve_config.yaml`
        http_options={
            "host": server_args.host,
            "port": server_args.port,
            "ssl_certfile": server_args.ssl_certfile,
            "ssl_keyfile": server_args.ssl_keyfile or server_args.ssl_certfile,
        },
        logging_config={"log_level": "WARNING", "enable_access_log": False},  # ours say more
    )
    application = deployments.build(cluster_args, server_args, engine_args)
    try:
        # A number of replicas that Ray does not decide on can be changed while they run, through Ray's own interface.
        is_fixed = cluster_args.max_replicas is None
        ray_serve.run(application, name=deployments.APP, route_prefix="/", external_scaler_enabled=is_fixed)
    except RuntimeError as error:
        raise ModelError(f"The replicas don't start, the log above says why: {error}") from None


class _Signals:
    """SIGTERM and Ctrl-C, counted."""

    def __init__(self) -> None:
        self.number = 0
        self._came = threading.Event()

    def listen(self) -> None:
        """From now on; Ray has set handlers of its own before."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def wait(self) -> None:
        """Until the first one."""
        while not self._came.wait(1):  # a wait without an end would not be interrupted on every platform
            pass

    def _note(self, *_: Any) -> None:
        self.number += 1
        self._came.set()


@contextlib.contextmanager
def _stopped(cluster_args: ClusterArgs, signals: _Signals) -> Iterator[None]:
    """End what was started, also where the start has failed."""
    import ray
    from ray import serve as ray_serve

    from .deployments import APP

    try:
        yield
    finally:
        if ray.is_initialized():
            if not cluster_args.starts_ray:
                ray_serve.delete(APP)  # the cluster may serve other applications
            elif signals.number < 2:
                ray_serve.shutdown()
            ray.shutdown()


def _drain(seconds: float, signals: _Signals) -> None:
    from ray import serve as ray_serve

    from .deployments import APP, INGRESS

    draining = ray_serve.get_deployment_handle(INGRESS, APP).drain.remote(seconds)
    while signals.number < 2:
        with contextlib.suppress(TimeoutError):
            draining.result(timeout_s=0.2)
            return


def _with_port(args: ServerArgs) -> ServerArgs:
    """With a port that is free, where 0 is asked for; raises `ModelError` for one that is not."""
    with listening.bind(args) as listener:
        return dataclasses.replace(args, port=listener.getsockname()[1])


def _welcome(name: str, url: str, args: ClusterArgs, has_keys: bool) -> str:
    """What is served, by how many, and a line to try."""
    key = "\n    -H 'Authorization: Bearer YOUR_KEY' \\" if has_keys else ""
    many, cores = f"{args.replicas} replicas", f"{args.replica_cpus} core{'s' * (args.replica_cpus != 1)}"
    if args.max_replicas is not None:
        many = f"{args.replicas} to {args.max_replicas} replicas, {args.target_requests:g} requests each"
    return f"""{name} on {many}, {cores} and {args.replica_gpus:g} GPUs each; routing: {args.routing}
Listening on {url} (Ctrl-C ends). All replicas side by side: {url}/visualizer. Their metrics: {url}/metrics. Try:

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\{key}
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "stream": true,
         "temperature": 0, "max_tokens": 100}}'
"""
