"""The citation checker, on a made-up package: what is not there is found, what is there is not."""

import pytest

from tools.citations import citations, fault, symbols

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


def test_our_own_files_are_no_citations(check):
    assert check("`common/llama.py`, `v0_1_single_request/llm.py` · `LLM`, `tools/ledger.py` and `kv_cache.py`") == []
