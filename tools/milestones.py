"""The ledger of the milestones, as it stands in `pyproject.toml`: one table `[tool.milestones.NAME]` per milestone.

It says which file is new, changed, same or dropped against the predecessor. The tables are in the order of the lessons,
paths are relative to the milestone's folder. This file reads it; whether it is true is asked by `tools/ledger.py`.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

KINDS = ("new", "changed", "same", "dropped")
SOURCE_SUFFIXES = frozenset({".py", ".c", ".h", ".cpp", ".cu", ".html", ".css", ".js", ".mjs"})  # results do not count


class LedgerError(ValueError):
    """The ledger cannot be read, or a milestone is not in it: the message says where, and what to do next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """One entry of the ledger as it is written; `check` says whether it is true.

    `name` is that of the folder and the package, `predecessor` is `None` for the first milestone only. The four tuples
    hold paths relative to the folder, with forward slashes.
    """

    name: str
    title: str
    predecessor: str | None = None
    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def kind(self, path: str) -> str | None:
        """`"new"`, `"changed"`, `"same"` or `"dropped"`; `None` for a path that is not listed."""
        return next((kind for kind in KINDS if path in getattr(self, kind)), None)

    def listed(self) -> list[tuple[str, str]]:
        """All `(kind, path)` in the order of the ledger; a path twice if it is listed twice."""
        return [(kind, path) for kind in KINDS for path in getattr(self, kind)]


def load_ledger(root: Path) -> list[Milestone]:
    """The milestones of `root`'s `pyproject.toml`, in the order in which they are written.

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
    return [_milestone(name, table) for name, table in tables.items()]


def _milestone(name: str, table: dict[str, object]) -> Milestone:
    where = f"pyproject.toml, [tool.milestones.{name}]"
    if unknown := sorted(table.keys() - {"title", "predecessor", *KINDS}):
        raise LedgerError(f"{where}: unknown key {unknown[0]!r}; an entry has title, predecessor, {', '.join(KINDS)}.")
    title, predecessor = table.get("title"), table.get("predecessor")
    if not isinstance(title, str) or not isinstance(predecessor, str | None):
        raise LedgerError(f"{where}: title (required) and predecessor must be strings.")
    listed = {}
    for kind in KINDS:
        paths = table.get(kind, [])
        if not isinstance(paths, list) or not all(isinstance(path, str) and _is_inside(path) for path in paths):
            raise LedgerError(f"{where}: {kind} must be a list of paths inside the folder, like 'web/index.html'.")
        listed[kind] = tuple(paths)
    return Milestone(name=name, title=title, predecessor=predecessor, **listed)


def _is_inside(path: str) -> bool:
    """Whether this is the one way to write a path inside the folder, so that equal paths are equal strings."""
    return path != "." and path == str(PurePosixPath(path)) and ".." not in path.split("/") and path[0] != "/"


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
