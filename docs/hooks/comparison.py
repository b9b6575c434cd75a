"""How the files of two milestones compare: the diff of two texts, and which new file is an old one that was moved."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import product
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CONTEXT = 3  # unchanged lines around a change, as `diff -u` has them
DEFINITION = re.compile(r"\s*(?:async def|def|class)\s")
ALIKE = 0.6  # the share of equal lines from which a new file is taken for a dropped one under another path


class Move(NamedTuple):
    """Where a moved file was before, relative to the predecessor's folder, and whether it is otherwise the same."""

    path: str
    is_equal: bool


def moved_files(here: Path, new: Sequence[str], before: Path, dropped: Sequence[str]) -> dict[str, Move]:
    """Which of the files `new` of the folder `here` are files `dropped` of `before`, under another path.

    Each file is in one pair at most. Equal files go first, then those that kept their name, then the most alike.
    """
    contents = {path: (here / path).read_bytes() for path in new if (here / path).is_file()}
    old_contents = {path: (before / path).read_bytes() for path in dropped if (before / path).is_file()}
    pairs = []
    for path, old in product(contents, old_contents):
        share = likeness(old_contents[old], contents[path])
        if share >= ALIKE:
            has_same_name = PurePosixPath(path).name == PurePosixPath(old).name
            pairs.append(((share == 1, has_same_name, share), path, old))
    moved: dict[str, Move] = {}
    taken = set()
    for (is_equal, _, _), path, old in sorted(pairs, key=lambda pair: pair[0], reverse=True):
        if path not in moved and old not in taken:
            moved[path] = Move(old, is_equal)
            taken.add(old)
    return moved


@lru_cache(maxsize=4096)  # every link to a moved file asks anew
def likeness(old: bytes, new: bytes) -> float:
    """The share of equal lines: 1 for equal files only; 0 for what is clearly below `ALIKE`, and for empty files."""
    if not old or not new:
        return 0.0
    matcher = SequenceMatcher(None, old.splitlines(keepends=True), new.splitlines(keepends=True), autojunk=False)
    is_near = matcher.real_quick_ratio() >= ALIKE and matcher.quick_ratio() >= ALIKE  # upper bounds, quickly found
    return matcher.ratio() if is_near else 0.0


def unified_diff(old: str, new: str, old_name: str, new_name: str) -> tuple[str, int, int]:
    """The diff in `diff -u`'s form, and the number of lines added and removed.

    `difflib.unified_diff` is not used: in files of 200 lines or more it takes frequent lines for noise, and its diffs
    get longer than they need to be. As git does, a hunk names the definition that it begins in.
    """
    before, after = lines_of(old), lines_of(new)
    lines, added, removed = [f"--- {old_name}", f"+++ {new_name}"], 0, 0
    for hunk in SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(CONTEXT):
        old_start, old_end, new_start, new_end = hunk[0][1], hunk[-1][2], hunk[0][3], hunk[-1][4]
        above = next((line for line in reversed(before[:old_start]) if DEFINITION.match(line)), "").strip()
        ranges = f"-{_range(old_start, old_end)} +{_range(new_start, new_end)}"
        lines.append(f"@@ {ranges} @@ {above:.80}".rstrip())
        for kind, i1, i2, j1, j2 in hunk:
            if kind == "equal":
                lines += [_line(" ", line) for line in before[i1:i2]]
                continue
            lines += [_line("-", line) for line in before[i1:i2]]
            lines += [_line("+", line) for line in after[j1:j2]]
            removed += i2 - i1
            added += j2 - j1
    return "\n".join(lines) + "\n", added, removed


def lines_of(text: str) -> list[str]:
    """Lines with their ends, so that a last line without one is different from one with it. Only "\\n" ends a line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _line(sign: str, line: str) -> str:
    return sign + (line.removesuffix("\n") if line.endswith("\n") else line + "\n\\ No newline at end of file")


def _range(start: int, end: int) -> str:
    """Where a hunk stands, from 1; an empty range names the line before it."""
    return f"{start + 1 if end > start else start},{end - start}"
