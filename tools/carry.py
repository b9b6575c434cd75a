"""Take a fix forward: from the milestone where it was made to every later one. `python -m tools.ledger carry`.

The fix is the difference between a file in the working tree and the same file at `--base` (HEAD: not committed yet).
Each successor, in the ledger's order, then takes its predecessor's fix:

    same      the bytes are copied
    changed   three-way merge (`git merge-file`), and what it changes is the fix for the successor's own successors:

                  predecessor at base ──── the fix ───▶ predecessor now
                          │                                   │
                  the lesson's change                  the lesson's change
                          ▼                                   ▼
                  successor at base ───── merged ─────▶ successor now

    dropped   the fix ends here; a file of this name that is new in a later milestone is pointed out, and left alone

Everything is planned before anything is written, and what cannot be restored from git is never overwritten: a "same"
file must have the bytes from before or after the fix, and a conflict is written only over a file without edits of its
own. Whatever is in place already is left alone, so carrying twice is carrying once.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.milestones import Milestone


class CarryError(Exception):
    """The fix was not carried, and nothing was written: the message says why, and what to do next."""


@dataclass(frozen=True, slots=True)
class Fix:
    """What one milestone's successors have to follow: its file before and after."""

    before: bytes
    after: bytes


@dataclass(frozen=True, slots=True)
class Step:
    """What happens in one milestone; `write` is its file's new content, `None` to leave it.

    `fix` is what its own successors have to follow, `None` where the way ends.
    """

    done: str
    write: bytes | None = None
    fix: Fix | None = None
    conflict: bool = False


def carry(root: Path, milestones: Sequence[Milestone], source: Milestone, path: str, *, base: str = "HEAD") -> int:
    """Carry the fix of `source`'s `path`, and print what was done in each later milestone.

    Returns:
        0 if every successor has the fix, 1 if one has a conflict that is left in its file to be resolved.

    Raises:
        CarryError: a precondition does not hold; nothing was written.
    """
    fix = _fix_of_source(root, source, path, base)
    if fix.before == fix.after:
        print(
            f"{source.name}/{path} is as it is in {base}: nothing to carry. For a fix that is committed already, "
            "give the commit before it: --base REV."
        )
        return 0

    fixes, steps, again = {source.name: fix}, {}, []
    for milestone in milestones[milestones.index(source) + 1 :]:
        # Where the predecessor has no fix, the way has ended before: in a drop or a conflict.
        if milestone.predecessor in fixes:
            step = steps[milestone.name] = _step(root, milestone, path, fixes[milestone.predecessor], base)
            if step.fix is not None:
                fixes[milestone.name] = step.fix
        elif milestone.kind(path) == "new":
            again.append(milestone.name)

    print(f"{source.name}/{path}: the fix")
    for name, step in steps.items():
        if step.write is not None:
            (root / name / path).write_bytes(step.write)
        print(f"{name}/{path}: {step.done}")
    for name in again:
        print(f"{name} has a file of this name again (new), which is left alone: does it need the fix, too?")
    conflicts = [name for name, step in steps.items() if step.conflict]
    for name in conflicts:
        print(f"To go on: resolve the conflict in {name}/{path}, then run\n    {_command(path, name, base)}")
    return 1 if conflicts else 0


def _fix_of_source(root: Path, source: Milestone, path: str, base: str) -> Fix:
    where = f"{source.name}/{path}"
    kind = source.kind(path)
    if kind is None or kind == "dropped":
        raise CarryError(f"{where} is no file of the ledger: give its path inside {source.name}.")
    if not (root / where).is_file():
        raise CarryError(f"{where} does not exist. To remove a file, list it as dropped in the successors.")
    if kind == "same":
        raise CarryError(
            f"{where} is the same file as in {source.predecessor}: make the fix there, and carry it from "
            "there; or list it as changed, if the two are to differ from now on."
        )
    after = (root / where).read_bytes()
    if has_conflict_markers(after):
        raise CarryError(f"{where} still has conflict markers: resolve them, then run this again.")
    _check_revision(root, base)
    before = committed(root, base, where)
    if before is None:
        raise CarryError(
            f"{where} is not in {base}: commit the file as it was before the fix, or name a commit that "
            "has it with --base REV."
        )
    return Fix(before, after)


