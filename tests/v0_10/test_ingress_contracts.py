"""The promises of the HTTP layer, kept through an ingress and one replica behind it, without Ray."""

import functools

import pytest

import v0_10_scale_out
from tests.contracts import promises
from tests.v0_10.kit import ingress


@pytest.fixture
def milestone():
    return v0_10_scale_out


@pytest.fixture
def serve():
    """`with serve(model, ...) as server`, as everywhere: `server.engine` is the replica's."""
    return functools.partial(lambda model, **options: ingress([model], **options))


def _http():
    return {name: test for name, test in promises("v0_8").items() if test.__module__.startswith("tests.contracts.http_")}


globals().update(_http())
