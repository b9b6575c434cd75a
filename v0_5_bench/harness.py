"""The harness: `python -m v0_5_bench serve | throughput | latency`.

    serve        loads one OpenAI-compatible server: this milestone's, which it starts, or any --base-url
    throughput   one `LLM.generate` of many prompts, of a milestone named by --engine
    latency      one prompt at a time, streamed, of a milestone named by --engine

Every run ends as tables on the terminal and, with `--out`, as JSON with its recipe and all samples.
"""

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import cli
from common.errors import ModelError
from common.recipe import recipe
from common.units import check_count

from . import workloads
from .workloads import BenchRequest

WORKLOADS = ("random", "chat", "long-prompt", "file")
LONG_PROMPT = (4000, 4000)


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="load a server over HTTP")
    serve.add_argument("--base-url", help="such as http://127.0.0.1:8000 (default: start this milestone's server)")
    serve.add_argument("--model", help="its name in the API (default: the first one that the server lists)")
    serve.add_argument("--api-key")
    serve.add_argument("--concurrency", type=int, help="requests under way at any time (default: all at once)")
    serve.add_argument("--request-rate", type=float, help="requests a second, at random moments, instead")
    _add_workload(serve)
    for name, text in (("throughput", "many prompts in one LLM.generate"), ("latency", "one prompt at a time")):
        offline = commands.add_parser(name, help=text)
        offline.add_argument("--engine", default=__package__, help="package of a milestone (default: this one)")
        offline.add_argument("--model", help="what its --model takes (default: the default model)")
        _add_workload(offline)
    args = parser.parse_args(argv)
    return cli.run(lambda: _run(args))


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=WORKLOADS, default="random")
    group.add_argument("--input-len", default="30", help="tokens of a random prompt, or a range: 10-50 (default: 30)")
    group.add_argument("--output-len", default="64", help="tokens to ask for, or a range (default: 64)")
    group.add_argument("--num-requests", type=int, default=32)
    group.add_argument("--file", type=Path, help="JSON lines with prompt or messages, for --workload file")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--warmup", type=int, default=2, help="requests before, which are not measured (default: 2)")
    group.add_argument("--stop-at-eos", action="store_true", help="let answers end where the model ends them")
    group.add_argument("--out", type=Path, help="write a JSON file with the recipe and all samples")


def _run(args: argparse.Namespace) -> None:
    check_count("num_requests", args.num_requests)
    if args.warmup < 0:
        raise ModelError(f"warmup must be at least 0, got {args.warmup}.")
    if importlib.util.find_spec("aiohttp") is None:
        raise ModelError("The harness needs aiohttp: run `pip install -e '.[bench]'`.")
    requests, warmup = _requests(args, args.num_requests, args.seed), _requests(args, args.warmup, args.seed + 1)
    run = {"serve": _serve, "throughput": _offline, "latency": _offline}[args.command]
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "api_key")}
    made = recipe(**{name: str(value) if isinstance(value, Path) else value for name, value in settings.items()})
    results = run(args, requests, warmup)
    if args.out is not None:
        args.out.write_text(json.dumps({"recipe": made, **results}, indent=1) + "\n")
        print(f"written to {args.out}", file=sys.stderr)


def _requests(args: argparse.Namespace, num: int, seed: int) -> list[BenchRequest]:
    output_len = workloads.parse_range(args.output_len, "output_len")
    if args.workload == "file":
        if args.file is None:
            raise ModelError("The workload file needs --file.")
        return workloads.from_file(args.file, output_len[1])[:num]
    if args.workload == "chat":
        return workloads.chats(num, output_len, seed)
    input_len = LONG_PROMPT if args.workload == "long-prompt" else workloads.parse_range(args.input_len, "input_len")
    return workloads.random_prompts(num, input_len, output_len, seed)


