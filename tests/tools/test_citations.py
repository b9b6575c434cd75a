"""The citation checker, on a made-up package: what is not there is found, what is there is not."""

import sys
from pathlib import Path

import pytest

from common.measuring.recipe import documents
from tools import citations as module
from tools.citations import ROOT, citations, fault, folder_for, num_code_lines, symbols

SOURCE = """
LIMIT = 1
class Pool:
    size: int = 3
    def __init__(self, other):
        self.blocks = []
        local = 1
        if local:
            self.left, self.right = [], []
            inside = 2
            other.thing = 3
        def nested(): ...
    class Inner:
        def run(self): ...
if True:
    def guarded(): ...
async def step(): ...
"""


@pytest.fixture
def check(tmp_path):
    (tmp_path / "vllm" / "core").mkdir(parents=True)
    (tmp_path / "vllm" / "core" / "pool.py").write_text(SOURCE)

    def run(text):
        document = tmp_path / "NOTES.md"
        document.write_text(text)
        return [fault(citation, tmp_path / "vllm") for citation in citations(document)]

    return run


def test_functions_classes_methods_fields_and_guarded_names_are_symbols():
    names = {
        "LIMIT",
        "Pool",
        "Pool.size",
        "Pool.__init__",
        "Pool.blocks",
        "Pool.left",
        "Pool.right",
        "Pool.Inner",
        "Pool.Inner.run",
        "guarded",
    }
    assert symbols(SOURCE) == names | {"step"}


@pytest.mark.parametrize("symbol", ["Pool", "Pool.blocks", "Pool.Inner.run", "guarded", "step", "LIMIT"])
def test_a_citation_of_what_is_there_holds(check, symbol):
    assert check(f"See `core/pool.py` · `{symbol}`, and `core/pool.py`.") == [None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("`core/pool.py` · `Pool.lost`", "core/pool.py has no Pool.lost"),
        ("`core/pool.py` ·\n`run`", "core/pool.py has no run"),
        ("`core/pool.py` · `Pool.local`", "core/pool.py has no Pool.local"),
        ("`core/lost.py` · `Pool`", "there is no file core/lost.py"),
        ("in `core/lost.py`", "there is no file core/lost.py"),
    ],
)
def test_a_citation_of_what_is_lost_is_a_fault(check, text, message):
    assert check(text) == [message]


COUNTED = '''"""A docstring

of three lines."""

import functools  # not a comment's line


@functools.cache
async def run():
    """One line."""
    # a comment

    return """text

    # of three lines, one of them empty"""


class Pool:
    """Two
    lines."""

    @property
    def size(self): return 1

    @size.setter
    def size(self, value):
        self.value = (
            value
        )
'''


@pytest.mark.parametrize(
    ("symbol", "num_lines"),
    [(None, 13), ("run", 4), ("Pool", 8), ("Pool.size", 7), ("Pool.value", 0)],
)
def test_lines_of_code_are_those_without_blank_lines_comments_and_docstrings(symbol, num_lines):
    assert num_code_lines(COUNTED, symbol) == num_lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("`core/pool.py` · `Pool` (12 lines)", None),
        ("`core/pool.py`\n(16 lines)", None),
        ("`core/pool.py` · `step` (1 line)", None),
        ("`core/pool.py` · `Pool` (1,011 lines)", "core/pool.py · Pool has 12 lines of code, not 1,011"),
        ("`core/pool.py` (3 lines)", "core/pool.py has 16 lines of code, not 3"),
    ],
)
def test_a_number_of_lines_is_checked(check, text, message):
    assert check(text) == [message]


def test_each_file_is_looked_for_in_its_own_project(tmp_path):
    (tmp_path / "nanovllm").mkdir()
    assert folder_for("v1/core/block_pool.py", Path("vllm"), []) == Path("vllm")
    assert folder_for("v0_4_http/scheduler.py", Path("vllm"), []) == ROOT
    assert folder_for("nanovllm/config.py", Path("vllm"), [tmp_path]) == tmp_path
    assert folder_for("transformers/generation/utils.py", Path("vllm"), [tmp_path]) is None


def test_a_pattern_for_all_milestones_is_no_citation(check):
    assert check("`tests/v0_N/test_contracts.py`") == []


def test_what_the_documents_say_of_this_repository_holds():
    ours = [
        citation
        for document in documents(ROOT)
        for citation in citations(document)
        if folder_for(citation.file, Path("vllm"), []) == ROOT
    ]
    assert ours
    assert [
        f"{citation.document.name}:{citation.line}: {text}" for citation in ours if (text := fault(citation, ROOT))
    ] == []


def test_lines_are_printed_and_a_fault_is_an_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm" / "core").mkdir(parents=True)
    (tmp_path / "vllm" / "core" / "pool.py").write_text(SOURCE)
    document = tmp_path / "NOTES.md"
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["citations", "--source", str(tmp_path / "vllm"), "--lines"])
    document.write_text("`core/pool.py` · `Pool`, and `nanovllm/config.py` is not here.")
    assert module.main() == 0
    printed = capsys.readouterr().out
    assert "     12  core/pool.py · Pool\n" in printed
    assert "0 wrong; 1 of other projects not checked" in printed
    document.write_text("`core/pool.py` · `Lost`")
    assert module.main() == 1
    assert "NOTES.md:1: core/pool.py has no Lost" in capsys.readouterr().out
