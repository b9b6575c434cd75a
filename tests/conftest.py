"""Fixtures that all tests share, the two rules of which tests run, and in what order.

A milestone's tests are found in `tests/v0_N`; the promises that every milestone keeps are written once, in
`tests/contracts`, and run for each milestone from there (`tests/v0_N/test_contracts.py`).

`make test` runs the real model, servers, and what is `thorough`, for the milestone that made a promise and for the
newest ones; `--all` (that is, `make test-all`) runs everything for every milestone. What lies in between is not left
untested: the ledger's test checks that most of its files are, byte by byte, those of a milestone that is tested.

The tests of the real model come first, all in one process, so that it is loaded once and freed early. The other tests
of a file stay together in a process, too, as they share what their file has made.
"""

import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tools.milestones import load_ledger

# No torch up here: the process that leads pytest-xdist's workers reads this file, too, and needs none.

ROOT = Path(__file__).parent.parent
ENGINE_OPTIONS = ("max_model_len", "seed", "num_blocks", "block_size")  # what goes to the engine, not to SCRIPT
MILESTONES = [milestone.name for milestone in load_ledger(ROOT)]
# Whose contracts run in full: the last one, and the last with an engine of its own. v0.10's is, byte by byte, v0.9's.
NEWEST = (MILESTONES[-1], "v0_9_fast")
SMALL_POOL = 32 * 2**20  # bytes
RAY = "test_ray"  # in the names of files that start Ray
REAL = "SmolLM2"  # in the names of tests that load the real model into this process
INTERRUPT = "an_interrupt_at_any_line"  # in the names of the thorough ones

pytest_plugins = ["tests.kit.peak_memory"]

