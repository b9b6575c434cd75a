"""The harness: `python -m v0_5_bench COMMAND`.

    serve        loads one OpenAI-compatible server: this milestone's, which it starts, or any --base-url
    throughput   one `LLM.generate` of many prompts, of a milestone named by --engine
    latency      one prompt at a time, streamed, of a milestone named by --engine
    compare      the same prompts through several engines, in turns: ours, vLLM, transformers, llama.cpp
    attribute    where the time of this milestone goes: parts of a step, experiments, the machine's limits
    crosscheck   this load generator beside `vllm bench serve`, on a server whose timing is known and on ours
    report       tables and plots from the JSON files of these

Every run ends as tables on the terminal and, with `--out`, as JSON with its recipe and all samples.
"""

import argparse
import signal
import sys

from common import cli

from . import MILESTONE
from .compare import compare, crosscheck, offline
from .explain import attribute
from .load import online
from .report import report

COMMANDS = {
    "serve": (online, "load a server over HTTP"),
    "throughput": (offline, "many prompts in one LLM.generate"),
    "latency": (offline, "one prompt at a time"),
    "compare": (compare, "several engines in turns"),
    "attribute": (attribute, "where the time goes"),
    "crosscheck": (crosscheck, "this load generator beside vLLM's"),
    "report": (report, "tables and plots from results"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MILESTONE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        raw = argparse.RawDescriptionHelpFormatter
        module.add_arguments(commands.add_parser(name, help=text, description=module.__doc__, formatter_class=raw))
    args = parser.parse_args(argv)
    # Engines that are stopped would outlive a harness that is ended: let it leave as after Ctrl-C, and take them along.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return cli.run(lambda: COMMANDS[args.command][0].run(args))
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