def _serve(args: argparse.Namespace, requests: list[BenchRequest], warmup: list[BenchRequest]) -> dict[str, Any]:
    from rich.console import Console
    from tqdm import tqdm

    from .client import Load, run_load
    from .summary import summarise, tables

    if args.request_rate is not None and (args.concurrency is not None or args.request_rate <= 0):
        raise ModelError("request_rate must be above 0, and excludes concurrency.")
    if args.concurrency is not None:
        check_count("concurrency", args.concurrency)
    with _server(args.base_url) as base_url:
        load = Load(
            base_url=base_url,
            model=args.model or _first_model(base_url, args.api_key),
            concurrency=args.concurrency,
            request_rate=args.request_rate,
            seed=args.seed,
            ignore_eos=not args.stop_at_eos,
            api_key=args.api_key,
        )
        asyncio.run(run_load(dataclasses.replace(load, request_rate=None), warmup))
        with tqdm(total=len(requests), desc="Requests", disable=None, delay=1.0) as bar:
            results = asyncio.run(run_load(load, requests, lambda _: bar.update()))
    summary = summarise(results)
    title = f"{load.model} at {base_url}, {args.workload}"
    for table in tables(summary, title):
        Console().print(table)
    for error, count in summary["errors"].items():
        print(f"{count} x {error}", file=sys.stderr)
    return {"summary": summary, "samples": [dataclasses.asdict(result) for result in results]}


def _first_model(base_url: str, api_key: str | None) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{base_url.rstrip('/')}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(json.load(response)["data"][0]["id"])
    except (urllib.error.URLError, OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{base_url} does not list its models ({error}): check --base-url, or give --model.") from None


@contextmanager
def _server(base_url: str | None) -> Iterator[str]:
    """The address of the server to load; without one, this milestone's is started, and ended afterwards."""
    if base_url is not None:
        yield base_url
        return
    command = [sys.executable, "-m", f"{__package__}.server", "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = []
            for line in server.stderr:
                said.append(line)
                if found := re.match(r"Listening on (http://\S+)", line):
                    yield found[1]
                    return
            raise ModelError(f"The server did not start: {''.join(said).strip()}")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)


# In a process of its own: the engines are other packages, which this one may not import.
OFFLINE = """
import importlib, json, sys, time
command, name, model, requests, warmup, ignore_eos = json.loads(sys.stdin.readline())
package = importlib.import_module(name)
llm = package.LLM(model)

def prompt(request):
    return request["prompt"] if request["messages"] is None else llm.tokenizer.chat_token_ids(request["messages"])

def params(request):
    return package.SamplingParams(temperature=0.0, max_tokens=request["num_output_tokens"], ignore_eos=ignore_eos)

def throughput(requests):
    prompts, all_params = [prompt(r) for r in requests], [params(r) for r in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, all_params, use_tqdm=False)
    end = time.perf_counter()
    return [
        {"start": 0.0, "end": end - start, "chunk_times": [o.metrics.first_token_time - start],
         "num_prompt_tokens": len(o.prompt_token_ids), "num_output_tokens": len(o.outputs[0].token_ids)}
        for o in outputs
    ]

def latency(requests):
    results, begin = [], time.perf_counter()
    for request in requests:
        result = {"start": time.perf_counter() - begin, "chunk_times": [], "num_output_tokens": 0}
        for output in llm.stream(prompt(request), params(request)):
            result["chunk_times"].append(time.perf_counter() - begin)
            result["num_output_tokens"] += len(output.outputs[0].token_ids)
        result["end"] = time.perf_counter() - begin
        result["num_prompt_tokens"] = len(output.prompt_token_ids)
        results.append(result)
    return results

run = {"throughput": throughput, "latency": latency}[command]
if warmup:
    run(warmup)
print("RESULT " + json.dumps(run(requests)))
"""


def _offline(args: argparse.Namespace, requests: list[BenchRequest], warmup: list[BenchRequest]) -> dict[str, Any]:
    from rich.console import Console

    from .client import RequestResult
    from .summary import summarise, tables

    job = [
        args.command,
        args.engine,
        args.model,
        [dataclasses.asdict(request) for request in requests],
        [dataclasses.asdict(request) for request in warmup],
        not args.stop_at_eos,
    ]
    command = [sys.executable, "-c", OFFLINE]
    done = subprocess.run(command, input=json.dumps(job) + "\n", stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise ModelError(f"{args.engine} ended with exit code {done.returncode}: what it said is above.")
    entries = json.loads(lines[0].removeprefix("RESULT "))
    results = [RequestResult(planned=entry["start"], **entry) for entry in entries]
    summary = summarise(results)
    if args.command == "throughput":  # all tokens come at the end: what a token took alone is not known
        summary["tpot_ms"] = summary["itl_ms"] = None
    for table in tables(summary, f"{args.engine}, {args.command}, {args.workload}"):
        Console().print(table)
    return {"summary": summary, "samples": [dataclasses.asdict(result) for result in results]}


if __name__ == "__main__":
    sys.exit(main())
