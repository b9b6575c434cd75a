"""The application for Ray Serve: one ingress, and behind it as many replicas as asked for.

    serve run v0_10_scale_out.cluster:app replicas=2 routing=prefix
    serve run v0_10_scale_out/cluster/serve_config.yaml

Every flag of the command line is an argument here, with underscores. Where the proxies listen is said to Ray.
"""

import argparse
import logging
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ModelError

from ..async_engine import UnavailableError
from ..engine_args import EngineArgs
from ..server.app import LOG_FORMAT, api_keys, load_app
from ..server.server_args import ServerArgs
from . import loopback
from .cluster_args import ClusterArgs
from .ingress import Ingress
from .joint import Address, Batch, Inbox
from .main import add_flags, from_flags
from .outgoing import ReplicaLostError
from .replica import Replica, behind_ingress
from .router import PolicyRouter
from .routing import Route

APP = "mini-vllm"
INGRESS, REPLICA = "Ingress", "Replica"  # as Ray's logs and metrics name them
HEALTH_SECONDS = 2.0  # between two looks at a replica; Ray's ten find a lost one late
ALL_SECONDS = 10.0  # for an answer of all replicas
UNBOUNDED = 1_000_000


def app(args: dict[str, Any]) -> serve.Application:
    """What `serve run` asks for: the application with these flags, each by its name."""
    return build(*parse(args))


def parse(args: dict[str, Any]) -> tuple[ClusterArgs, ServerArgs, EngineArgs]:
    """The flags as the command line would read them.

    Raises:
        ModelError: one is unknown, or its value cannot be used.
    """

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ModelError(message)

    parser = Parser(allow_abbrev=False, add_help=False)
    add_flags(parser)
    words = []
    for name, value in args.items():
        if value is None:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool) or value in ("true", "false", "True", "False"):
            words.append(flag if value in (True, "true", "True") else f"--no-{flag[2:]}")
        else:
            words += [f"{flag}={item}" for item in (value if isinstance(value, list) else [value])]
    return from_flags(parser.parse_args(words))


def build(cluster_args: ClusterArgs, server_args: ServerArgs, engine_args: EngineArgs) -> serve.Application:
    """The two deployments, bound together."""
    # Ray shall refuse nothing: the engine does, in its own words, and a probe finds room while the queue is full.
    most_requests = engine_args.max_num_seqs + 2 * server_args.max_queued_requests + 100
    scaling: dict[str, Any] = {"num_replicas": cluster_args.replicas}
    if cluster_args.max_replicas is not None:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=cluster_args.replicas,
                initial_replicas=cluster_args.replicas,
                max_replicas=cluster_args.max_replicas,
                # Ray counts the stream of joint answers as a request of the replica.
                target_ongoing_requests=cluster_args.target_requests + cluster_args.joint_answers,
                upscale_delay_s=cluster_args.upscale_delay,
                downscale_delay_s=cluster_args.downscale_delay,
            )
        }
    router_class: Any = PolicyRouter
    router = RequestRouterConfig(
        request_router_class=router_class,
        request_router_kwargs={
            "routing": cluster_args.routing,
            "threshold": cluster_args.routing_threshold,
            "min_share": cluster_args.routing_min_share,
            "max_blocks": cluster_args.routing_blocks,
        },
    )
    quiet = {"log_level": "WARNING", "enable_access_log": False}  # the server's lines say more than Ray's
    deployment: Any = serve.deployment  # its types are overloads that fit neither of these
    replicas = deployment(
        ServedReplica,
        name=REPLICA,
        max_ongoing_requests=most_requests,
        max_queued_requests=-1,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=cluster_args.drain_timeout,
        graceful_shutdown_wait_loop_s=0.2,
        request_router_config=router,
        logging_config=quiet,
        ray_actor_options={"num_cpus": cluster_args.replica_cpus, "num_gpus": cluster_args.replica_gpus},
        **scaling,
    )
    ingress = deployment(
        ServedIngress,
        name=INGRESS,
        num_replicas=1,  # it alone knows what went where
        max_ongoing_requests=UNBOUNDED,
        max_queued_requests=-1,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=server_args.shutdown_timeout,
        logging_config=quiet,
        # It takes no core by Ray's count, though the events of many streams keep one busy. It runs on the head node,
        # without which there is no cluster anyway: no other node that is lost takes the ingress with it.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
    )
    # Read here: the file and the variable are on this machine.
    template, keys = server_args.read_chat_template(), api_keys(server_args)
    bound = replicas.bind(server_args, engine_args, template)
    return ingress.bind(bound, server_args, keys, cluster_args.joint_answers)


