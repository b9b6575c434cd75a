"""The command line: `python -m v0_1_single_request "Why is the sky blue?"`.

The answer goes to standard output as it is written, everything else to standard error: a pipe gets the text alone.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from common import cli
from common.outputs import RequestOutput
from common.sampling_params import SamplingParams
from common.units import format_bytes

from .engine_args import EngineArgs

if TYPE_CHECKING:
    from rich.table import Table


def main(argv: list[str] | None = None) -> int:
    """Answer the prompts of `argv` (or of standard input) one after the other; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Answer prompts with a Llama, one request at a time, on a contiguous KV cache.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to answer; without one, standard input")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    cli.add_arguments(parser, EngineArgs, title="engine")
    cli.add_arguments(parser, SamplingParams, title="sampling", temperature=0.0, max_tokens=256)
    args = parser.parse_args(argv)
    return cli.run(lambda: _generate(args))


def _generate(args: argparse.Namespace) -> None:
    # Before the model is loaded, so that a wrong flag is told at once.
    params = cli.from_arguments(SamplingParams, args)
    engine_args = cli.from_arguments(EngineArgs, args)
    prompts = args.prompts or [cli.read_prompt()]

    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print("Loading the model...", style="dim")  # no spinner: it would fight with the loaders' progress bars
    with cli.loading():
        from .llm import LLM

        llm = LLM(**dataclasses.asdict(engine_args))
    dtype = str(llm.model.dtype).removeprefix("torch.")
    console.print(f"{dtype} on {llm.model.device}, up to {llm.max_model_len} tokens a request", style="dim")
    rows = []
    for prompt in prompts:
        if len(prompts) > 1:
            console.print(f"> {prompt}", style="bold", markup=False)
        inputs = prompt if args.raw else llm.tokenizer.chat_token_ids([{"role": "user", "content": prompt}])
        rows.append(_print_stream(llm.stream(inputs, params)))
    console.print(_table(rows))


def _print_stream(stream: Iterator[RequestOutput]) -> list[str]:
    """Print the deltas as they come; returns the request's row of the closing table."""
    num_tokens, choice = 0, 0
    reasons = []
    for output in stream:
        delta = output.outputs[0]
        if delta.index != choice:
            choice = delta.index
            print(f"\n--- choice {choice} ---")
        print(delta.text, end="", flush=True)
        num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            reasons.append(delta.finish_reason)
    print(flush=True)
    metrics = output.metrics
    rate = (num_tokens - 1) / (metrics.finished_time - metrics.first_token_time) if num_tokens > 1 else 0.0
    return [
        str(len(output.prompt_token_ids)),
        str(num_tokens),
        ", ".join(dict.fromkeys(reasons)),
        f"{metrics.first_token_time - metrics.arrival_time:.2f} s",
        f"{rate:,.{1 if rate < 1000 else 0}f} tok/s" if rate else "-",
        format_bytes(metrics.kv_reserved_bytes),
        f"{format_bytes(metrics.kv_used_bytes)} ({metrics.kv_used_bytes / metrics.kv_reserved_bytes:.1%})",
    ]


def _table(rows: list[list[str]]) -> "Table":
    """One row a request: tokens of the prompt and the output, time to first token, decode rate, memory. 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("prompt", "output", "ended by", "TTFT", "decode", "KV reserved", "KV used"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    sys.exit(main())
