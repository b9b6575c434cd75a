"""An ingress with replicas in this process: all of `cluster/` but Ray."""

import asyncio
import contextlib
import itertools
import threading
import uuid

import uvicorn
from starlette.datastructures import MutableHeaders

from tests.kit.server import RunningServer, wait_until
from tests.kit.tokenizers import byte_tokenizer
from v0_10_scale_out import LLMEngine
from v0_10_scale_out.cluster.ingress import Ingress
from v0_10_scale_out.cluster.joint import Inbox
from v0_10_scale_out.cluster.outgoing import ReplicaLostError
from v0_10_scale_out.cluster.replica import Replica, behind_ingress
from v0_10_scale_out.cluster.routing import Policy, Route
from v0_10_scale_out.server.app import ServerArgs, api_keys, build_app, listening, process


class Here:
    """`Replicas` in this process, chosen by a policy as Ray's router does it. A test may lose some of them."""

    def __init__(self, replicas, joint, **policy):
        self.replicas = {replica.name: replica for replica in replicas}
        self.policy = Policy(**({"seed": 0} | policy))
        self.asked = []  # the names, in order
        self.num_passed = 0  # messages that came from a replica and went on to a client
        self.lost = {}  # of each replica that is lost: the messages that still come from it
        self.is_deaf = False  # nobody takes a request
        self._ids = itertools.count()
        self._inbox = Inbox(self._ask, self._read) if joint else None

    def ask(self, route: Route, scope, body):
        return self._ask(route, scope, body, None) if self._inbox is None else self._inbox.ask(route, scope, body)

    async def _ask(self, route, scope, body, to):
        if self.is_deaf:
            await asyncio.Future()
        request_id = f"{next(self._ids)}"
        # One that was lost is told so to the router, and is not chosen again.
        names = [name for name in self.replicas if self.lost.get(name) != 0 or name not in self.asked]
        if not names:
            raise ReplicaLostError("There is none.")
        self.policy.update(names)
        route.choice = self.policy.choose_for(route, names)
        name = route.choice.replica
        self.policy.start(request_id, name, route.key)
        self.asked.append(name)
        try:
            async with contextlib.aclosing(self.replicas[name].asgi(route, scope, body, to)) as answer:
                async for messages in answer:
                    self._come_from(name)
                    yield messages
                    self.num_passed += len(messages)
        finally:
            self.policy.end(request_id)

    async def _read(self, replica, inbox):
        async with contextlib.aclosing(self.replicas[replica].outbox(Route(), replica, inbox)) as batches:
            async for batch in batches:
                self._come_from(replica)
                yield batch
                self.num_passed += len(batch)

    def _come_from(self, name):
        if self.lost.get(name, 1) <= 0:
            raise ReplicaLostError(f"{name} has died.")
        if name in self.lost:
            self.lost[name] -= 1

    async def states(self):
        return [await replica.state() for name, replica in self.replicas.items() if name not in self.lost]

    async def max_body_bytes(self):
        return await next(iter(self.replicas.values())).max_body_bytes()

    async def ask_all(self, scope, body):
        return [await replica.whole(scope, body) for name, replica in self.replicas.items() if name not in self.lost]


class Proxy:
    """What Ray's proxy does to a request's id: gives it one, and sends it back."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        request_id = headers.setdefault("x-request-id", uuid.uuid4().hex)

        async def send_with_id(message):
            if message["type"].endswith("http.response.start"):
                MutableHeaders(scope=message).append("X-Request-ID", request_id)
            await send(message)

        await self.app(scope, receive, send_with_id)


@contextlib.contextmanager
def ingress(models, *, server=None, defaults=None, tokenizer=None, policy=None, joint=True, **engine):
    """Serve through an ingress and a replica for each model; yields a `RunningServer` with `here` and `ingress`."""
    args = ServerArgs(**({"served_model_name": ["tiny"]} | (server or {})))
    engines = [
        LLMEngine(model, tokenizer=(tokenizer or byte_tokenizer()) if hasattr(model, "forward") else None, **engine)
        for model in models
    ]
    keys = api_keys(args)
    apps = [build_app(engine, behind_ingress(args), defaults=defaults) for engine in engines]
    socket = listening.bind(ServerArgs(port=0))
    made = {}

    async def run():
        here = Here([Replica(f"r{i}", app) for i, app in enumerate(apps)], joint, **(policy or {}))
        made["ingress"] = Ingress(here, args, keys)
        made["server"] = uvicorn.Server(process.uvicorn_config(Proxy(made["ingress"]), args))
        made["here"], made["loop"] = here, asyncio.get_running_loop()
        await made["server"].serve([socket])
        for app in apps:  # as their lifespan would
            await app.state.engine.shutdown(0)
            del app.state.engine.engine

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    running = RunningServer(f"http://127.0.0.1:{socket.getsockname()[1]}", engines[0], apps[0])
    wait_until(lambda: "loop" in made and made["server"].started, "the ingress has started")
    running.here, running.ingress, running.loop, running.engines = made["here"], made["ingress"], made["loop"], engines
    try:
        yield running
        for engine, app in zip(engines, apps, strict=True):
            if app.state.engine.is_alive:
                running.engine = engine
                running.assert_idle()
    finally:
        running.http.close()
        made["server"].should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive(), "the ingress has not ended"
