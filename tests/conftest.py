"""Fixtures that all tests share, and the two rules of which tests run.

A milestone's tests are found in `tests/v0_N`; the promises that every milestone keeps are written once, in
`tests/contracts`, and run for each milestone from there (`tests/v0_N/test_contracts.py`).

`make test` runs the real model for the milestone that made a promise and for the newest one; `--all` (that is,
`make test-all`) runs everything for every milestone.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from common.weights import resolve
from tests.kit.checkpoints import tiny_llama
from tests.kit.models import ScriptModel, reference_tokens
from tests.kit.tokenizers import byte_tokenizer, save_byte_tokenizer
from tools.milestones import load_ledger

ROOT = Path(__file__).parent.parent
ENGINE_OPTIONS = ("max_model_len", "seed", "num_blocks", "block_size")  # what goes to the engine, not to SCRIPT
MILESTONES = [milestone.name for milestone in load_ledger(ROOT)]

# One thread: on a busy machine threads that wait for each other take many times as long, and the models are small.
torch.set_num_threads(1)

# The same examples each time, no deadline and no complaint that they take long: CI machines are slow at times.
settings.register_profile("repository", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also slow tests, and the real model for every milestone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    run = {True: [], False: []}
    for item in items:
        left_out = item.get_closest_marker("slow") or (item.get_closest_marker("real_model") and _is_in_between(item))
        run[not left_out].append(item)
    config.hook.pytest_deselected(items=run[False])
    items[:] = run[True]


def _is_in_between(item: pytest.Item) -> bool:
    """Whether a promise is tested on a milestone that neither made it nor is the newest."""
    made_by = getattr(sys.modules[item.function.__module__], "SINCE", None)
    milestone = _milestone_of(item.path)
    return milestone not in (None, MILESTONES[-1]) and not milestone.startswith(f"{made_by}_")


def _milestone_of(test_file: Path) -> str | None:
    """`v0_1_single_request` for a file in `tests/v0_1`, `None` for one elsewhere."""
    return next((name for name in MILESTONES if name.startswith(f"{test_file.parent.name}_")), None)


@pytest.fixture
def milestone(request: pytest.FixtureRequest) -> ModuleType:
    """The package under test, by the folder of the test."""
    name = _milestone_of(request.path)
    assert name is not None, f"{request.path} is not in the folder of a milestone"
    return importlib.import_module(name)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TINY: a random Llama with BYTE-TOK, as `tiny.folder`, and as transformers' model, `tiny.hf`."""
    folder = tmp_path_factory.mktemp("tiny")
    hf = tiny_llama(folder, vocab_size=byte_tokenizer().vocab_size)  # a spare row could be the reference's choice
    save_byte_tokenizer(folder)
    return Reference(folder, hf)


@pytest.fixture(scope="session")
def real() -> Any:
    """SmolLM2-135M-Instruct, converted once, and the same weights in transformers."""
    from transformers import LlamaForCausalLM

    folder = resolve(None)
    return Reference(folder, LlamaForCausalLM.from_pretrained(folder, dtype="float32").eval())


class Reference:
    """A folder, the same model in transformers, and its greedy tokens, computed once a run."""

    def __init__(self, folder: Path, hf: Any) -> None:
        self.folder, self.hf = folder, hf
        self._tokens = functools.cache(lambda prompt, num: reference_tokens(hf, list(prompt), num))

    def tokens(self, prompt_token_ids: list[int], num_tokens: int) -> list[int]:
        return self._tokens(tuple(prompt_token_ids), num_tokens)


@pytest.fixture
def script_llm(milestone: ModuleType) -> Callable[..., Any]:
    """`script_llm(ids, prompt)`: the milestone's engine around SCRIPT, with BYTE-TOK, for this prompt."""

    def build(script: list[int], prompt: str | list[int] = "Hi", tokenizer: Any = None, **options: Any) -> Any:
        tokenizer = tokenizer or byte_tokenizer()
        prompt_len = len(tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
        engine = {name: options.pop(name) for name in ENGINE_OPTIONS if name in options}
        return milestone.LLM(ScriptModel(script, prompt_len, **options), tokenizer=tokenizer, **engine)

    return build


_LOADED: dict[tuple[str, Path], Any] = {}


@pytest.fixture
def load(milestone: ModuleType) -> Callable[[Path], Any]:
    """`load(folder)`: the milestone's `LLM` on that folder, loaded once a run."""

    def build(folder: Path) -> Any:
        key = (milestone.__name__, folder)
        for other in [other for other in _LOADED if other[0] != milestone.__name__]:
            del _LOADED[other]  # milestone follows milestone, and a real model takes gigabytes
        if key not in _LOADED:
            _LOADED[key] = milestone.LLM(folder)
        return _LOADED[key]

    return build


@pytest.fixture
def serve(milestone: ModuleType) -> Callable[..., Any]:
    """`with serve(model, ...) as server`: the milestone's server on a real socket; see `tests.kit.server.running`."""
    from tests.kit.server import running

    return functools.partial(running, milestone)


@pytest.fixture
def serve_script(serve: Callable[..., Any]) -> Callable[..., Any]:
    """`with serve_script(ids) as server`: a server around SCRIPT, whose script begins after `server.chat()`'s prompt.

    With `prompt_len` it begins after a prompt of that length, such as the 2 of `server.complete()`.
    """
    from tests.kit.server import USER

    def build(script: list[int], prompt_len: int | None = None, **options: Any) -> Any:
        prompt_len = prompt_len or len(byte_tokenizer().chat_token_ids(USER))
        return serve(ScriptModel(script, prompt_len), **({"num_blocks": 200, "block_size": 4} | options))

    return build
