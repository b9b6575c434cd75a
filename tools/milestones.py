"""The ledger of the milestones, as it stands in `pyproject.toml`: one table `[tool.milestones.NAME]` per milestone.

It says which file is new, changed, same or dropped against the predecessor. The tables are in the order of the lessons,
paths are relative to the milestone's folder. An entry that ends in "/" is a folder, and stands for the source files
below it that are not listed by their own names:

    new = ["harness/"]              the files that this milestone has there
    same = ["server/"]              the files that this milestone or its predecessor has there
    dropped = ["measurements/"]     the files that its predecessor has there

Each of these files has to be what its folder is listed as. An exception is listed by its own name: `same = ["server/"]`
with `changed = ["server/app.py"]` is all of `server/` but one file. A folder may be dropped and new in one milestone,
which replaces its files by others; a file that stays is, again, listed by its own name. No folder is `changed`.

`lab = [...]` lists what a learner may write of the milestone; `tools/lab/tasks.py` reads it, and says what is in it.

This file reads the ledger and puts the files in the place of their folders, so that its users see files only. Whether
the ledger is true is asked by `tools/ledger.py`.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

KINDS = ("new", "changed", "same", "dropped")
SOURCE_SUFFIXES = frozenset({".py", ".c", ".h", ".cpp", ".cu", ".html", ".css", ".js", ".mjs"})  # results do not count


class LedgerError(ValueError):
    """The ledger cannot be read, or a milestone is not in it: the message says where, and what to do next."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that is listed as a whole: `path` ends in "/", and `files` are those that it stands for."""

    kind: str
    path: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """One milestone of the ledger; `check` says whether what it lists is true.

    `name` is that of the folder and the package, `predecessor` is `None` for the first milestone only. The four tuples
    hold the paths of files, relative to the folder and with forward slashes. Those that are listed by their folder are
    among them; `folders` says which ones these are. `lab` is as it is written.
    """

    name: str
    title: str
    predecessor: str | None = None
    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    folders: tuple[Folder, ...] = ()
    lab: tuple[Mapping[str, Any], ...] = ()

    def kind(self, path: str) -> str | None:
        """`"new"`, `"changed"`, `"same"` or `"dropped"`; `None` for a path that is not listed."""
        return next((kind for kind in KINDS if path in getattr(self, kind)), None)

    def listed(self) -> list[tuple[str, str]]:
        """All `(kind, path)` in the order of the ledger; a path twice if it is listed twice."""
        return [(kind, path) for kind in KINDS for path in getattr(self, kind)]


def load_ledger(root: Path) -> list[Milestone]:
    """The milestones of `root`'s `pyproject.toml`, in the order in which they are written.

    For the folders that are listed, the tree is looked at: which files they have now.

    Raises:
        LedgerError: there is no ledger, or an entry has a key or a value that it cannot have.
    """
    file = root / "pyproject.toml"
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["milestones"]
    except tomllib.TOMLDecodeError as error:
        raise LedgerError(f"{file} is not valid TOML: {error}.") from error
    except (OSError, KeyError) as error:
        raise LedgerError(f"{file} holds no [tool.milestones]: run this in the repository's root.") from error
    return [_milestone(root, name, table) for name, table in tables.items()]


def newest_page(root: Path) -> Path | None:
    """The folder of the visualizer's page, of the newest milestone that has one."""
    folders = (root / milestone.name / "web" for milestone in reversed(load_ledger(root)))
    return next(filter(Path.is_dir, folders), None)


