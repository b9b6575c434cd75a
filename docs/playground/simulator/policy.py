"""The policy files of a milestone, loaded as a package of their own, and functions in them replaced by source text.

Nothing of the policy is rewritten here: the files' text comes from outside (`Sources`), is compiled under its own path,
and runs. An edit is the text of one function, which takes the place of the original's text in its file.
"""

import ast
import itertools
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Sources = Mapping[str, str]  # of one milestone: a file's name, and its text
ORDER = ("events.py", "hash_chain.py", "request.py", "block_manager.py", "scheduler.py", "step_events.py")
_numbers = itertools.count()


class EditError(Exception):
    """An edit that is no Python, or names nothing; `line` is the line of the edit, from 1, if one is known."""

    def __init__(self, message: str, edit: str, line: int | None = None) -> None:
        super().__init__(message)
        self.edit, self.line = edit, line


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a file: its dotted name, its first and last line (from 1), and its text, not indented."""

    name: str
    first: int
    last: int
    text: str


def functions(source: str) -> Iterator[Function]:
    """Every function and method, in their order; decorators belong to them."""
    lines = source.split("\n")
    for node in ast.parse(source).body:
        is_class = isinstance(node, ast.ClassDef)
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                first = min([inner.lineno, *(decorator.lineno for decorator in inner.decorator_list)])
                last = inner.end_lineno or inner.lineno
                text = textwrap.dedent("\n".join(lines[first - 1 : last]))
                yield Function(f"{node.name}.{inner.name}" if is_class else inner.name, first, last, text)  # type: ignore[attr-defined]


def function_of(source: str, name: str) -> Function | None:
    """The one of this dotted name."""
    return next((function for function in functions(source) if function.name == name), None)


def swap(source: str, name: str, text: str, edit: str) -> str:
    """The file with a function's text replaced.

    Raises:
        EditError: there is no such function, or the text is no Python.
    """
    found = function_of(source, name)
    if found is None:
        raise EditError(f"There is no function {name} in this file.", edit)
    text = textwrap.dedent(text).strip("\n")
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise EditError(f"{error.msg} (line {error.lineno})", edit, error.lineno) from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == name.rpartition(".")[2] for node in body):
        raise EditError(f"The edited text has no function {name.rpartition('.')[2]}.", edit)
    if "." in name:
        text = textwrap.indent(text, "    ")
    lines = source.split("\n")
    return "\n".join([*lines[: found.first - 1], text, *lines[found.last :]])


@dataclass(frozen=True, slots=True)
class Place:
    """Where something failed: the file, the function, the line in each of them (from 1), and the line's text."""

    file: str
    function: str | None
    line: int
    line_in_function: int | None
    text: str
    is_edited: bool


class Policy:
    """The loaded modules of a milestone.

    Args:
        milestone: its folder.
        sources: its files.
        edits: by `"file:Class.function"`, the text that takes that function's place.

    Raises:
        EditError: an edit cannot be loaded.
    """

    def __init__(self, milestone: str, sources: Sources, edits: Mapping[str, str] | None = None) -> None:
        self.milestone, self.edits = milestone, dict(edits or {})
        self.sources = dict(sources)
        for edit, text in self.edits.items():
            file, _, name = edit.partition(":")
            if file not in self.sources:
                raise EditError(f"{milestone} has no file {file}.", edit)
            self.sources[file] = swap(self.sources[file], name, text, edit)
        self.modules: dict[str, types.ModuleType] = {}
        package = types.ModuleType(f"policy_{next(_numbers)}")
        package.__path__ = []
        self._names = [package.__name__]
        sys.modules[package.__name__] = package
        for file in filter(self.sources.__contains__, ORDER):
            module = types.ModuleType(f"{package.__name__}.{file.removesuffix('.py')}")
            module.__package__ = package.__name__
            sys.modules[module.__name__] = self.modules[file] = module  # a dataclass asks for its module
            self._names.append(module.__name__)
            try:
                exec(compile(self.sources[file], f"{milestone}/{file}", "exec"), module.__dict__)
            except Exception as error:
                self.unload()
                edit = next((edit for edit in self.edits if edit.startswith(f"{file}:")), file)
                raise EditError(f"{type(error).__name__}: {error}", edit) from error

    def unload(self) -> None:
        """Let the modules go; a policy that runs keeps its own."""
        for name in self._names:
            sys.modules.pop(name, None)

    def __getitem__(self, name: str) -> Any:
        """Something that one of the modules defines, by its name."""
        return next(vars(module)[name] for module in reversed(self.modules.values()) if name in vars(module))

    def __contains__(self, name: str) -> bool:
        return any(name in vars(module) for module in self.modules.values())

    def place(self, traceback: types.TracebackType | None) -> Place | None:
        """The line that an error came from: the last one in an edited function, or else the last one in the policy."""
        places = []
        while traceback is not None:
            milestone, _, file = traceback.tb_frame.f_code.co_filename.rpartition("/")
            if milestone == self.milestone and file in self.sources:
                places.append(self._place(file, traceback.tb_lineno))
            traceback = traceback.tb_next
        places = [place for place in places if place.is_edited] or places
        return places[-1] if places else None

    def _place(self, file: str, line: int) -> Place:
        source = self.sources[file]
        around = next((each for each in functions(source) if each.first <= line <= each.last), None)
        text = source.split("\n")[line - 1].strip()
        if around is None:
            return Place(file, None, line, None, text, False)
        is_edited = f"{file}:{around.name}" in self.edits
        return Place(file, around.name, line, line - around.first + 1, text, is_edited)


def replaced(text: str, pairs: Sequence[Sequence[str]]) -> str:
    """A function's text with pieces of it replaced, as presets and solutions say it: each piece is there exactly once.

    Raises:
        EditError: it is not.
    """
    for old, new in pairs:
        if text.count(old) != 1:
            raise EditError(f"{old!r} is there {text.count(old)} times, not once.", "")
        text = text.replace(old, new)
    return text
