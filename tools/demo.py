"""The same questions through every milestone, and one table of what each made of them: `python -m tools.demo`.

Each milestone runs in a process of its own, the newest last. All must give the same greedy tokens; where one does not,
the exit code is 1. With `--out` the figures are written, too, with their recipe: README shows them.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from common.cli import read_lines, run
from common.errors import ModelError
from common.measuring.recipe import recipe, spread
from common.sampling_params import SamplingParams
from common.units import check_count
from tools.milestones import load_ledger

ROOT = Path(__file__).parent.parent
QUESTIONS = ROOT / "v0_3_scheduler" / "measurements" / "questions.txt"

# Runs in the process of one milestone. One short answer first: what is done once a process belongs to no question.
CHILD = """
import importlib, json, sys, time
name, model, questions, max_tokens = json.loads(sys.argv[1])
package = importlib.import_module(name)
llm = package.LLM(model)
prompts = [llm.tokenizer.chat_token_ids([{"role": "user", "content": question}]) for question in questions]
params = package.SamplingParams(temperature=0.0, max_tokens=max_tokens)
llm.generate(prompts[:1], package.SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
start = time.perf_counter()
outputs = llm.generate(prompts, params)
print("RESULT " + json.dumps({
    "seconds": time.perf_counter() - start,
    "waits": [output.metrics.first_token_time - start for output in outputs],
    "token_ids": [output.outputs[0].token_ids for output in outputs],
    "texts": [output.outputs[0].text for output in outputs],
}))
"""


def main(argv: list[str] | None = None) -> int:
    """Run the milestones of `argv`, or all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("milestones", nargs="*", metavar="MILESTONE", help="packages (default: all of the ledger)")
    parser.add_argument("--prompts", default=str(QUESTIONS), metavar="FILE", help="questions, one a line")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--model", help="what the milestones' --model takes (default: the default model)")
    parser.add_argument("--repeats", type=int, default=1, help="rounds, each with all milestones (default: 1)")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    args = parser.parse_args(argv)
    return run(lambda: _demo(args))


def _demo(args: argparse.Namespace) -> None:
    questions = read_lines(args.prompts)
    console = Console(highlight=False, stderr=True)
    known = {milestone.name: milestone for milestone in load_ledger(ROOT)}
    SamplingParams(max_tokens=args.max_tokens)  # which may refuse it
    check_count("repeats", args.repeats)
    names = [_full_name(name, known) for name in args.milestones] or list(known)
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(args.repeats):
        rounds.append({})
        for name in names:
            console.print(f"{known[name].title}: {len(questions)} questions, offline", style="dim")
            rounds[-1][name] = _run(name, args.model, questions, args.max_tokens)
    first = rounds[0][names[0]]
    for question, text in zip(questions, first["texts"], strict=True):
        console.print(f"> {question}", style="bold", markup=False)
        print(text, flush=True)
    figures = {name: [_figures(results[name]) for results in rounds] for name in names}
    console.print(_table(figures))
    wrong = [
        name for results in rounds for name, result in results.items() if result["token_ids"] != first["token_ids"]
    ]
    if wrong:
        raise ModelError(f"{', '.join(dict.fromkeys(wrong))} gave other tokens than {names[0]}: run its tests.")
    print(f"The same {sum(map(len, first['token_ids']))} tokens from each.", file=sys.stderr)
    if args.out is not None:
        made = recipe(dtype="float32", num_questions=len(questions), max_tokens=args.max_tokens, repeats=args.repeats)
        spreads = {
            name: {figure: spread([each[figure] for each in figures[name]]) for figure in figures[name][0]}
            for name in names
        }
        args.out.write_text(json.dumps({"recipe": made, "milestones": spreads}, indent=1) + "\n")


def _full_name(name: str, known: Iterable[str]) -> str:
    """`v0_3` is `v0_3_scheduler`."""
    full = next((milestone for milestone in known if milestone == name or milestone.startswith(f"{name}_")), None)
    if full is None:
        raise ModelError(f"There is no milestone {name}: choose from {', '.join(known)}.")
    return full


def _run(name: str, model: str | None, questions: list[str], max_tokens: int) -> dict[str, Any]:
    argument = json.dumps([name, model, questions, max_tokens])
    done = subprocess.run([sys.executable, "-c", CHILD, argument], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ModelError(f"{name} ended with exit code {done.returncode}: what it said is above.")
    [result] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]  # libraries print, too
    return json.loads(result.removeprefix("RESULT "))


def _figures(result: dict[str, Any]) -> dict[str, float]:
    """Seconds for all questions, output tokens/s, and the seconds in which a question got its first token."""
    return {
        "seconds": result["seconds"],
        "rate": sum(map(len, result["token_ids"])) / result["seconds"],
        "mean_ttft": statistics.mean(result["waits"]),
        "longest_ttft": max(result["waits"]),
    }


def _table(figures: dict[str, list[dict[str, float]]]) -> Table:
    """Medians over the rounds."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("milestone")
    for title in ("seconds", "output rate", "mean TTFT", "longest TTFT"):
        table.add_column(title, justify="right")
    for name, rounds in figures.items():
        median = {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
        table.add_row(
            name,
            f"{median['seconds']:.1f}",
            f"{median['rate']:.1f} tok/s",
            f"{median['mean_ttft']:.2f} s",
            f"{median['longest_ttft']:.2f} s",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
