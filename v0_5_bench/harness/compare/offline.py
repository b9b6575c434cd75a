"""`throughput` and `latency`: a milestone's `LLM` without HTTP, in a process of its own."""

import argparse

from common.errors import ModelError

from .. import MILESTONE, PROFILER
from ..load import runs
from ..load.workloads import BenchRequest
from . import peers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of both."""
    parser.add_argument("--engine", default=MILESTONE, help="package of a milestone (default: this one)")
    parser.add_argument("--model", help="what its --model takes (default: the default model)")
    parser.add_argument("--dtype", help="what its --dtype takes (default: auto)")
    parser.add_argument("--load-format", help="what its --load-format takes, where it has one: dummy is random weights")
    parser.add_argument(
        "--trace-file", help="needs --profile: write 20 steps under PyTorch's profiler, for https://ui.perfetto.dev"
    )
    runs.add_workload(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, and report."""
    runs.need_aiohttp()
    from ..load.client import RequestResult
    from ..load.summary import summarise

    if args.trace_file is not None and not args.profile:
        raise ModelError("trace_file needs --profile.")
    requests, warmup = runs.requests_of(args)
    made = runs.recipe_of(args)
    flags = {name: getattr(args, name) for name in ("model", "dtype", "load_format")}
    start = peers.ours(args.engine, **{name: value for name, value in flags.items() if value is not None})
    with peers.Engine(args.engine, start) as engine:

        def job(requests: list[BenchRequest]) -> dict[str, object]:
            return {
                "do": "generate" if args.command == "throughput" else "stream",
                "prompts": [r.prompt if r.messages is None else r.messages for r in requests],
                "output_lens": [r.num_output_tokens for r in requests],
                "ignore_eos": not args.stop_at_eos,
            }

        if warmup:
            engine.ask(job(warmup))
        if args.profile:
            question = {"do": "profile", "job": job(requests), "profiler": PROFILER, "trace_file": args.trace_file}
        else:
            question = job(requests)
        answer = engine.ask(question)
    if args.command == "throughput":
        entries = zip(answer["ttfts"], answer["ends"], answer["num_prompt_tokens"], answer["token_ids"], strict=True)
        results = [
            RequestResult(
                end=end,
                chunk_times=[ttft],
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=len(token_ids),
            )
            for ttft, end, num_prompt_tokens, token_ids in entries
        ]
    else:
        results = [RequestResult(planned=entry["start"], **entry) for entry in answer["results"]]
    summary = summarise(results)
    summary["client_delay_ms"] = None  # there is no client
    if args.command == "throughput":  # all tokens come at the end: what a token took alone is not known
        summary["tpot_ms"] = summary["itl_ms"] = None
    title = f"{args.engine}, {args.command}, {args.workload}"
    runs.finish(args, made, summary, results, title, answer.get("profile"))
