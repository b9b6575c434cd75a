"""The server: FastAPI's routes over `serving.py`, the process around them, and its end.

One process: HTTP on the event loop, the engine in a thread (`async_engine.py`). After SIGTERM or Ctrl-C nothing new is
taken, what runs may end within `--shutdown-timeout`, the rest is cut short with an error at the end of its stream, and
the exit code is 0. A second signal does not wait.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from common import cli
from common.errors import ModelError

from ..engine_args import EngineArgs
from .server_args import ServerArgs

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..engine import LLMEngine

API_KEY_VARIABLE = "MINI_VLLM_API_KEY"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description="Serve a Llama over HTTP, as OpenAI's API does."
    )
    cli.add_arguments(parser, ServerArgs, title="server")
    cli.add_arguments(parser, EngineArgs, title="engine")
    args = parser.parse_args(argv)
    return cli.run(lambda: _serve(args))


def _serve(args: argparse.Namespace) -> None:
    server_args, engine_args = cli.from_arguments(ServerArgs, args), cli.from_arguments(EngineArgs, args)
    sockets = [_bind(server_args)]  # before the model is loaded: a port that is taken is told at once
    logging.basicConfig(format=LOG_FORMAT, level=server_args.level, force=True)

    print("Loading the model...", file=sys.stderr)
    with cli.loading():
        import torch

        from ..engine import LLMEngine

        # On a CPU every thread that computes gets helpers of its own (OpenMP's), which wait for work by spinning. Two
        # sets of them on the same cores make each step a fifth slower: this thread, which only loads, gets none.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        engine = LLMEngine(**dataclasses.asdict(engine_args))
    app = build_app(engine, server_args, engine_args.model)
    app.state.engine.call_soon(lambda: torch.set_num_threads(num_threads))
    name = _names(server_args, engine_args.model)[0]
    host, port = sockets[0].getsockname()[:2]
    print(_welcome(name, engine, host, port, bool(_api_keys(server_args))), file=sys.stderr)
    asyncio.run(serve(app, server_args, sockets))


def build_app(engine: "LLMEngine", args: ServerArgs, model: str | None = None) -> "FastAPI":
    """The application around an engine, which it drives from now on.

    Args:
        engine: as it comes from its constructor.
        args: the server's flags.
        model: what `--model` said, for the model's name; `None` is the default model.
    """
    from fastapi import FastAPI, Request
    from fastapi.responses import PlainTextResponse, Response
    from sse_starlette.sse import AppStatus
    from starlette.middleware.cors import CORSMiddleware

    from common.weights import DEFAULT_MODEL

    from ..async_engine import AsyncEngine
    from . import errors, middleware
    from .metrics import Metrics
    from .protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
    from .responses import (
        ChatCompletion,
        Completion,
        ErrorBody,
        Health,
        ModelCard,
        ModelList,
        Text,
        Tokens,
        Version,
        respond,
    )
    from .serving import Serving

    names = _names(args, model)
    metrics = Metrics(engine, names[0])
    async_engine = AsyncEngine(engine, max_queued_requests=args.max_queued_requests, observer=metrics)
    serving = Serving(async_engine, names, root=model or DEFAULT_MODEL)
    # sse-starlette would cut all streams as soon as a signal comes; here they may end.
    AppStatus.disable_automatic_graceful_drain()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async_engine.start()
        yield
        await async_engine.shutdown(0)

    def error(*statuses: int) -> dict[int | str, dict[str, Any]]:
        return {status: {"model": ErrorBody} for status in (*statuses, 500)}

    def answers(body: Any) -> dict[int | str, dict[str, Any]]:
        event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
        stream = {"text/event-stream": {"itemSchema": event}}
        return {200: {"model": body, "content": stream}, **error(400, 401, 404, 413, 503)}

    app = FastAPI(
        title="mini-vLLM",
        redirect_slashes=False,  # a redirect would be no error object, and would name whatever host the client named
        version=_version(),
        lifespan=lifespan,
        # The page of /docs loads its scripts from the internet; /openapi.json needs nothing.
        description=f"OpenAI's API for {names[0]}. Bodies may have up to {middleware.MAX_BODY_BYTES} bytes.",
    )
    app.state.engine = async_engine
    errors.install(app)
    # The last one added is the outermost: the log sees everything, a preflight needs no key.
    app.add_middleware(middleware.Faults)
    app.add_middleware(middleware.BodyLimit)
    app.add_middleware(middleware.ApiKey, keys=_api_keys(args))
    app.add_middleware(CORSMiddleware, allow_origins=args.origins or [], allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(middleware.AccessLog)

    @app.post("/v1/chat/completions", responses=answers(ChatCompletion))
    async def chat(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await serving.chat(body, request)

    @app.post("/v1/completions", responses=answers(Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        return await serving.completions(body, request)

    @app.get("/v1/models", responses={200: {"model": ModelList}, **error(401)})
    async def models() -> Response:
        """The names that the model is served by."""
        return respond(ModelList(object="list", data=serving.models()))

    @app.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, **error(401, 404)})
    async def model_card(name: str) -> Response:
        """One of them."""
        return respond(serving.model(name))

    @app.post("/tokenize", responses={200: {"model": Tokens}, **error(400, 401, 404, 413)})
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation with its template."""
        return respond(await serving.tokenize(body))

    @app.post("/detokenize", responses={200: {"model": Text}, **error(400, 401, 404, 413)})
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        return respond(await serving.detokenize(body))

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={200: {"model": Health}, **error(503)})
    async def health() -> Response:
        """Whether requests are taken: 503 once the engine is dead, and while the server shuts down."""
        async_engine.check_serving()
        return respond(Health(status="ok"))

    @app.get("/version", responses={200: {"model": Version}, **error()})
    async def version() -> Response:
        """Of mini-vLLM."""
        return respond(Version(version=_version()))

    @app.get("/metrics", response_class=PlainTextResponse, responses=error())
    async def prometheus() -> Response:
        """For Prometheus."""
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    document = app.openapi

    def without_422() -> dict[str, Any]:
        """FastAPI documents its own way of refusing a body, which `errors.py` has replaced."""
        schema = document()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = without_422  # type: ignore[method-assign]
    return app


