"""Figures in the documents that cannot go stale: each is taken from a results file, by name.

A figure in a Markdown file is written between two comments, which no reader sees:

    <!--=v0_1_single_request/measurements/decode.json decode.ratio.median .1f-->2.1<!--/-->

that is: the file, the path of keys in it, and a format of Python's. What follows from measured figures is computed:

    32 in a step make <!--=results.json 32*steps.1.ms/steps.32.ms .1f-->13.7<!--/--> times the tokens
    a step takes <!--=results.json 1000/theirs.rate−1000/ours.rate .0f-->25<!--/--> ms less

with `*`, `/` and then `−` (U+2212, as a key may have a hyphen) between paths and numbers.
`python -m tools.figures` says which figures differ from their file (a test does the same), and with `--write` puts the
file's in their place.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from common.measuring.recipe import ROOT, documents

FIGURE = re.compile(r"<!--=(?P<file>\S+) (?P<keys>\S+) (?P<format>[^\s-]+)-->(?P<text>.*?)<!--/-->")


def update(text: str, root: Path) -> str:
    """`text` with every figure as its file has it.

    Raises:
        LookupError: a file or a key in it is not there, or a figure stands where Markdown would not take it for text.
    """

    at_start = re.search(rf"^\s*{FIGURE.pattern}", text, re.MULTILINE)
    if at_start:
        raise LookupError(f"a line begins with the figure {at_start['keys']}, which Markdown takes for a block of HTML")

    def value(match: re.Match[str]) -> str:
        return f"<!--={match['file']} {match['keys']} {match['format']}-->{_look_up(root, match)}<!--/-->"

    return FIGURE.sub(value, text)


def _look_up(root: Path, match: re.Match[str]) -> str:
    file = root / match["file"]
    if not file.is_file():
        raise LookupError(f"there is no results file {match['file']}: run the benchmark that writes it")
    value = _compute(json.loads(file.read_text()), match["keys"], match["file"])
    return format(value, "" if match["format"] == "s" else match["format"])


def _compute(results: Any, expression: str, file: str) -> Any:
    """The value of a path, or of products and quotients of paths and numbers, and differences of such."""
    if "−" in expression:
        first, *others = (_compute(results, part, file) for part in expression.split("−"))
        return first - sum(others)
    path, *rest = re.split(r"([*/])", expression)
    value = _factor(results, path, file)
    for operator, path in zip(rest[::2], rest[1::2], strict=True):
        factor = _factor(results, path, file)
        value = value * factor if operator == "*" else value / factor
    return value


def _factor(results: Any, path: str, file: str) -> Any:
    if re.fullmatch(r"\d+(\.\d+)?", path):
        return float(path)
    value = results
    for key in path.split("."):
        # A key may itself hold a dot or a space: `top_p_0~95` is `top_p_0.95`, `linear+layers` is `linear layers`.
        key = key.replace("~", ".").replace("+", " ")
        if key not in value:
            raise LookupError(f"{file} has no {path}: {key!r} is not one of {', '.join(value)}")
        value = value[key]
    return value


def main() -> int:
    """Check or write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare the figures in the documents with the results files.")
    parser.add_argument("--write", action="store_true", help="put the results' figures into the documents")
    args = parser.parse_args()
    stale = 0
    for document in documents(ROOT):
        text = document.read_text()
        try:
            new = update(text, ROOT)
        except LookupError as error:
            print(f"{document.relative_to(ROOT)}: {error}")
            stale += 1
            continue
        if new != text and args.write:
            document.write_text(new)
            print(f"{document.relative_to(ROOT)}: written")
        elif new != text:
            print(f"{document.relative_to(ROOT)}: figures differ from their files; run python -m tools.figures --write")
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
