"""What the pages ask the reader to type: it runs, and prints what the page says.

- A `pycon` block is a session: it is run, and its output compared. On a lesson's page all of them are one session.
  Inside a solution (that is, indented) it needs the solution's change.
- A `console` block holds commands, the lines after `$ `. In every run they are checked as far as that is cheap: a
  module takes its flags, a test that `-k` names is there, `make` knows the target, a body is one the server takes.
  `pytest --all` also runs them. A block that cannot be checked says why, in a comment before it:

      <!-- not run: needs vLLM's environment -->

- A `diff` block is an exercise's solution: it applies to the engines as they are, and `pytest --all` runs the
  exercise's check on a copy that it was applied to.

Files and symbols that the pages name are checked by `tests/tools/test_citations.py`.
"""

import argparse
import ast
import doctest
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sources import split_fences

from tests.conftest import REAL
from tests.contracts import promises

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MILESTONE_PAGES = sorted((DOCS / "milestones").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("glossary", "faq", "exercises", "server", "lab")),
    *MILESTONE_PAGES,
]
OPENING = re.compile(r"(?P<indent> *)`{3,} *(?P<language>\w*)(?:.*title=\"(?P<title>[^\"]+)\")?")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->\s*\Z")
SERVER = "v0_4_http"  # its module runs until a signal comes, like those of
SERVERS = (SERVER, "v0_6_prefix_cache", "v0_7_speculative", "v0_8_visualizer", "v0_9_fast", "websockets")
HARMLESS = ("echo", "source")  # which change nothing that anybody would look at
COPIED = ("common", "tests", "tools", "v0_*", "pyproject.toml")  # what an exercise needs


@dataclass(frozen=True)
class Block:
    """A fence of a page: what is in it, under which heading, and why it is not run, if a comment says so."""

    page: Path
    section: str
    language: str
    text: str
    title: str | None
    is_solution: bool
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.section}"


def blocks(page: Path) -> Iterator[Block]:
    """The fences of a page, in order."""
    section = before = ""
    for is_code, text in split_fences(page.read_text(encoding="utf-8")):
        if not is_code:
            section = (re.findall(r"^#+ (.+)$", text, re.MULTILINE) or [section])[-1]
            before = text
            continue
        opening, _, rest = text.partition("\n")
        match = OPENING.match(opening)
        assert match is not None, f"{page.name}: {opening}"
        body = textwrap.dedent(rest.rpartition("\n")[0]) + "\n"
        marked = NOT_RUN.search(before)
        reason = marked["reason"] if marked else None
        yield Block(page, section, match["language"], body, match["title"], bool(match["indent"]), reason)
        before = ""


def of(language: str, pages: list[Path] = PAGES) -> list[Block]:
    """Every block of a language that is to be run."""
    return [block for page in pages for block in blocks(page) if block.language == language and block.reason is None]


def commands(block: Block) -> list[str]:
    """The commands of a `console` block; one may go on over several lines, by a backslash or within quotes."""
    found, lines = [], iter(block.text.split("\n"))
    for line in lines:
        if not line.startswith("$ "):
            continue
        command = line[2:]
        while not is_whole(command):
            command += "\n" + next(lines)
        found.append(command)
    return found


def is_whole(command: str) -> bool:
    try:
        words(command)
    except ValueError:  # a quotation without its end, or a backslash with nothing behind it
        return False
    return True


def words(command: str) -> list[list[str]]:
    """The words of each program of a pipe, without variables that are set before it, and without a comment."""
    parts: list[list[str]] = [[]]
    for word in shlex.split(command.replace("\\\n", " "), comments=True):
        if word in ("|", "&&"):
            parts.append([])
        elif parts[-1] or not re.fullmatch(r"[A-Z_]+=\S*", word):
            parts[-1].append(word)
    return parts


def is_run(command: str) -> bool:
    """Whether a command is run here: tests run themselves, the server has a test below, make's targets are CI's.

    The lab's commands change a folder in which somebody may be at work; `tests/tools/test_lab.py` runs them elsewhere.
    """
    modules = [arguments[1] for program, *arguments in words(command) if program == "python"]
    return bool(modules) and not {"pytest", "tools.lab", *SERVERS} & set(modules)


def needs_model(block: Block) -> bool:
    return bool(re.search(r"LLM\((max_model_len=\d+)?\)|resolve\(None\)", block.text))


def sessions() -> Iterator[Block]:
    """The sessions that are run: on a lesson's page they are one, whose parts go on from each other."""
    found = [block for block in of("pycon") if not block.is_solution]
    yield from (block for block in found if block.page not in MILESTONE_PAGES)
    for page in MILESTONE_PAGES:
        parts = [block for block in found if block.page == page]
        if parts:
            yield replace(parts[0], section="session", text="".join(part.text for part in parts))


SESSIONS = [
    pytest.param(block, id=f"{REAL}, {block}", marks=[pytest.mark.real_model])
    if needs_model(block)
    else pytest.param(block, id=str(block))
    for block in sessions()
]
SOLVED = list(dict.fromkeys(block.section for block in of("diff", [DOCS / "exercises.md"])))
# What runs on the tree as it is: an exercise's check wants the change first.
COMMANDS = [
    pytest.param(command, block, id=f"{block.page.stem}: {command}"[:100])
    for block in of("console")
    if block.section not in SOLVED
    for command in commands(block)
    if is_run(command)
]


def section(name: str) -> list[Block]:
    return [block for block in blocks(DOCS / "exercises.md") if block.section == name]


