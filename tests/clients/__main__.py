"""`python -m tests.clients`: start the server, try every client, print the table, write the results."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.measuring.recipe import recipe
from common.weights import resolve
from v0_5_bench.harness.load import online

from . import table
from .clients import CLIENTS, Client
from .environments import CannotInstall, command, environment, version

MILESTONE = "v0_4_http"
QUESTION = "Why is the sky blue?"
PROMPT = "The capital of France is"
MAX_TOKENS = 24


def main() -> int:
    """Returns 1 if a client did not do what its scenario expects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venvs", type=Path, help="the folder of the clients' environments: made, and kept")
    parser.add_argument(
        "--vllm-venv", type=Path, help="an environment with the real vLLM, whose `bench serve` is tried"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[client.name for client in CLIENTS],
        help="only these (the pages' results stay as they are)",
    )
    parser.add_argument("--base-url", help=f"of a running server with the default model (default: start {MILESTONE})")
    parser.add_argument("--out", type=Path, default=table.RESULTS, help="default: the file that the pages' table is of")
    parser.add_argument("--markdown", action="store_true", help="only write the table of --out into the server's pages")
    args = parser.parse_args()
    if args.markdown:
        table.write_pages(json.loads(args.out.read_text()))
        return 0
    if args.venvs is None:
        parser.error("--venvs is needed: a folder for the clients' environments")
    os.environ |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    clients = [client for client in CLIENTS if args.only is None or client.name in args.only]
    made = recipe(model=resolve(None).name, max_tokens=MAX_TOKENS)
    environments = installed(clients, args.venvs, args.vllm_venv)
    with server(args.base_url) as base_url:
        given = reference(base_url)
        found = [tried(client, environments[client], given) for client in clients]
    results = {"recipe": made, "clients": found}
    table.show(results)
    if args.only is None or args.out != table.RESULTS:
        args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return int(any(entry["outcome"] == "fails" for client in found for entry in client["tries"]))


def installed(clients: list[Client], venvs: Path, vllm_venv: Path | None) -> dict[Client, Path | str]:
    """Each client's environment, or why there is none."""
    folders: dict[Client, Path | str] = {}
    for client in clients:
        if not client.requirements:
            has_vllm = vllm_venv is not None and (vllm_venv / "bin" / "vllm").exists()
            folders[client] = vllm_venv.absolute() if has_vllm else "--vllm-venv names no environment with vLLM"
            continue
        try:
            folders[client] = environment(client, venvs)
        except CannotInstall as error:
            folders[client] = str(error)
    return folders


@contextlib.contextmanager
def server(base_url: str | None) -> Iterator[str]:
    """The address of the server."""
    if base_url is not None:
        yield base_url.rstrip("/")
        return
    with online.started(MILESTONE, "--port", "0", "--log-level", "warning") as address:
        yield address


def reference(base_url: str) -> dict[str, Any]:
    """What every scenario gets: the server, and the greedy answers that it gives to plain HTTP."""
    model = online.first_model(base_url, None)
    body = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS}
    chat = post(f"{base_url}/v1/chat/completions", body | {"messages": [{"role": "user", "content": QUESTION}]})
    completion = post(f"{base_url}/v1/completions", body | {"prompt": PROMPT})
    return {
        "url": base_url,
        "model": model,
        "folder": str(resolve(None)),
        "max_tokens": MAX_TOKENS,
        "question": QUESTION,
        "chat_text": chat["choices"][0]["message"]["content"],
        "chat_usage": [chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]],
        "prompt": PROMPT,
        "completion_text": completion["choices"][0]["text"],
        "completion_usage": [completion["usage"]["prompt_tokens"], completion["usage"]["completion_tokens"]],
    }


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a body."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def tried(client: Client, folder: Path | str, given: dict[str, Any]) -> dict[str, Any]:
    """One client's part of the results."""
    found: dict[str, Any] = {"client": client.title, "version": None}
    if isinstance(folder, str):
        return found | {"tries": [{"tried": "", "outcome": "not installed", "said": folder}]}
    print(f"trying {client.title} ...", file=sys.stderr, flush=True)
    found["version"] = version(client, folder)
    # No client calls anybody but the server: neither the hub, nor whoever it tells how it is used.
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1", "CLIENT_ENVIRONMENT": str(folder)}
    try:
        with tempfile.TemporaryDirectory() as work:
            run = [*command(client, folder), json.dumps(given)]
            code, said, errors = output(run, client.seconds, cwd=work, env=os.environ | quiet)
    except subprocess.TimeoutExpired:
        return found | {"tries": [{"tried": "", "outcome": "fails", "said": f"no end within {client.seconds} s"}]}
    sys.stderr.write(errors if "fails" in said or code else "")
    if code:
        last = (errors.strip().splitlines() or ["no reason given"])[-1]
        return found | {"tries": [{"tried": "", "outcome": "fails", "said": last}]}
    return found | {"tries": json.loads(said.strip().splitlines()[-1])}


def output(run: list[str], seconds: int, **options: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; a load generator's own processes end with it, in time or not."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(run, start_new_session=True, **pipes, **options) as process:
        try:
            said, errors = process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said, errors


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModelError as error:
        sys.exit(f"error: {error}")
