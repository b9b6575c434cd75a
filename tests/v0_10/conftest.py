"""What Ray reads while it is imported, which may be in any test; and what `tests/conftest.py` does for the ledger's

milestones, for this one until it stands there.
"""

import os
from collections.abc import Iterator

import pytest

from tests.conftest import SMALL_POOL
from tests.v0_10.ray_kit import ENVIRONMENT
from v0_10_scale_out import memory
from v0_10_scale_out.cluster.cluster_args import ClusterArgs
from v0_10_scale_out.cluster.local import prepare

os.environ.update(ENVIRONMENT)
prepare(ClusterArgs())


@pytest.fixture(scope="session", autouse=True)
def small_pool() -> Iterator[None]:
    """A KV pool whose size a test leaves open would take a gigabyte, and a million blocks of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "CPU_POOL_BYTES", SMALL_POOL)
        yield