def _step(root: Path, milestone: Milestone, path: str, fix: Fix, base: str) -> Step:
    """What `milestone` has to do to follow its predecessor's `fix`. Reads only."""
    where = f"{milestone.name}/{path}"
    kind = milestone.kind(path)
    if kind == "dropped":
        return Step("dropped in this milestone, the fix ends here")
    if kind is None or kind == "new":
        listed = "not in the ledger" if kind is None else "listed as new, but its predecessor has it"
        raise CarryError(f"{where} is {listed}: see `python -m tools.ledger check`. Nothing was written.")
    if not (root / where).is_file():
        raise CarryError(f"{where} does not exist: see `python -m tools.ledger check`. Nothing was written.")
    now = (root / where).read_bytes()
    return _copy(where, now, fix, base) if kind == "same" else _merge(root, milestone, path, now, fix, base)


def _copy(where: str, now: bytes, fix: Fix, base: str) -> Step:
    if now == fix.after:
        return Step("same, has the fix already", fix=fix)
    if now == fix.before:
        return Step("same, copied", write=fix.after, fix=fix)
    raise CarryError(
        f"{where} is listed as same but is not its predecessor's file, neither before nor after the fix. If this is an "
        f"earlier carry, undo it with `git checkout {base} -- {where}`; else move its change to where it belongs. "
        "Nothing was written."
    )


def _merge(root: Path, milestone: Milestone, path: str, now: bytes, fix: Fix, base: str) -> Step:
    where = f"{milestone.name}/{path}"
    if has_conflict_markers(now):
        return Step("changed, still has conflict markers", conflict=True)
    # What this file was at `base` is where its own fix starts. A file that is not committed starts as it is.
    at_base = committed(root, base, where)
    before = now if at_base is None else at_base
    labels = (where, "before the fix", f"{milestone.predecessor}/{path}")
    clean, merged = merge(before, fix.before, fix.after, labels)
    if now != before and merged != now:
        clean, merged = merge(now, fix.before, fix.after, labels)  # it has edits of its own: keep them
    if clean and merged == now:
        return Step("changed, has the fix already", fix=Fix(before, now))
    if clean:
        return Step("changed, merged", write=merged, fix=Fix(before, merged))
    if now != at_base:
        # The markers would stand among edits that are nowhere else; or these edits are the conflict's solution.
        raise CarryError(
            f"{where} is not as it is in {base}, and the fix conflicts with it. If it is the solution of a conflict, "
            f"go on from there: `{_command(path, milestone.name, base)}`; else commit it first. Nothing was written."
        )
    return Step("changed, CONFLICT: both versions are in the file, between markers", write=merged, conflict=True)


def _command(path: str, name: str, base: str) -> str:
    return f"python -m tools.ledger carry {path} --from {name}" + (f" --base {base}" if base != "HEAD" else "")


def has_conflict_markers(content: bytes) -> bool:
    """Whether a merge left its `<<<<<<<` or `>>>>>>>` at the start of a line."""
    return re.search(rb"^(<{7}|>{7}) ", content, re.MULTILINE) is not None


def merge(ours: bytes, base: bytes, theirs: bytes, labels: tuple[str, str, str]) -> tuple[bool, bytes]:
    """Three-way merge: `ours` with the change from `base` to `theirs`.

    Returns:
        Whether it is clean, and the result; conflicts stand between markers that carry the labels (ours, base, theirs).
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("ours", ours), ("base", base), ("theirs", theirs)):
            Path(folder, name).write_bytes(content)
        labelled = [argument for label in labels for argument in ("-L", label)]
        command = ["git", "merge-file", "-p", "--diff3", *labelled, "ours", "base", "theirs"]
        result = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    if result.returncode > 127:  # up to 127 it is the number of conflicts
        raise CarryError(f"git merge-file failed for {labels[0]}: {result.stderr.decode().strip()}")
    return result.returncode == 0, result.stdout


def committed(root: Path, revision: str, path: str) -> bytes | None:
    """The file at `revision` as a checkout would write it (line ends included); `None` if it is not there."""
    # "./": relative to `root`, which need not be the top of the git repository.
    name = f"{revision}:./{path}"
    if _git(root, "cat-file", "-e", name).returncode != 0:
        return None
    return _git(root, "cat-file", "--filters", name, check=True).stdout


def _check_revision(root: Path, revision: str) -> None:
    if _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").returncode != 0:
        raise CarryError(f"{revision} is no commit of this repository: name the one before the fix with --base REV.")


def _git(root: Path, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=check)
