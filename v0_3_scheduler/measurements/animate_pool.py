"""A trace as an animation of the pool: `python -m v0_3_scheduler.measurements.animate_pool trace.jsonl pool.svg`.

    waiting    (G) (H)                        the queue, its front on the left
    [A][A][A][B][B][B] ...                    the pool: each block with its owner, and how full it is
    what has just happened
    preempted / pool / waiting                the whole run, a column a step, and where the run is now

The trace is what `--trace-file` writes. The SVG moves by CSS alone, so that it moves in an `<img>`, where no script
runs; it follows the reader's light or dark mode, and stands still, at the first preemption, for those who ask for less
motion. The same trace makes the same file. Dropped in v0.4.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import cli
from common.errors import ModelError

from .pool_story import Tenancy, captions, tenancies

COLOURS = ("#5667d8", "#1c8fc9", "#0f9d8c", "#4f9a3d", "#b58500", "#ef6c00", "#d6336c", "#8e44c9")
STEP = 0.085  # seconds; what happens in a step adds a pause, so that it can be read
PAUSES = {"first": 1.6, "preempted": 2.5, "admitted": 1.8, "ended": 0.7, "last": 2.0}
BLINK = 0.9  # seconds that a victim's blocks blink before they are free
WIDTH, MARGIN = 480, 20
SHOWN = 640  # pixels wide, where there is room for it
COLUMNS, PITCH_X, PITCH_Y, CELL_WIDTH, CELL_HEIGHT = 11, 40, 44, 36, 38
QUEUE_X, QUEUE_Y, CHIP, POOL_Y = 100, 50, 26, 92
RUN_X, ROW = 100, 4  # the whole run: where it begins, and how high a block's row is


def animate(entries: Sequence[dict[str, Any]], block_size: int = 16) -> str:
    """The SVG of a trace, of a run with blocks of `block_size` tokens.

    Raises:
        ModelError: the trace does not say who owned which block.
    """
    if not entries or "tables" not in entries[0]:
        raise ModelError("The trace has no block tables: record it again with --trace-file.")
    return _Drawing(entries, block_size).svg()


class _Drawing:
    """Puts an SVG together: its elements, and a rule of CSS for each that moves."""

    def __init__(self, entries: Sequence[dict[str, Any]], block_size: int) -> None:
        self.entries, self.block_size = entries, block_size
        names = {name: None for entry in entries for name in [*entry["scheduled"], *entry["queue"]]}
        ordered = sorted(names, key=lambda name: [int(part) for part in name.split("/")])
        self.letters = {name: chr(ord("A") + i % 26) for i, name in enumerate(ordered)}
        self.num_blocks = entries[0]["free"] + sum(len(table) for table in entries[0]["tables"].values())
        self.tenancies = tenancies(entries, block_size)
        self.captions = captions(entries, self.letters)
        self.still = next((i for i, entry in enumerate(entries) if entry["preempted"]), 0)
        self.times = [0.0]  # when each step begins; the last is the end of the film
        for step in range(len(entries)):
            self.times.append(self.times[-1] + STEP + self._pause(step))
        self.pool_end = POOL_Y + -(-self.num_blocks // COLUMNS) * PITCH_Y
        self.run_y = self.pool_end + 74
        self.longest_queue = max(len(entry["queue"]) for entry in entries)
        self.height = self.run_y + ROW * (self.num_blocks + self.longest_queue) + 48
        self.rules: list[str] = []

    def _pause(self, step: int) -> float:
        entry = self.entries[step]
        if step in (0, len(self.entries) - 1):
            return PAUSES["last" if step else "first"]
        if entry["preempted"]:
            return PAUSES["preempted"]
        if set(entry["scheduled"]) & set(self.entries[step - 1]["queue"]):
            return PAUSES["admitted"]
        return PAUSES["ended"] if step in self.captions and entry["queue"] else 0.0

    def svg(self) -> str:
        """All of it."""
        parts = [
            *self._head(),
            *self._queue_and_pool(),
            *self._captions(),
            *self._run(),
            f'<text class="m" x="{MARGIN}" y="{self.height - 16}" font-size="14">'
            f"A square is a block of {self.block_size} tokens; its bar shows how full it is.</text>",
        ]
        parts[2:2] = [f"<style>{self._style()}</style>"]  # after what has filled `rules`
        return "\n".join([*parts, "</svg>", ""])

    def _head(self) -> list[str]:
        num_requests, steps = len(self.letters), range(len(self.entries))
        numbers = "".join(f'<text x="{WIDTH - MARGIN}" y="{32 + 30 * step}">{step}</text>' for step in steps)
        # The number of the step is a long column of numbers, of which a window shows one.
        frames = [(time, f"transform:translateY({-30 * step}px)") for step, time in enumerate(self.times[:-1])]
        self._move("n", frames, self.still, jump=True)
        return [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{SHOWN}" '
            f'height="{self.height * SHOWN // WIDTH}" role="img" aria-labelledby="pool-title" '
            'font-family="system-ui, sans-serif">',
            f'<title id="pool-title">{num_requests} requests share a pool of {self.num_blocks} blocks: they take blocks'
            " as they write, one that the pool has no room for is preempted and waits, and comes back later.</title>",
            f'<rect class="bg" x=".5" y=".5" width="{WIDTH - 1}" height="{self.height - 1}" rx="14"/>',
            f'<text class="i" x="{MARGIN}" y="32" font-size="18" font-weight="600">'
            f"{num_requests} requests share {self.num_blocks} blocks</text>",
            f'<clipPath id="w"><rect x="{WIDTH - 60}" y="14" width="60" height="24"/></clipPath>',
            f'<text class="m" x="{WIDTH - MARGIN - 28}" y="32" font-size="16" text-anchor="end">step</text>',
            f'<g clip-path="url(#w)"><g id="n" class="a i" font-size="18" font-weight="600" text-anchor="end">{numbers}'
            "</g></g>",
        ]

    def _queue_and_pool(self) -> list[str]:
        lane = self.longest_queue * (CHIP + 6) + 6
        parts = [
            f'<text class="m" x="{MARGIN}" y="{QUEUE_Y + 19}" font-size="15">waiting</text>',
            f'<rect class="l" x="{QUEUE_X - 6}" y="{QUEUE_Y - 3}" width="{lane}" height="{CHIP + 6}" rx="16"/>',
            *(
                f'<rect class="l" x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="6"/>'
                for x, y in map(self._place, range(self.num_blocks))
            ),
        ]
        for number, tenancy in enumerate(self.tenancies):
            x, y = self._place(tenancy.block)
            begin, end = self._taken(tenancy), self.times[tenancy.last + 1]
            frames = [(begin, "opacity:0"), (begin + 0.15, "opacity:1"), (end, "opacity:1")]
            if tenancy.is_preempted:
                blinks = ((end + BLINK * part / 4, f"opacity:{(0.25, 1)[part % 2 == 0]}") for part in range(1, 4))
                frames += [*blinks, (end + BLINK, "opacity:1"), (end + BLINK + 0.15, "opacity:0")]
            else:
                frames.append((end + 0.2, "opacity:0"))
            if begin == 0:
                frames = [(0.0, "opacity:1"), *frames[2:]]
            is_shown = tenancy.first <= self.still <= tenancy.last
            self._move(f"b{number}", frames, None, still_style=f"opacity:{int(is_shown)}")
            parts.append(
                f'<g id="b{number}" class="a"><rect class="{self._class(tenancy.owner)}" x="{x}" y="{y}" '
                f'width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="6"/><text class="w" x="{x + CELL_WIDTH / 2:g}" '
                f'y="{y + 23}">{self.letters[tenancy.owner]}</text>{self._level(number, tenancy, x, y)}</g>'
            )
        parts += [self._chip(name) for name in self.letters if any(name in entry["queue"] for entry in self.entries)]
        return parts

    def _level(self, number: int, tenancy: Tenancy, x: int, y: int) -> str:
        """The bar in a cell: how many of the block's tokens are there."""
        shares = [level / self.block_size for level in tenancy.levels]
        moves = min(shares) < 1
        if moves:
            frames = [
                (max(self.times[tenancy.first + i], self._taken(tenancy)), f"transform:scaleX({share:.4g})")
                for i, share in enumerate(shares)
            ]
            at_still = min(max(self.still - tenancy.first, 0), len(shares) - 1)
            self._move(f"f{number}", frames, at_still, f"transform-origin:{x + 6}px 0;")
        name = f' id="f{number}" class="a w"' if moves else ' class="w"'
        place = f'x="{x + 6}" y="{y + CELL_HEIGHT - 9}" width="{CELL_WIDTH - 12}" height="4" rx="1"'
        return f'<rect class="t" {place}/><rect{name} {place}/>'

    def _chip(self, name: str) -> str:
        """A request in the queue: from its blocks to its place there, and back again."""
        frames: list[tuple[float, str]] = []
        was_waiting = False
        for step, entry in enumerate(self.entries):
            time = self.times[step]
            is_waiting = name in entry["queue"]
            if is_waiting:
                place = f"transform:translate({QUEUE_X + entry['queue'].index(name) * (CHIP + 6)}px,{QUEUE_Y}px)"
                if not was_waiting and step:
                    time += BLINK
                    home = self._home(self.entries[step - 1]["tables"][name][0])
                    frames += [(time - 0.5, f"{home};opacity:0"), (time - 0.3, f"{home};opacity:1")]
                    frames.append((time + 0.4, f"{place};opacity:1"))
                elif step and place not in frames[-1][1]:  # it moves up or makes room, as the newcomer arrives
                    time += BLINK if entry["preempted"] else 0
                    frames += [(time, frames[-1][1]), (time + 0.4, f"{place};opacity:1")]
                elif not step:
                    frames.append((time, f"{place};opacity:1"))
            elif was_waiting:
                home = self._home(entry["tables"][name][0])
                frames += [(time, frames[-1][1]), (time + 0.45, f"{home};opacity:1"), (time + 0.6, f"{home};opacity:0")]
            was_waiting = is_waiting
        still, letter = self.entries[self.still]["queue"], self.letters[name]
        at = f"translate({QUEUE_X + (still.index(name) if name in still else 0) * (CHIP + 6)}px,{QUEUE_Y}px)"
        self._move(f"q{letter}", frames, None, still_style=f"transform:{at};opacity:{int(name in still)}")
        middle = f"{CHIP / 2:g}"
        return (
            f'<g id="q{letter}" class="a">'
            f'<circle class="{self._class(name)}" cx="{middle}" cy="{middle}" r="{middle}"/>'
            f'<text class="w" x="{middle}" y="19">{letter}</text></g>'
        )

    def _captions(self) -> list[str]:
        parts = []
        steps = sorted(self.captions)
        for number, (step, following) in enumerate(zip(steps, [*steps[1:], len(self.entries)], strict=True)):
            begin, end = self.times[step], self.times[following]
            frames = [(begin, "opacity:0"), (begin + 0.15, "opacity:1"), (end - 0.1, "opacity:1"), (end, "opacity:0")]
            frames = frames if step else [(0.0, "opacity:1"), *frames[2:]]
            is_shown = step <= self.still < following
            self._move(f"c{number}", frames, None, still_style=f"opacity:{int(is_shown)}")
            first, second = self.captions[step]
            parts.append(
                f'<g id="c{number}" class="a i" font-size="16">'
                f'<text x="{MARGIN}" y="{self.pool_end + 20}">{first}</text>'
                f'<text x="{MARGIN}" y="{self.pool_end + 41}">{second}</text></g>'
            )
        return parts

    def _run(self) -> list[str]:
        """The whole run: a row for each block and each place in the queue, a column for each step."""
        whole = WIDTH - MARGIN - RUN_X
        width = whole / len(self.entries)
        height = ROW * self.num_blocks
        queue_y = self.run_y + height + 8
        bars: dict[str, list[str]] = {name: [] for name in self.letters}

        def bar(name: str, y: int, first: int, last: int) -> None:
            x, length = RUN_X + first * width, (last - first + 1) * width
            bars[name].append(f"M{x:.5g} {y}h{length:.4g}v{ROW - 1}h{-length:.4g}z")

        for tenancy in self.tenancies:
            bar(tenancy.owner, self.run_y + tenancy.block * ROW, tenancy.first, tenancy.last)
        for place in range(self.longest_queue):
            first = 0
            queue = [(entry["queue"][place : place + 1] or [""])[0] for entry in self.entries]
            for step, name in enumerate(queue):
                if step + 1 == len(queue) or queue[step + 1] != name:
                    if name:
                        bar(name, queue_y + place * ROW, first, step)
                    first = step + 1
        bottom = queue_y + self.longest_queue * ROW
        parts = [
            f'<text class="m" x="{MARGIN}" y="{self.run_y - 7}" font-size="15">preempted</text>',
            f'<text class="m" x="{MARGIN}" y="{self.run_y + height / 2 + 5:g}" font-size="15">pool</text>',
            f'<text class="m" x="{MARGIN}" y="{queue_y + 11}" font-size="15">waiting</text>',
            f'<rect class="l" x="{RUN_X}" y="{self.run_y - 1}" width="{whole}" height="{height + 1}"/>',
            *(f'<path class="{self._class(name)}" d="{"".join(paths)}"/>' for name, paths in bars.items()),
        ]
        for step, entry in enumerate(self.entries):
            for name in entry["preempted"]:
                parts.append(
                    f'<text class="{self._class(name)}" x="{RUN_X + (step + 0.5) * width:.5g}" y="{self.run_y - 7}" '
                    f'font-size="15" font-weight="700" text-anchor="middle">{self.letters[name]}▾</text>'
                )
        frames = []
        for step, time in enumerate(self.times[:-1]):
            frames += [
                (time, f"transform:translateX({step * width:.5g}px)"),
                (time + STEP, f"transform:translateX({(step + 1) * width:.5g}px)"),
            ]
        self._move("p", frames, 2 * self.still + 1)
        parts.append(
            f'<clipPath id="r"><rect x="{RUN_X}" y="{self.run_y - 4}" width="{whole + 2}" '
            f'height="{bottom - self.run_y + 8}"/></clipPath><g clip-path="url(#r)"><g id="p" class="a">'
            f'<rect class="f" x="{RUN_X}" y="{self.run_y}" width="{WIDTH - RUN_X}" height="{bottom - self.run_y}"/>'
            f'<rect class="h" x="{RUN_X - 1}" y="{self.run_y - 4}" width="2" height="{bottom - self.run_y + 8}"/>'
            "</g></g>"
        )
        return parts

    def _style(self) -> str:
        colours = "".join(f".k{i}{{fill:{colour}}}" for i, colour in enumerate(COLOURS))
        light = ".bg{fill:#f7f8fd;stroke:#d5d9ee}.i{fill:#1d2033}.m{fill:#5a6078}.l{fill:none;stroke:#c3c8de}"
        light += ".f{fill:#f7f8fd;opacity:.55}.h{fill:#1d2033}"
        dark = ".bg{fill:#171a27;stroke:#31364f}.i{fill:#eceefa}.m{fill:#a4abc8}.l{stroke:#434964}"
        dark += ".f{fill:#171a27}.h{fill:#eceefa}"
        return (
            f".a{{animation:{self.times[-1]:.3g}s linear infinite}}{colours}"
            ".w{fill:#fff}text.w{font-size:16px;font-weight:700;text-anchor:middle}.t{fill:#000;opacity:.28}"
            f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
            f"{''.join(self.rules)}@media(prefers-reduced-motion:reduce){{.a{{animation:none!important}}}}"
        )

    def _move(
        self,
        name: str,
        frames: Sequence[tuple[float, str]],
        at_still: int | None,
        style: str = "",
        *,
        still_style: str = "",
        jump: bool = False,
    ) -> None:
        """Give the element `name` its key frames, and the look that it has without animation.

        Args:
            name: its id.
            frames: times in seconds and what holds from there on (`jump`) or is reached there.
            at_still: the frame whose look it has in the still; without one, `still_style` is it.
            style: what holds always.
            still_style: see `at_still`.
            jump: not a move from frame to frame, but a jump.
        """
        total = self.times[-1]
        rows: list[tuple[float, str]] = []
        for time, look in frames:
            time = min(time, total)
            if len(rows) > 1 and rows[-1][1] == rows[-2][1] == look:
                rows[-1] = (time, look)  # nothing has happened between the two
            elif not rows or time >= rows[-1][0]:
                rows.append((time, look))
        keys: dict[str, str] = {}
        for time, look in [(0.0, rows[0][1]), *rows, (total, rows[-1][1])]:
            keys[f"{100 * time / total:.2f}".rstrip("0").rstrip(".") + "%"] = look
        body = "".join(f"{key}{{{look}}}" for key, look in keys.items())
        look = frames[at_still][1] if at_still is not None else still_style
        timing = ";animation-timing-function:step-end" if jump else ""
        self.rules.append(f"@keyframes {name}{{{body}}}#{name}{{{style}{look};animation-name:{name}{timing}}}")

    def _taken(self, tenancy: Tenancy) -> float:
        """When a block gets its owner: in a step that preempts, after the victim has left."""
        return self.times[tenancy.first] + (BLINK + 0.3 if self.entries[tenancy.first]["preempted"] else 0)

    def _place(self, block: int) -> tuple[int, int]:
        return MARGIN + block % COLUMNS * PITCH_X + 2, POOL_Y + block // COLUMNS * PITCH_Y

    def _home(self, block: int) -> str:
        x, y = self._place(block)
        return f"transform:translate({x + (CELL_WIDTH - CHIP) // 2}px,{y + (CELL_HEIGHT - CHIP) // 2}px)"

    def _class(self, name: str) -> str:
        return f"k{list(self.letters).index(name) % len(COLOURS)}"


def main() -> int:
    """Read a trace, draw it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="written by --trace-file")
    parser.add_argument("out", type=Path, help="such as pool.svg")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (default: 16)")
    args = parser.parse_args()

    def draw() -> None:
        entries = [json.loads(line) for line in args.trace.read_text().splitlines()]
        args.out.write_text(animate(entries, args.block_size))

    return cli.run(draw)


if __name__ == "__main__":
    sys.exit(main())