def _milestone(root: Path, name: str, table: dict[str, object]) -> Milestone:
    where = f"pyproject.toml, [tool.milestones.{name}]"
    keys = ("title", "predecessor", *KINDS, "lab")
    if unknown := sorted(table.keys() - set(keys)):
        raise LedgerError(f"{where}: unknown key {unknown[0]!r}; an entry has {', '.join(keys)}.")
    title, predecessor, lab = table.get("title"), table.get("predecessor"), table.get("lab", [])
    if not isinstance(title, str) or not isinstance(predecessor, str | None):
        raise LedgerError(f"{where}: title (required) and predecessor must be strings.")
    listed = {kind: _entries(where, kind, table.get(kind, [])) for kind in KINDS}
    folders = _folders(root / name, root / predecessor if predecessor else None, listed)
    files_of = {(folder.kind, folder.path): folder.files for folder in folders}
    files = {
        kind: tuple(file for entry in entries for file in files_of.get((kind, entry), (entry,)))
        for kind, entries in listed.items()
    }
    if not isinstance(lab, list) or not all(isinstance(task, dict) for task in lab):
        raise LedgerError(f"{where}: lab must be a list of tables, one for each task.")
    return Milestone(name=name, title=title, predecessor=predecessor, folders=folders, lab=tuple(lab), **files)


def _entries(where: str, kind: str, entries: Any) -> tuple[str, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) and _is_inside(entry) for entry in entries):
        raise LedgerError(
            f"{where}: {kind} must be a list of paths inside the folder, like 'web/index.html', "
            "or 'web/' for all that is below it."
        )
    if kind == "changed" and (folders := [entry for entry in entries if entry.endswith("/")]):
        raise LedgerError(
            f"{where}: a folder is never changed as a whole. List the changed files of {folders[0]} one by one; "
            f"the others can stay under same as {folders[0]!r}."
        )
    return tuple(entries)


def _is_inside(path: str) -> bool:
    """Whether this is the one way to write a path inside the folder, so that equal paths are equal strings."""
    path = path.removesuffix("/")
    return path != "." and path == str(PurePosixPath(path)) and ".." not in path.split("/") and path[0] != "/"


def _folders(here: Path, before: Path | None, listed: Mapping[str, Sequence[str]]) -> tuple[Folder, ...]:
    """The entries that are folders, with their files. `here` is the milestone's own folder."""
    by_name = {entry for entries in listed.values() for entry in entries if not entry.endswith("/")}
    trees: dict[str, list[Path | None]] = {"new": [here], "same": [here, before], "dropped": [before]}
    folders = []
    for kind, entries in listed.items():
        for entry in entries:
            if entry.endswith("/"):
                found = {f"{entry}{file}" for tree in trees[kind] if tree for file in source_files(tree / entry)}
                folders.append(Folder(kind, entry, tuple(sorted(found - by_name))))
    return tuple(folders)


def find_milestone(milestones: Sequence[Milestone], name: str) -> Milestone:
    """The milestone of this name, which may be cut short: `v0_1` is `v0_1_single_request`.

    Raises:
        LedgerError: no milestone has it.
    """
    for milestone in milestones:
        if milestone.name == name or milestone.name.startswith(f"{name}_"):
            return milestone
    raise LedgerError(f"{name} is no milestone of the ledger; there are {', '.join(m.name for m in milestones)}.")


def source_files(folder: Path) -> set[str]:
    """The files under `folder` that the ledger has to list, as paths relative to it; caches are left out."""
    files = set()
    for file in folder.rglob("*"):
        path = file.relative_to(folder)
        cached = any(part == "__pycache__" or part.startswith(".") for part in path.parts)
        if file.suffix in SOURCE_SUFFIXES and file.is_file() and not cached:
            files.add(path.as_posix())
    return files


def order_faults(milestones: Sequence[Milestone]) -> list[str]:
    """What is wrong with the predecessors: all but the first milestone need one, and it comes before."""
    faults, names = [], [milestone.name for milestone in milestones]
    for position, milestone in enumerate(milestones):
        name, predecessor = milestone.name, milestone.predecessor
        if position == 0 and predecessor is not None:
            faults.append(f"{name} is the first milestone: take its predecessor {predecessor} out of the ledger.")
        elif position > 0 and predecessor is None:
            faults.append(f"{name} has no predecessor: name the milestone that it was copied from.")
        elif position > 0 and predecessor not in names:
            faults.append(f"{name} has the predecessor {predecessor}, which is not in the ledger: correct the name.")
        elif position > 0 and predecessor not in names[:position]:
            faults.append(f"{name} has the predecessor {predecessor}, which does not come before it: reorder them.")
    return faults
