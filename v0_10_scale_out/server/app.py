"""The server: FastAPI's routes over `serving.py`, and what is made before them: flags, socket, model.

One process: HTTP on the event loop, the engine in a thread (`async_engine.py`). `process.py` runs it and ends it.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import importlib.metadata
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import cli
from common.errors import ModelError, shown

from ..engine_args import EngineArgs, shape_folder
from . import listening, process
from .server_args import ServerArgs, check_api_key

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..engine import LLMEngine

API_KEY_VARIABLE = "MINI_VLLM_API_KEY"
logger = logging.getLogger(__name__)
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description="Serve a Llama over HTTP, as OpenAI's API does."
    )
    cli.add_arguments(parser, ServerArgs, title="server")
    cli.add_arguments(parser, EngineArgs, title="engine")
    args = parser.parse_args(argv)
    return cli.run(lambda: serve(args))


def serve(args: argparse.Namespace) -> None:
    """Serve in this process until a signal comes."""
    server_args, engine_args = cli.from_arguments(ServerArgs, args), cli.from_arguments(EngineArgs, args)
    # Before the model is loaded: a file that is missing, a wrong key and a port that is taken are told at once.
    template, keys = server_args.read_chat_template(), api_keys(server_args)
    sockets = [listening.bind(server_args)]
    logging.basicConfig(format=LOG_FORMAT, level=server_args.level, force=True)

    if os.environ.get("VLLM_API_KEY") and not keys:
        logger.warning("VLLM_API_KEY is set, but this server reads %s: it has no key.", API_KEY_VARIABLE)
    name = model_names(server_args, engine_args.model)[0]
    print("Loading the model...", file=sys.stderr)
    app, engine, defaults = load_app(server_args, engine_args, template)
    url = listening.url(server_args, sockets[0])
    print(process.welcome(name, engine, url, server_args, bool(keys), defaults), file=sys.stderr)
    try:
        asyncio.run(process.serve(app, server_args, sockets))
    finally:
        listening.remove(server_args)


def model_folder(args: EngineArgs) -> Path:
    """Where the model is; a GGUF file is converted, where that hasn't been done before.

    Raises:
        ModelError: it is not there, or cannot be served.
    """
    from common.weights import resolve

    is_dummy = args.load_format == "dummy"
    return resolve(shape_folder(args.model) if is_dummy else args.model, with_weights=not is_dummy)


def load_app(
    server_args: ServerArgs, engine_args: EngineArgs, template: str | None
) -> "tuple[FastAPI, LLMEngine, dict[str, Any]]":
    """Load the model: the application around it, its engine, and the model's own sampling.

    Args:
        server_args: the server's flags.
        engine_args: the engine's.
        template: a chat template in place of the model's.
    """
    with cli.loading():
        import torch

        from ..engine import LLMEngine
        from .defaults import sampling_defaults

        defaults = sampling_defaults(server_args.generation_config, model_folder(engine_args))
        # On a CPU every thread that computes gets helpers of its own (OpenMP's), which wait for work by spinning. Two
        # sets of them on the same cores make each step a fifth slower: this thread, which only loads, gets none.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        engine = LLMEngine(**dataclasses.asdict(engine_args))
    if template is not None:
        engine.tokenizer.use_chat_template(template)
    app = build_app(engine, server_args, engine_args.model, defaults)
    app.state.engine.call_soon(lambda: torch.set_num_threads(num_threads))
    # What is here by now stays to the end. Left to the garbage collector, it is looked through again and again, for a
    # third of a second each time: whenever a request makes some ten thousand objects.
    gc.collect()
    gc.freeze()
    return app, engine, defaults


def build_app(
    engine: "LLMEngine", args: ServerArgs, model: str | None = None, defaults: dict[str, Any] | None = None
) -> "FastAPI":
    """The application around an engine, which it drives from now on.

    Args:
        engine: as it comes from its constructor.
        args: the server's flags.
        model: what `--model` said, for the model's name; `None` is the default model.
        defaults: fields of `SamplingParams` for requests that leave them out.
    """
    from fastapi import FastAPI, Request
    from fastapi.responses import PlainTextResponse, Response
    from sse_starlette.sse import AppStatus
    from starlette.middleware.cors import CORSMiddleware

    from common.weights import DEFAULT_MODEL

    from ..async_engine import AsyncEngine
    from . import bodies, errors, middleware, visualizer
    from .metrics import Metrics
    from .protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
    from .responses import (
        ChatCompletion,
        Completion,
        ErrorBody,
        Health,
        ModelCard,
        ModelList,
        Success,
        Text,
        Tokens,
        Version,
        respond,
    )
    from .serving import Serving

    names = model_names(args, model)
    max_body_bytes = args.max_body_bytes or bodies.default_limit(engine.tokenizer, engine.max_model_len)
    metrics = Metrics(engine, names[0])
    async_engine = AsyncEngine(engine, max_queued_requests=args.max_queued_requests, observer=metrics)
    root = (model or DEFAULT_MODEL).encode("utf-8", "backslashreplace").decode()  # a path may be no UTF-8, JSON is
    serving = Serving(async_engine, names, root, defaults or {})
    # sse-starlette would cut all streams as soon as a signal comes; here they may end.
    AppStatus.disable_automatic_graceful_drain()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async_engine.start()
        yield
        await async_engine.shutdown(0)
        # FastAPI's objects refer to each other, so that they stay until the garbage collector comes. The engine, with
        # its gigabytes, goes at once.
        del async_engine.engine

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
        description=f"OpenAI's API for {names[0]}. Bodies may have up to {max_body_bytes} bytes.",
    )
    app.router.route_class = bodies.BodyRoute
    app.state.engine, app.state.max_body_bytes = async_engine, max_body_bytes
    errors.install(app)
    # The last one added is the outermost: the log sees everything, a preflight needs no key.
    app.add_middleware(middleware.Faults)
    app.add_middleware(middleware.BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(middleware.ApiKey, keys=api_keys(args))
    app.add_middleware(middleware.SameOrigin, allowed=args.origins or [])
    app.add_middleware(middleware.RequestLine, root_path=args.root_path)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.origins or [],
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,  # a page of an allowed origin may ask a server on its user's own machine
    )
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
    async def model_card(name: str, request: Request) -> Response:
        """One of them."""
        if request.scope["path"].endswith("/v1/models/"):  # what a client that joins paths may ask for; not `%0A`
            return await models()
        return respond(serving.model(name))

    @app.post("/tokenize", responses={200: {"model": Tokens}, **error(400, 401, 404, 413)})
    async def tokenize(body: TokenizeRequest, _: Request) -> Response:
        """Token ids of a text, or of a conversation with its template."""
        return respond(await serving.tokenize(body))

    @app.post("/detokenize", responses={200: {"model": Text}, **error(400, 401, 404, 413)})
    async def detokenize(body: DetokenizeRequest, _: Request) -> Response:
        """The text of token ids."""
        return respond(await serving.detokenize(body))

    if args.enable_tokenizer_info_endpoint:

        @app.get("/tokenizer_info", responses={200: {"model": dict[str, Any]}, **error(401)})
        async def tokenizer_info() -> Response:
            """The tokenizer's configuration and chat template."""
            return respond(serving.tokenizer.info())

    @app.post("/reset_prefix_cache", responses={200: {"model": Success}, **error(401, 503)})
    async def reset_prefix_cache() -> Response:
        """Let no later request find what has been computed so far."""
        await async_engine.call(async_engine.engine.reset_prefix_cache)
        return respond(Success(success=True))

    @app.post("/ping", responses={200: {"model": Health}, **error(503)})
    @app.get("/ping", responses={200: {"model": Health}, **error(503)})
    @app.get("/health", responses={200: {"model": Health}, **error(503)})
    async def health() -> Response:
        """Whether requests are taken: 503 once the engine is dead, and while the server shuts down."""
        async_engine.check_serving()
        return respond(Health(status="ok"))

    visualizer.install(app, async_engine, args, {"milestone": ".".join(__name__.split("_")[:2]), "model": names[0]})

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


def model_names(args: ServerArgs, model: str | None) -> list[str]:
    """What the model is called in the API: as asked, else as `--model` says."""
    from common.weights import DEFAULT_MODEL

    name = model or DEFAULT_MODEL
    if not args.served_model_name and not name.isprintable():
        raise ModelError(f"The model's path is not printable text: {shown(name)}. Name it with --served-model-name.")
    return args.served_model_name or [name]


def api_keys(args: ServerArgs) -> list[str]:
    """The keys that clients may send: of the flags, else of the environment; none lets everybody in."""
    variable = os.environ.get(API_KEY_VARIABLE, "").strip()  # a secret read from a file ends in a newline
    if args.api_key or not variable:
        return args.api_key or []
    check_api_key(API_KEY_VARIABLE, variable)
    return [variable]


def _version() -> str:
    return importlib.metadata.version("mini-vllm")
