"""A trace as a timeline: `python -m v0_3_scheduler.measurements.plot_trace trace.jsonl timeline.svg`.

One row a request, one column a step: waiting, computing its prompt (or prompt and output again), decoding, losing its
blocks; under it the free blocks. Needs matplotlib, from the extra `bench`. Dropped in v0.4.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from common import cli
from common.errors import ModelError

COLOURS = {"waits": "#d5d8e8", "prefill": "#3f51b5", "decode": "#ff9800", "preempted": "#d32f2f"}


def rows(entries: list[dict[str, Any]]) -> dict[str, list[tuple[int, str]]]:
    """For each request, in order of arrival: the steps in which it did something, and what."""
    names: dict[str, list[tuple[int, str]]] = {}
    for entry in entries:
        for name in entry["scheduled"]:
            names.setdefault(name, []).append((entry["step"], "decode" if name in entry["decoding"] else "prefill"))
        for name in entry["queue"]:
            kind = "preempted" if name in entry["preempted"] else "waits"
            names.setdefault(name, []).append((entry["step"], kind))
    return dict(sorted(names.items(), key=lambda item: [int(part) for part in item[0].split("/")]))


def plot(entries: list[dict[str, Any]], out: Path) -> None:
    """Draw the timeline into `out`, whose ending says the format."""
    try:
        import matplotlib
    except ImportError:
        raise ModelError("The plot needs matplotlib: run `pip install -e '.[bench]'`.") from None

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "mini-vllm"  # the same file from the same trace
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    requests = rows(entries)
    figure, (top, bottom) = pyplot.subplots(
        2,
        1,
        sharex=True,
        figsize=(10, 1.6 + 0.32 * len(requests)),
        height_ratios=[len(requests), 2],
        layout="constrained",
    )
    for y, events in enumerate(requests.values()):
        for kind, group in itertools.groupby(events, key=lambda event: event[1]):
            steps = [step for step, _ in group]
            top.barh(y, len(steps), left=steps[0], height=0.8, color=COLOURS[kind])
    top.set_yticks(range(len(requests)), [f"request {name.split('/')[0]}" for name in requests])
    top.invert_yaxis()
    top.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        ncols=len(COLOURS),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        frameon=False,
    )
    bottom.step(
        [entry["step"] for entry in entries], [entry["free"] for entry in entries], where="post", color="#3f51b5"
    )
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("free blocks")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> int:
    """Read a trace, draw it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="written by --trace-file")
    parser.add_argument("out", type=Path, help="such as timeline.svg")
    args = parser.parse_args()
    return cli.run(lambda: plot([json.loads(line) for line in args.trace.read_text().splitlines()], args.out))


if __name__ == "__main__":
    sys.exit(main())