async def serve(app: "FastAPI", args: ServerArgs, sockets: list[socket.socket]) -> None:
    """Serve `app` on bound sockets until a signal comes, and end it in order."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            # Uvicorn's own would raise the signal again at the end, and the exit code would not be 0.
            self.force_exit = app.state.engine.hurried = self.should_exit  # at the second signal
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            draining = asyncio.ensure_future(app.state.engine.shutdown(args.shutdown_timeout))
            closing = asyncio.ensure_future(super().shutdown(sockets))
            while not (closing.done() or self.force_exit):  # from Python 3.12 on, `closing` alone would not hurry
                await asyncio.sleep(0.05)
            closing.cancel()
            await asyncio.wait({closing})
            await draining
            if self.force_exit:  # then uvicorn leaves it out, and Starlette complains
                await self.lifespan.shutdown()

    config = uvicorn.Config(
        app,
        http="h11",  # httptools is a little faster, but answers HTTP/1.0 clients in chunks, which they cannot read
        log_config=None,  # the root logger's format holds for all
        log_level=logging.WARNING,
        access_log=False,  # `middleware.AccessLog` knows more
        # Answers have ended by then; whoever does not read his, or does not finish his request, is cut off.
        timeout_graceful_shutdown=int(args.shutdown_timeout) + 5,
    )
    await Server(config).serve(sockets)


def _bind(args: ServerArgs) -> socket.socket:
    try:
        family = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((args.host, args.port), family=family, backlog=2048)
        # Connections inherit it. asyncio would set it, but not on sockets made elsewhere; without it, the second packet
        # of an answer waits until the client has acknowledged the first, which it delays by some 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]  # which would say the address once more
        raise ModelError(
            f"Cannot listen on {args.host}, port {args.port}: {reason}. Choose others with --host and --port."
        ) from None


def _names(args: ServerArgs, model: str | None) -> list[str]:
    """What the model is called in the API: as asked, else as `--model` says."""
    from common.weights import DEFAULT_MODEL

    return args.served_model_name or [model or DEFAULT_MODEL]


def _api_keys(args: ServerArgs) -> list[str]:
    """The keys that clients may send: of the flags, else of the environment; none lets everybody in."""
    variable = os.environ.get(API_KEY_VARIABLE)
    return args.api_key or ([variable] if variable else [])


def _version() -> str:
    return importlib.metadata.version("mini-vllm")


def _welcome(name: str, engine: "LLMEngine", host: str, port: int, has_keys: bool) -> str:
    """What is served, how much fits, and a line to try."""
    dtype = str(engine.model.dtype).removeprefix("torch.")
    key = "\n    -H 'Authorization: Bearer YOUR_KEY' \\" if has_keys else ""
    address = f"[{host}]" if ":" in host else host
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else address}:{port}"
    return f"""{name}, {dtype} on {engine.model.device}
{engine.pool.explanation}
KV capacity: {engine.pool.num_tokens:,} tokens in all, up to {engine.max_model_len:,} a request
Listening on {url} (Ctrl-C ends). Documentation: {url}/docs. Try:

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\{key}
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "stream": true,
         "temperature": 0, "max_tokens": 100}}'
"""
