"""The command line: `python -m v0_7_speculative.generate "Why is the sky blue?"`.

Answers go to standard output, a single one as it is written; everything else goes to standard error: a pipe gets the
text alone.
"""

import argparse
import contextlib
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, TextIO

from common import cli
from common.outputs import CompletionOutput, RequestOutput
from common.prompts import Prompt
from common.sampling_params import SamplingParams

from .engine_args import EngineArgs
from .trace import tracer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .llm import LLM


def main(argv: list[str] | None = None) -> int:
    """Answer the prompts of `argv`, of a file or of standard input, together; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.generate",
        description="Answer prompts with a Llama, many requests at once, on a KV cache of blocks.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to answer; without one, standard input")
    parser.add_argument("--prompts", dest="file", metavar="FILE", help="prompts from a file, one a line; - is stdin")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--trace", action="store_true", help="print a line for each step")
    parser.add_argument("--trace-file", metavar="FILE", help="write each step to this file, as JSON lines")
    cli.add_arguments(parser, EngineArgs, title="engine")
    cli.add_arguments(parser, SamplingParams, title="sampling", temperature=0.0, max_tokens=256)
    args = parser.parse_args(argv)
    return cli.run(lambda: _generate(args))


def _generate(args: argparse.Namespace) -> None:
    # Before the model is loaded, so that a wrong flag is told at once.
    params = cli.from_arguments(SamplingParams, args)
    engine_args = cli.from_arguments(EngineArgs, args)
    prompts = args.prompts + (cli.read_lines(args.file) if args.file is not None else [])
    prompts = prompts or [cli.read_prompt()]

    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        jsonl = stack.enter_context(open(args.trace_file, "w")) if args.trace_file is not None else None
        _answer(args, prompts, params, engine_args, console, jsonl)


def _answer(
    args: argparse.Namespace,
    prompts: list[str],
    params: SamplingParams,
    engine_args: EngineArgs,
    console: "Console",
    jsonl: TextIO | None,
) -> None:
    console.print("Loading the model...", style="dim")  # no spinner: it would fight with the loaders' progress bars
    with cli.loading():
        from .llm import LLM
        from .loader import explain

        llm = LLM(**dataclasses.asdict(engine_args))
    longest = min(llm.max_model_len, llm.engine.scheduler.max_request_len)
    dtype = str(llm.engine.model.dtype).removeprefix("torch.")
    console.print(f"{dtype} on {llm.engine.model.device}, up to {longest} tokens a request", style="dim")
    console.print(llm.engine.pool.explanation, style="dim")
    inputs = [
        prompt if args.raw else llm.tokenizer.chat_token_ids([{"role": "user", "content": prompt}])
        for prompt in prompts
    ]
    if args.trace:
        console.print(explain(llm.engine.model), style="dim")
    if args.trace or jsonl:
        llm.engine.on_step = tracer(llm.engine.scheduler, sys.stderr if args.trace else None, jsonl)
    start = time.perf_counter()
    if len(prompts) == 1:
        outputs = [_print_stream(llm, inputs[0], params)]
    else:
        outputs = llm.generate(inputs, params, use_tqdm=not args.trace)  # which share a terminal
        for prompt, output in zip(prompts, outputs, strict=True):
            console.print(f"> {prompt}", style="bold", markup=False)
            _print_whole(output)
    console.print(_table(outputs, time.perf_counter() - start))


def _print_stream(llm: "LLM", prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Print one choice as it is written, several when they are done; returns the whole answer."""
    if params.n > 1:
        [output] = llm.generate([prompt], params)
        _print_whole(output)
        return output
    whole = CompletionOutput(0)
    for output in llm.stream(prompt, params):
        print(output.outputs[0].text, end="", flush=True)
        whole.extend(output.outputs[0])
    print(flush=True)
    output.outputs = [whole]
    return output


def _print_whole(output: RequestOutput) -> None:
    for choice in output.outputs:
        if choice.index:
            print(f"--- choice {choice.index} ---")
        print(choice.text, flush=True)


def _table(outputs: list[RequestOutput], seconds: float) -> "Table":
    """One row for all requests, within 80 columns: tokens in and out, mean time to first token, overall rate."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("requests", "prompts", "output", "mean TTFT", "seconds", "output rate", "preemptions"):
        table.add_column(title, justify="right")
    num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    metrics = [output.metrics for output in outputs]
    ttft = sum(m.first_token_time - m.arrival_time for m in metrics) / len(metrics)
    table.add_row(
        str(len(outputs)),
        f"{sum(len(output.prompt_token_ids) for output in outputs)} tokens",
        f"{num_tokens} tokens",
        f"{ttft:.2f} s",
        f"{seconds:.1f}",
        f"{num_tokens / seconds:,.1f} tok/s",
        str(sum(m.num_preemptions for m in metrics)),
    )
    return table


if __name__ == "__main__":
    sys.exit(main())
