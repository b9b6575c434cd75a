"""`serve`: loads one OpenAI-compatible server, this milestone's own, or any that is named by its address."""

import argparse
import asyncio
import dataclasses
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from common.errors import ModelError
from common.units import check_count

from .. import MILESTONE
from . import runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve`."""
    parser.add_argument("--base-url", help="such as http://127.0.0.1:8000 (default: start this milestone's server)")
    parser.add_argument(
        "--model", help="its name in the API (default: the first one it lists); of ours, what its --model takes"
    )
    parser.add_argument("--api-key")
    parser.add_argument("--concurrency", type=int, help="requests under way at any time (default: all at once)")
    parser.add_argument("--request-rate", type=float, help="requests a second, at random moments, instead")
    runs.add_workload(parser)


def run(args: argparse.Namespace) -> None:
    """Load the server, and report."""
    runs.need_aiohttp()
    from tqdm import tqdm

    from .client import Load, run_load
    from .summary import summarise

    if args.request_rate is not None and args.concurrency is not None:
        raise ModelError("request_rate and concurrency exclude each other: give one of them.")
    if args.request_rate is not None and args.request_rate <= 0:
        raise ModelError(f"request_rate must be above 0, got {args.request_rate:g}.")
    if args.concurrency is not None:
        check_count("concurrency", args.concurrency)
    requests, warmup = runs.requests_of(args)
    made, profile = runs.recipe_of(args), None
    named = args.model if args.base_url is not None else None
    with server(args.base_url, args.model) as base_url:
        load = Load(
            base_url=base_url,
            model=named or first_model(base_url, args.api_key),
            concurrency=args.concurrency,
            request_rate=args.request_rate,
            seed=args.seed,
            ignore_eos=not args.stop_at_eos,
            api_key=args.api_key,
        )
        asyncio.run(run_load(dataclasses.replace(load, request_rate=None), warmup))
        if args.profile:
            start_profile(base_url, args.api_key)
        with tqdm(total=len(requests), desc="Requests", disable=None, delay=1.0) as bar:
            results = asyncio.run(run_load(load, requests, lambda _: bar.update()))
        if args.profile:
            profile = stop_profile(base_url, args.api_key)
    title = f"{load.model} at {base_url}, {args.workload}"
    runs.finish(args, made, summarise(results), results, title, profile)


def start_profile(base_url: str, api_key: str | None) -> None:
    """Have the server take the time of its steps; raises `ModelError` where it cannot."""
    _ask(f"{base_url}/start_profile", api_key, "profile: is it this milestone's server, started with --profile?", b"")


def stop_profile(base_url: str, api_key: str | None) -> dict[str, Any]:
    """The parts of the steps since then."""
    profile: dict[str, Any] = _ask(f"{base_url}/stop_profile", api_key, "end its profile", b"")
    return profile


def first_model(base_url: str, api_key: str | None) -> str:
    """The name of the first model that a server lists; raises `ModelError` where it lists none."""
    models = _ask(f"{base_url.rstrip('/')}/v1/models", api_key, "list its models: check --base-url, or give --model")
    try:
        return str(models["data"][0]["id"])
    except (LookupError, TypeError):
        raise ModelError(f"{base_url} lists no models: check --base-url, or give --model.") from None


def _ask(url: str, api_key: str | None, what: str, body: bytes | None = None) -> Any:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ModelError(f"{url} does not {what} ({error}).") from None


@contextmanager
def server(base_url: str | None = None, model: str | None = None) -> Iterator[str]:
    """The address of the server to load; without one, this milestone's is started, and ended afterwards."""
    if base_url is not None:
        yield base_url.rstrip("/")
        return
    flags = ["--port", "0", "--log-level", "warning", "--profile"] + ([] if model is None else ["--model", model])
    with started(f"{MILESTONE}.server", *flags) as address:
        yield address


@contextmanager
def started(module: str, *flags: str) -> Iterator[str]:
    """The address of a server, a module of this project, from where it says that it listens to the end of the block.

    Raises:
        ModelError: it ended before; the message has what it said.
    """
    command = [sys.executable, "-m", module, *flags]
    # Into a file: a pipe that nobody reads would stop a server that has much to say.
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stderr=said) as process:
        try:
            yield _listening(process, said)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _listening(process: "subprocess.Popen[bytes]", said: TextIO) -> str:
    while True:
        has_ended = process.poll() is not None
        said.seek(0)
        text = said.read()
        if found := re.search(r"Listening on (http://\S+)", text):
            return found[1]
        if has_ended:
            raise ModelError(f"The server did not start: {text.strip()}")
        time.sleep(0.05)