# The same examples each time, no deadline and no complaint that they take long: CI machines are slow at times.
settings.register_profile("repository", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub
# One thread in the processes that tests start, too, and none of them says how busy this machine is.
os.environ["OMP_NUM_THREADS"] = "1"
# oneDNN keeps the code that it has made for each size of product, of which tests have many: up to 1,024 otherwise.
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "32"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also slow tests, and the real model for every milestone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        run = {True: [], False: []}
        for item in items:
            left_out = item.get_closest_marker("slow") or (_takes_long(item) and _is_in_between(item))
            run[not left_out].append(item)
        config.hook.pytest_deselected(items=run[False])
        items[:] = run[True]
    items.sort(key=lambda item: (not _has_real(item), not item.get_closest_marker("thorough")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests pytest-xdist keeps together: those of the real model in memory, those on Ray, else those of a file.

    Those that interrupt at any line take minutes. They are apart from the others of their file, and come early, so that
    no process is left with them at the end.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if RAY in file:
                return RAY  # one Ray at a time
            return REAL if REAL in test else f"{file} {INTERRUPT}" if INTERRUPT in test else file

    config.option.loadscopereorder = False  # it would put the longest of them, which are few, at the end
    return Scheduling(config, log)


def _takes_long(item: pytest.Item) -> bool:
    contract = item.function.__module__.rpartition(".")[2]
    return contract.startswith("http_") or any(item.get_closest_marker(name) for name in ("real_model", "thorough"))


def _has_real(item: pytest.Item | None) -> bool:
    """Whether a test asks for `real`; others of the real model convert it themselves, or start processes."""
    return item is not None and "real" in getattr(item, "fixturenames", ())


def _is_in_between(item: pytest.Item) -> bool:
    """Whether a promise is tested on a milestone that neither made it nor is one of the newest."""
    made_by = getattr(sys.modules[item.function.__module__], "SINCE", None)
    milestone = _milestone_of(item.path)
    return milestone not in (None, *NEWEST) and not milestone.startswith(f"{made_by}_")


def _milestone_of(test_file: Path) -> str | None:
    """`v0_1_single_request` for a file in `tests/v0_1`, `None` for one elsewhere."""
    return next((name for name in MILESTONES if name.startswith(f"{test_file.parent.name}_")), None)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """On a busy machine threads that wait for each other take many times as long, and the models are small."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def default_pool_bytes() -> Iterator[int]:
    """A KV pool whose size a test leaves open takes 32 MiB here, not its gigabyte; returns that default."""
    with pytest.MonkeyPatch.context() as patch:
        for memory in (importlib.import_module(f"{name}.memory") for name in MILESTONES[1:]):
            default = memory.CPU_POOL_BYTES
            patch.setattr(memory, "CPU_POOL_BYTES", SMALL_POOL)
        yield default


@pytest.fixture
def milestone(request: pytest.FixtureRequest) -> ModuleType:
    """The package under test, by the folder of the test."""
    name = _milestone_of(request.path)
    assert name is not None, f"{request.path} is not in the folder of a milestone"
    return importlib.import_module(name)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TINY: a random Llama with BYTE-TOK; a `Reference`."""
    from tests.kit.checkpoints import tiny_llama
    from tests.kit.tokenizers import byte_tokenizer, save_byte_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    hf = tiny_llama(folder, vocab_size=byte_tokenizer().vocab_size)  # a spare row could be the reference's choice
    save_byte_tokenizer(folder)
    return Reference(folder, hf)


@pytest.fixture(params=[REAL])
def real() -> Any:
    """SmolLM2-135M-Instruct; a `Reference`, of which each model takes half a gigabyte."""
    return _load_real()


@functools.cache
def _load_real() -> "Reference":
    from transformers import LlamaForCausalLM

    from common.weights import resolve

    folder = resolve(None)
    return Reference(folder, LlamaForCausalLM.from_pretrained(folder, dtype="float32").eval())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    from tests.kit.peak_memory import give_back_memory

    result = yield
    if _has_real(item) and not _has_real(nextitem):
        _load_real.cache_clear()
        gc.collect()  # transformers' models refer to themselves
    if _has_real(item) or nextitem is None or nextitem.path != item.path:
        give_back_memory()
    return result


class Reference:
    """A model: its `folder`, the same in transformers as `hf`, and that one's greedy tokens, computed once a run."""

    def __init__(self, folder: Path, hf: Any) -> None:
        from tests.kit.models import reference_tokens

        self.folder, self.hf = folder, hf
        self.llms: dict[str, Any] = {}  # of a milestone, see `load`
        self._tokens = functools.cache(lambda prompt, num: reference_tokens(hf, list(prompt), num))

    @functools.cached_property
    def ready(self) -> dict[str, Any]:
        """Our model and its tokenizer, loaded once a run: `LLM(**real.ready)`."""
        from common import loading

        model, tokenizer = loading.load(self.folder, None, device="auto", dtype="auto")
        return {"model": model, "tokenizer": tokenizer}

    def tokens(self, prompt_token_ids: list[int], num_tokens: int) -> list[int]:
        return self._tokens(tuple(prompt_token_ids), num_tokens)


@pytest.fixture
def kernels() -> Any:
    """v0.9's kernels in C; without a compiler there is nothing to test, and the engine is v0.8's."""
    from v0_9_fast.kernels import bindings

    loaded = bindings.load()
    if isinstance(loaded, str):
        pytest.skip(f"no kernels here: {loaded}")
    return loaded


@pytest.fixture
def script_llm(milestone: ModuleType) -> Callable[..., Any]:
    """`script_llm(ids, prompt)`: the milestone's engine around SCRIPT, with BYTE-TOK, for this prompt."""
    from tests.kit.models import ScriptModel
    from tests.kit.tokenizers import byte_tokenizer

    def build(script: list[int], prompt: str | list[int] = "Hi", tokenizer: Any = None, **options: Any) -> Any:
        tokenizer = tokenizer or byte_tokenizer()
        prompt_len = len(tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
        engine = {name: options.pop(name) for name in ENGINE_OPTIONS if name in options}
        return milestone.LLM(ScriptModel(script, prompt_len, **options), tokenizer=tokenizer, **engine)

    return build


@pytest.fixture
def load(milestone: ModuleType) -> Callable[[Reference], Any]:
    """`load(tiny)`: the milestone's `LLM` on that model, made once for tests that follow each other."""

    def build(model: Reference) -> Any:
        if milestone.__name__ not in model.llms:
            model.llms.clear()  # each has a pool, and tests come milestone by milestone
            model.llms[milestone.__name__] = milestone.LLM(**model.ready)
        return model.llms[milestone.__name__]

    return build


@pytest.fixture
def serve(milestone: ModuleType) -> Callable[..., Any]:
    """`with serve(model, ...) as server`: the milestone's server on a real socket; see `tests.kit.server.running`."""
    from tests.kit.server import running

    return functools.partial(running, milestone)


@pytest.fixture
def watch(milestone: ModuleType, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[Any], Any]]:
    """`watch(engine)` follows an engine's events, and compares; fails at the end where a comparison did.

    What a listener raises is logged and goes no further, so that the test would not see it.
    """
    from tests.kit.watching import Watcher

    yield functools.partial(Watcher, milestone)
    failed = [record for record in caplog.get_records("call") if "listener failed" in record.getMessage()]
    assert not failed, failed[0].exc_text


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser; tests that ask for it are skipped where there is none."""
    from tests.kit.browser import browser

    with browser() as found:
        yield found


@pytest.fixture
def serve_script(serve: Callable[..., Any]) -> Callable[..., Any]:
    """`with serve_script(ids) as server`: a server around SCRIPT, whose script begins after `server.chat()`'s prompt.

    With `prompt_len` it begins after a prompt of that length, such as the 2 of `server.complete()`.
    """
    from tests.kit.models import ScriptModel
    from tests.kit.server import USER
    from tests.kit.tokenizers import byte_tokenizer

    def build(script: list[int], prompt_len: int | None = None, **options: Any) -> Any:
        prompt_len = prompt_len or len(byte_tokenizer().chat_token_ids(USER))
        return serve(ScriptModel(script, prompt_len), **({"num_blocks": 200, "block_size": 4} | options))

    return build
