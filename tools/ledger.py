"""The ledger's commands: compare it with the tree (here), and take a fix forward by it (`tools/carry.py`).

What it says, and how it is read, is in `tools/milestones.py`.

    python -m tools.ledger check
    python -m tools.ledger carry kv_cache.py --from v0_1
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from tools.carry import CarryError, carry, has_conflict_markers
from tools.milestones import KINDS, LedgerError, Milestone, find_milestone, load_ledger, order_faults, source_files

MANY_CHANGED_LINES = 300  # a step that changes more is two lessons, or something belongs elsewhere


def changed_lines(before: bytes, after: bytes) -> int:
    """Removed plus added lines; a line that is edited counts as both."""
    old, new = before.splitlines(), after.splitlines()
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    kept = sum(block.size for block in blocks)
    return len(old) + len(new) - 2 * kept


def num_changed_lines(root: Path, milestone: Milestone) -> int:
    """`changed_lines` over the files that `milestone` lists as changed and that both milestones have."""
    pairs = [(root / str(milestone.predecessor) / path, root / milestone.name / path) for path in milestone.changed]
    return sum(
        changed_lines(old.read_bytes(), new.read_bytes()) for old, new in pairs if old.is_file() and new.is_file()
    )


def ledger_faults(root: Path, milestones: Sequence[Milestone]) -> list[str]:
    """Every disagreement between ledger and tree, one line each, with what to do next; empty if all is well."""
    faults = order_faults(milestones)
    names = {milestone.name for milestone in milestones}
    for folder in sorted(root.glob("v0_*")):
        if folder.is_dir() and folder.name not in names and source_files(folder):
            faults.append(f"{folder.name} has no entry: add [tool.milestones.{folder.name}], or remove the folder.")
    for milestone in milestones:
        if not (root / milestone.name).is_dir():
            faults.append(f"{milestone.name} has an entry but no folder: add the folder, or take the entry out.")
        elif milestone.predecessor is None or (root / milestone.predecessor).is_dir():
            faults += _file_faults(root, milestone)
    return faults


def _file_faults(root: Path, milestone: Milestone) -> Iterator[str]:
    """The faults of one milestone's files, where its folder and its predecessor's exist."""
    here, before = root / milestone.name, root / milestone.predecessor if milestone.predecessor else None
    yield from _listed_faults(here, before, milestone)
    paths = {path for _, path in milestone.listed()}
    files = source_files(here)
    for path in sorted(files - paths):
        yield f"{here.name}/{path} is not listed: list it as {_true_kind(here, before, path)}, or remove it."
    if before is not None:
        for path in sorted(source_files(before) - files - paths):
            yield f"{here.name} does not account for {before.name}/{path}: list it as dropped, or copy it."
    for path in sorted(files):
        if has_conflict_markers((here / path).read_bytes()):
            yield f"{here.name}/{path} has conflict markers in it: resolve them, then carry on with --from {here.name}."


def _listed_faults(here: Path, before: Path | None, milestone: Milestone) -> Iterator[str]:
    """What is wrong with the entries; `here` and `before` are the folders of the milestone and its predecessor."""
    for folder in milestone.folders:
        if not folder.files:
            yield f"{here.name}/{folder.path} is listed as {folder.kind} but stands for no file: take it out."
    kinds: dict[str, list[str]] = {}
    for kind, path in milestone.listed():
        kinds.setdefault(path, []).append(kind)
    for path, listed in kinds.items():
        if len(listed) > 1:
            once = f"list it once, by its own name, as {_true_kind(here, before, path)}"
            yield f"{here.name}/{path} is listed {len(listed)} times ({', '.join(listed)}): {once}."
        elif before is None and listed != ["new"]:
            yield f"{here.name}/{path} is listed as {listed[0]}, but there is no predecessor: list it as new."
        elif fault := _fault(listed[0], here, before, path):
            yield f"{here.name}/{path} {fault}"


def _fault(kind: str, here: Path, before: Path | None, path: str) -> str | None:
    """What is wrong with one listed file, as the end of a sentence that starts with its path."""
    true_kind = _true_kind(here, before, path)
    if kind == true_kind:
        return None
    predecessor = before.name if before else "no predecessor"
    if true_kind is None:
        if kind == "dropped":
            return f"is listed as dropped, but {predecessor} does not have it: take it out of the ledger."
        return f"is listed as {kind} but does not exist: add it, or take it out of the ledger."
    if kind == "dropped":
        return f"is listed as dropped but is still there: remove it, or list it as {true_kind}."
    if true_kind == "dropped":
        return f"is listed as {kind} but does not exist: add it, or list it as dropped."
    if kind == "new":
        return f"is listed as new, but {predecessor} has it: list it as {true_kind}."
    if true_kind == "new":
        return f"is listed as {kind}, but {predecessor} does not have it: list it as new."
    if kind == "same":
        return (
            f"is listed as same but differs from {predecessor}/{path}: "
            "carry the fix forward (`python -m tools.ledger carry`), copy the file, or list it as changed."
        )
    return f"is listed as changed but equals {predecessor}/{path}: list it as same."


def _true_kind(here: Path, before: Path | None, path: str) -> str | None:
    """What the file at `path` is in the milestone `here`; `None` if neither it nor the one before has the file."""
    is_before = before is not None and (before / path).is_file()
    if not (here / path).is_file():
        return "dropped" if is_before else None
    if before is None or not is_before:
        return "new"
    return "same" if (here / path).read_bytes() == (before / path).read_bytes() else "changed"


def check(root: Path) -> int:
    """Print a line per milestone, then every warning and fault; 1 if there is a fault, else 0."""
    milestones = load_ledger(root)
    for milestone in milestones:
        lines = num_changed_lines(root, milestone)
        counts = ", ".join(f"{len(getattr(milestone, kind))} {kind}" for kind in KINDS)
        print(f"{milestone.name}: {counts}; {lines} changed lines")
        if lines > MANY_CHANGED_LINES:
            print(
                f"warning: {milestone.name} changes {lines} lines of existing files (about {MANY_CHANGED_LINES} is "
                "a lesson): split the step, or move something to a file of its own."
            )
    faults = ledger_faults(root, milestones)
    for fault in faults:
        print(f"fault: {fault}")
    print(f"{len(faults)} fault(s) in the ledger." if faults else "The ledger holds.")
    return 1 if faults else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.ledger", description="The ledger of the milestones.")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: the current folder)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="compare the ledger with the tree")
    forward = commands.add_parser("carry", help="take a fix in the working tree forward to all later milestones")
    forward.add_argument("file", help="path of the fixed file inside its milestone, like kv_cache.py")
    forward.add_argument("--from", dest="source", required=True, help="the milestone with the fix; v0_1 is enough")
    forward.add_argument("--base", default="HEAD", help="the commit before the fix (default: HEAD)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "check":
            return check(arguments.root)
        milestones = load_ledger(arguments.root)
        if faults := order_faults(milestones):
            raise LedgerError(faults[0])
        source = find_milestone(milestones, arguments.source)
        path = arguments.file.removeprefix("./").removeprefix(f"{source.name}/")
        return carry(arguments.root, milestones, source, path, base=arguments.base)
    except (LedgerError, CarryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