class ServedReplica(Replica):
    """A `Replica` with Ray's name for it, and its model loaded."""

    def __init__(self, server_args: ServerArgs, engine_args: EngineArgs, template: str | None) -> None:
        loopback.stay()
        logging.basicConfig(format=LOG_FORMAT, level=server_args.level, force=True)
        app, _, _ = load_app(behind_ingress(server_args), engine_args, template)
        super().__init__(serve.get_replica_context().replica_tag, app)


class Reached:
    """`Replicas` through Ray's handle.

    Args:
        handle: of the replicas.
        joint: whether a replica's answers share a stream.
    """

    def __init__(self, handle: DeploymentHandle, *, joint: bool) -> None:
        self._handle = handle
        self._asgi: Any = handle.options(method_name="asgi", stream=True)
        self._outbox: Any = handle.options(method_name="outbox", stream=True)
        self._inbox = Inbox(self._ask, self._read) if joint else None

    def ask(self, route: Route, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """See `Replicas`."""
        return self._ask(route, scope, body, None) if self._inbox is None else self._inbox.ask(route, scope, body)

    async def _ask(
        self, route: Route, scope: Scope, body: bytes, to: Address | None
    ) -> AsyncGenerator[list[Message], None]:
        route.has_ended = False
        answer = self._asgi.remote(route, scope, body, to)
        try:
            async for messages in answer:
                yield messages
        except RayTaskError:  # of the app itself
            raise
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(str(error).partition("\n")[0]) from None
        finally:
            route.has_ended = True
            answer.cancel()

    async def _read(self, replica: str, inbox: str) -> AsyncGenerator[Batch, None]:
        stream = self._outbox.remote(Route(only=replica, is_request=False), replica, inbox)
        try:
            async for batch in stream:
                yield batch
        finally:
            stream.cancel()

    async def ask_all(self, scope: Scope, body: bytes) -> list[tuple[str, int, list[tuple[bytes, bytes]], bytes]]:
        """See `Replicas`."""
        return await _of_all(self._handle.broadcast("whole", scope, body))

    async def states(self) -> list[dict[str, Any]]:
        """See `Replicas`."""
        return await _of_all(self._handle.broadcast("state"))

    async def max_body_bytes(self) -> int:
        """See `Replicas`."""
        try:
            limit: int = await self._handle.options(method_name="max_body_bytes").remote()
        except (RayError, RayServeException) as error:
            raise UnavailableError(f"No replica can be asked: {str(error).partition(chr(10))[0]}") from None
        return limit


async def _of_all(asked: DeploymentBroadcastResponse) -> list[Any]:
    """The answers, without those of replicas that failed; none if one is late, as Ray gives all or nothing."""
    try:
        answers = await asked.results_async(timeout_s=ALL_SECONDS, return_exceptions=True)
    except (TimeoutError, RayError, RayServeException):
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]


@serve.ingress()
class ServedIngress:
    """The `Ingress`, where Ray's proxy finds it."""

    def __init__(self, replicas: DeploymentHandle, args: ServerArgs, keys: list[str], joint: bool) -> None:
        loopback.stay()
        logging.basicConfig(format=LOG_FORMAT, level=args.level, force=True)
        self._ingress = Ingress(Reached(replicas, joint=joint), args, keys)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            await self._ingress(scope, receive, send)

        return call  # a function: Ray takes an object for ASGI 2

    async def drain(self, seconds: float) -> None:
        """See `Ingress.drain`."""
        await self._ingress.drain(seconds)
