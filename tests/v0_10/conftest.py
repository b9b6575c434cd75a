"""What `tests/conftest.py` does for the milestones of the ledger, for this one until it stands there."""

from collections.abc import Iterator

import pytest

from tests.conftest import SMALL_POOL
from v0_10_scale_out import memory


@pytest.fixture(scope="session", autouse=True)
def small_pool() -> Iterator[None]:
    """A KV pool whose size a test leaves open would take a gigabyte, and a million blocks of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "CPU_POOL_BYTES", SMALL_POOL)
        yield