@pytest.fixture
def titled_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the exercises ask the reader to save."""
    write_titled_files(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def write_titled_files(folder: Path) -> None:
    for block in blocks(DOCS / "exercises.md"):
        if block.title is not None:
            (folder / block.title).write_text(block.text, encoding="utf-8")


@pytest.mark.usefixtures("titled_files")
@pytest.mark.parametrize("block", SESSIONS)
def test_a_session_prints_what_the_page_says(block: Block) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, {"__name__": "page"}, str(block), str(block.page), 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_can_be_typed(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in of("console", [page]):
        for command in commands(block):
            for program, *arguments in words(command):
                fault = fault_of(program, arguments, monkeypatch, capsys)
                assert fault is None, f"{block}\n$ {command}\n{fault}"


def fault_of(
    program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str | None:
    """Why a program would refuse its arguments."""
    match program, arguments:
        case "python", ["-m", "pytest", *rest]:
            return pytest_fault(rest)
        case "python", ["-m", module, *rest]:
            return flags_fault(module, rest, monkeypatch, capsys)
        case "make", [target]:
            known = re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return None if known else f"there is no target {target}"
        case "curl", _:
            return body_fault(arguments)
        case program, _ if program in HARMLESS:
            return None
    return "it is neither run nor checked: say why in a comment before the block, <!-- not run: ... -->"


class FlagsAreRightError(Exception):
    """The flags are right, and nothing more is wanted."""


def flags_fault(
    module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str | None:
    """Runs the module up to the point where it has read its flags."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_leave(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        parse(self, args, namespace)
        raise FlagsAreRightError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_leave)
        patch.setattr(sys, "argv", [module, *arguments])
        try:
            runpy.run_module(module, run_name="__main__")
        except FlagsAreRightError:
            return None
        except ImportError as error:
            return str(error)
        except SystemExit:
            return capsys.readouterr().err
    return f"{module} reads no flags"


def pytest_fault(arguments: list[str]) -> str | None:
    """Whether paths are there, and whether a `-k` of words, `and` and `or` selects anything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", default="")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("paths", nargs="*")
    options = parser.parse_args(arguments)
    names: list[str] = []
    for path in options.paths:
        if not (ROOT / path).exists():
            return f"there is no {path}"
        names += [name for file in sorted((ROOT / path).rglob("test_*.py")) or [ROOT / path] for name in names_in(file)]
    for clause in options.k.split(" or "):
        if not any(all(word in name for word in clause.split(" and ")) for name in names):
            return f"-k {clause!r} selects nothing"
    return None


def names_in(file: Path) -> Iterator[str]:
    """A module's tests, as pytest knows them: `-k` also looks at the names of file and folders."""
    where = file.relative_to(ROOT).as_posix()
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    names = [function.name for function in functions if function.name.startswith("test_")]
    if file.name == "test_contracts.py":
        names += promises(file.parent.name)
    yield from (f"{where}::{name}" for name in names)


def body_fault(arguments: list[str]) -> str | None:
    """Whether the server of the newest milestone would take a curl's body."""
    protocol = importlib.import_module(f"{SERVER}.server.protocol")
    [url] = [word for word in arguments if word.startswith("http://")]
    body = json.loads(arguments[arguments.index("-d") + 1])
    kinds = {"chat/completions": protocol.ChatCompletionRequest, "completions": protocol.CompletionRequest}
    kind = kinds.get(url.partition("/v1/")[2])
    if kind is None:
        return f"{url} takes no body"
    request = kind.model_validate(body)
    request.sampling_params()
    request.check_extra_fields()
    return f"it has unknown fields: {', '.join(request.model_extra)}" if request.model_extra else None


@pytest.mark.parametrize("name", SOLVED)
def test_a_solution_applies_to_the_engines_as_they_are(name: str) -> None:
    apply(section(name), ROOT, "--check")


def apply(solution: list[Block], folder: Path, *options: str) -> None:
    for block in solution:
        if block.language == "diff":
            git = ["git", "apply", *options, "-"]
            done = subprocess.run(git, input=block.text, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_the_glossary_is_in_order() -> None:
    terms = re.findall(r"^## (.+)$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert terms == sorted(terms, key=str.casefold)
    assert len(terms) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("command", "block"), COMMANDS)
def test_a_command_runs_and_answers_as_the_page_shows(command: str, block: Block, tmp_path: Path) -> None:
    for file in ROOT.iterdir():
        if not file.name.startswith("."):
            (tmp_path / file.name).symlink_to(file)
    answer = shell(command, tmp_path)
    if block.page in MILESTONE_PAGES[:2]:  # which show the answer, below the command; later ones show tables of times
        assert " ".join(answer.split()) in " ".join(block.page.read_text(encoding="utf-8").split())


@pytest.mark.slow
def test_the_server_of_the_pages_answers_their_curls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    asked = [command for block in of("console") for command in commands(block) if command.startswith("curl ")]
    assert len(asked) >= 2
    command = [sys.executable, "-m", SERVER, "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert any(line.startswith("Listening on") for line in server.stderr)
            for curl in asked:
                assert shell(curl.replace(":8000", f":{port}"), ROOT).rstrip().endswith("data: [DONE]")
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVED)
def test_a_solution_passes_its_exercises_check(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for path in [path for pattern in COPIED for path in ROOT.glob(pattern)]:
        if path.is_dir():
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, copy)
    solution = section(name)
    apply(solution, copy)
    write_titled_files(copy)
    for block in solution:
        if block.language == "pycon" and block.is_solution:
            (copy / "session.txt").write_text(block.text, encoding="utf-8")
            shell("python -m doctest session.txt", copy)
        elif block.language == "console" and block.reason is None:
            for command in commands(block):
                shell(command, copy)


def shell(command: str, folder: Path) -> str:
    """Run a command as a reader would, in the environment of these tests; its standard output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    start = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    seconds = time.monotonic() - start
    assert done.returncode == 0, f"after {seconds:.0f} s: {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout
