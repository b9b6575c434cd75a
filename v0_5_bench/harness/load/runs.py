"""What the commands that run one load have in common: the flags of a workload, and how a run ends. Torch-free."""

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ModelError
from common.measuring.recipe import recipe
from common.units import check_count

from . import workloads
from .workloads import BenchRequest

if TYPE_CHECKING:
    from rich.table import Table

    from .client import RequestResult

WORKLOADS = ("random", "chat", "long-prompt", "shared-prefix", "file")
LONG_PROMPT = (4000, 4000)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is asked, and what becomes of the results."""
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=WORKLOADS, default="random")
    group.add_argument("--input-len", default="30", help="tokens of a random prompt, or a range: 10-50 (default: 30)")
    group.add_argument(
        "--prefix-len",
        type=int,
        default=1000,
        help="tokens that all prompts of --workload shared-prefix begin with, before --input-len others; --warmup 0 "
        "leaves a prefix cache cold (default: 1000)",
    )
    group.add_argument("--output-len", default="64", help="tokens to ask for, or a range (default: 64)")
    group.add_argument("--num-requests", type=int, default=32)
    group.add_argument("--file", type=Path, help="JSON lines with prompt or messages, for --workload file")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--warmup", type=int, default=2, help="requests before, which are not measured (default: 2)")
    group.add_argument("--stop-at-eos", action="store_true", help="let answers end where the model ends them")
    group.add_argument("--profile", action="store_true", help="also say where the time of a step went")
    group.add_argument("--out", type=Path, help="write a JSON file with the recipe and all samples")


def requests_of(args: argparse.Namespace) -> tuple[list[BenchRequest], list[BenchRequest]]:
    """The requests to measure, and those that warm up; raises `ModelError` or `RequestError` for wrong flags."""
    check_count("num_requests", args.num_requests)
    make_room(args.out)
    if args.warmup < 0:
        raise ModelError(f"warmup must be at least 0, got {args.warmup}.")
    return _requests(args, args.num_requests, args.seed), _requests(args, args.warmup, args.seed + 1)


def need_aiohttp() -> None:
    """Raise a `ModelError` where the load generator's HTTP library is not installed."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ModelError("The harness needs aiohttp: run `pip install -e '.[bench]'`.")


def recipe_of(args: argparse.Namespace) -> dict[str, Any]:
    """The recipe of a run, with all of its flags but for what is nobody's business."""
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "api_key")}
    return recipe(**{name: str(value) if isinstance(value, Path) else value for name, value in settings.items()})


def finish(
    args: argparse.Namespace,
    made: dict[str, Any],
    summary: dict[str, Any],
    results: "Sequence[RequestResult]",
    title: str,
    profile: dict[str, Any] | None = None,
) -> None:
    """Print a run's tables, and write its file."""
    from rich.console import Console

    from .summary import tables

    for table in tables(summary, title):
        Console().print(table)
    if profile is not None:
        Console().print(profile_table(profile))
    for error, count in summary["errors"].items():
        print(f"{count} x {error}", file=sys.stderr)
    if args.out is not None:
        entries: dict[str, Any] = {"recipe": made, "summary": summary}
        entries |= {} if profile is None else {"profile": profile}
        entries["samples"] = [dataclasses.asdict(result) for result in results]
        write(args.out, entries)
    if not summary["completed"]:
        raise ModelError(f"None of {summary['failed']} requests was answered: the reasons are above.")


def write(file: Path, results: dict[str, Any]) -> None:
    """A results file, and the word that it is there."""
    # Whole or not at all: what stood there before may be an hour's work.
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(file)
    print(f"written to {file}", file=sys.stderr)


def make_room(file: Path | None) -> None:
    """Raise a `ModelError` for a results file that could not be written, before anything is measured."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_name(f"{file.name}.partial").touch()
    except OSError as error:
        raise ModelError(f"{file} cannot be written: {error.strerror}.") from None
    file.with_name(f"{file.name}.partial").unlink()


def model_name(folder: Path) -> str:
    """What a model's folder is called; a converted one without the digest at its end."""
    return re.sub(r"-[0-9a-f]{12}$", "", folder.name)


def profile_table(profile: dict[str, Any]) -> "Table":
    """The parts of a step, largest first."""
    from rich import box
    from rich.table import Table

    total = profile["ms_per_step"]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(f"{profile['num_steps']} steps of {profile['outputs_per_step']:.1f} outputs")
    shown.add_column("ms a step", justify="right")
    shown.add_column("share", justify="right")
    for part, value in sorted(profile["parts_ms"].items(), key=lambda item: -item[1]):
        shown.add_row(part, f"{value:.2f}", f"{value / total:.1%}" if total else "–")
    shown.add_row("together", f"{total:.2f}", "")
    if "event_loop_cpu_ms" in profile:
        shown.add_row("beside it: the event loop's processor time", f"{profile['event_loop_cpu_ms']:.2f}", "")
    return shown


def _requests(args: argparse.Namespace, num: int, seed: int) -> list[BenchRequest]:
    output_len = workloads.parse_range(args.output_len, "output_len")
    if args.workload == "file":
        if args.file is None:
            raise ModelError("The workload file needs --file.")
        return workloads.from_file(args.file, output_len[1])[:num]
    if args.workload == "chat":
        return workloads.chats(num, output_len, seed)
    input_len = LONG_PROMPT if args.workload == "long-prompt" else workloads.parse_range(args.input_len, "input_len")
    if args.workload == "shared-prefix":
        check_count("prefix_len", args.prefix_len)
        # The requests that warm up have the same prefix, whatever their seed.
        return workloads.shared_prefix(num, args.prefix_len, input_len, output_len, seed, prefix_seed=args.seed)
    return workloads.random_prompts(num, input_len, output_len, seed)
