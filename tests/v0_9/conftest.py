"""Contracts that take a ready model get one that the kernels compute: they would run on PyTorch else."""

from typing import Any

import pytest

from tests.kit.kernels import on_kernels, real_on_kernels
from v0_9_fast.kernels import bindings


@pytest.fixture
def kernels() -> Any:
    """The kernels in C; without a compiler there is nothing to test, and the engine is v0.8's."""
    loaded = bindings.load()
    if isinstance(loaded, str):
        pytest.skip(f"no kernels here: {loaded}")
    return loaded


@pytest.fixture(scope="session")
def tiny(tiny: Any) -> Any:
    """TINY on the kernels."""
    return on_kernels("v0_9_fast", tiny)


@pytest.fixture
def real(real: Any) -> Any:
    """SmolLM2-135M-Instruct on the kernels; freed with the other one."""
    return real_on_kernels("v0_9_fast", real)
