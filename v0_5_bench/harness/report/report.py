"""`python -m v0_5_bench report`: the tables and plots of README and the site, from the JSON files in `measurements/`.

A table stands in a document between two comments, which no reader sees:

    <!-- report: comparison -->
    ...
    <!-- end of report -->

Without a flag the command says which documents differ from the results (a test does the same); `--write` puts the
tables in their place and draws the plots. No figure in them is typed by hand.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

from common.errors import ModelError
from common.measuring.recipe import ROOT, documents

from . import tables
from .roofline import Results

RESULTS = Path(__file__).parents[2] / "measurements"
FILES = (
    "comparison",
    "progression",
    "processes",
    "shared_prefix",
    "attribution",
    "crosscheck",
)
BLOCK = re.compile(r"<!-- report: (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end of report -->", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `report`."""
    parser.add_argument("--write", action="store_true", help="write tables and plots, in place of comparing the tables")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (default: our results)")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the documents (default: this repository)")
    parser.add_argument("--print", dest="show", nargs="+", metavar="TABLE", help="print these tables, and do no more")


def run(args: argparse.Namespace) -> None:
    """Write, or compare; a document that differs is an error."""
    results = load(args.results)
    if args.show:
        for name in args.show:
            print(tables.render(name, results).replace("&nbsp;", " ").replace("<br>", " "))
        return
    stale = []
    for document in documents(args.root):
        text = document.read_text(encoding="utf-8")
        new = update(text, results)
        if new == text:
            continue
        stale.append(str(document.relative_to(args.root)))
        if args.write:
            document.write_text(new, encoding="utf-8")
            print(f"{stale[-1]}: written", file=sys.stderr)
    if args.write:
        from .plots import draw

        for file in draw(results, args.root / "docs" / "img", digest(results)):
            print(f"{file.relative_to(args.root)}: drawn", file=sys.stderr)
    elif stale:
        raise ModelError(
            f"{', '.join(stale)}: tables differ from the results; run python -m v0_5_bench report --write."
        )


def load(folder: Path) -> Results:
    """The results files of a folder, by name, and of its `fast/` those of v0.9; one that is not there is left out.

    Those that are committed lie with each milestone.

    Raises:
        ModelError: there is no such folder.
    """
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}.")
    fast = ROOT / "v0_9_fast" / "measurements" if folder == RESULTS else folder / "fast"
    files = {name: folder / f"{name}.json" for name in FILES} | {
        name: fast / f"{there}.json" for name, there in tables.FAST.items()
    }
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def update(text: str, results: Results) -> str:
    """`text` with every table as the results have it; raises `ModelError` for a table that is not known."""
    return BLOCK.sub(
        lambda match: (
            f"<!-- report: {match['name']} -->\n\n{tables.render(match['name'], results)}\n\n<!-- end of report -->"
        ),
        text,
    )


def digest(results: Results) -> str:
    """Of all results: it stands in each plot, so that a test can tell whether a plot is of these."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]
