"""Contracts run on the kernels, as v0.9's do; and what Ray reads while it is imported, which may be in any test."""

import os
from typing import Any

import pytest

from tests.kit.kernels import on_kernels
from tests.v0_10.ray_kit import ENVIRONMENT
from v0_10_scale_out.cluster.cluster_args import ClusterArgs
from v0_10_scale_out.cluster.local import prepare

os.environ.update(ENVIRONMENT)
prepare(ClusterArgs())


@pytest.fixture(scope="session")
def tiny(tiny: Any) -> Any:
    """TINY on the kernels."""
    return on_kernels("v0_10_scale_out", tiny)
