"""Contracts that take a ready model get one that the kernels compute: they would run on PyTorch else."""

import copy
import gc
from typing import Any

import pytest

from tests.kit.peak_memory import give_back_memory
from v0_9_fast import loader
from v0_9_fast.engine_args import EngineArgs
from v0_9_fast.kernels import bindings


@pytest.fixture
def kernels() -> Any:
    """The kernels in C; without a compiler there is nothing to test, and the engine is v0.8's."""
    loaded = bindings.load()
    if isinstance(loaded, str):
        pytest.skip(f"no kernels here: {loaded}")
    return loaded


def on_kernels(reference: Any) -> Any:
    """The same `Reference`, whose `ready` model is v0.9's; the other one's, which takes memory, is freed."""
    reference.__dict__.pop("ready", None)
    reference.llms.clear()
    gc.collect()
    give_back_memory()
    own = copy.copy(reference)
    own.llms = {}
    args = EngineArgs() if isinstance(bindings.load(), str) else EngineArgs(linear_backend="c")  # to be repeatable
    model, tokenizer = loader.load(reference.folder, None, args)
    own.__dict__["ready"] = {"model": model, "tokenizer": tokenizer}
    return own


@pytest.fixture(scope="session")
def tiny(tiny: Any) -> Any:
    """TINY on the kernels."""
    return on_kernels(tiny)


@pytest.fixture
def real(real: Any) -> Any:
    """SmolLM2-135M-Instruct on the kernels; freed with the other one."""
    if not hasattr(real, "on_kernels"):
        real.on_kernels = on_kernels(real)
    return real.on_kernels
