"""Contracts that take a ready model get one that the kernels compute: they would run on PyTorch else."""

from typing import Any

import pytest

from tests.kit.kernels import on_kernels


@pytest.fixture(scope="session")
def tiny(tiny: Any) -> Any:
    """TINY on the kernels."""
    return on_kernels("v0_9_fast", tiny)


@pytest.fixture
def real(real: Any) -> Any:
    """SmolLM2-135M-Instruct on the kernels; freed with the other one."""
    if not hasattr(real, "on_kernels"):
        real.on_kernels = on_kernels("v0_9_fast", real)
    return real.on_kernels
