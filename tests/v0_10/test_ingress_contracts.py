"""The promises of the HTTP layer, kept through an ingress and one replica behind it, without Ray."""

import pytest

import v0_10_scale_out
from tests.contracts import http_memory, http_metrics, http_speculation, promises
from tests.v0_10.kit import ingress

LEFT_OUT = {
    http_memory.test_a_server_that_has_ended_leaves_neither_its_model_nor_its_kv_after,  # a replica ends as a process
    # These two know the whole text of a sample, which has the label `replica` more here.
    http_metrics.test_metrics_of_whole_requests_are_those_of_vllms_dashboard,
    http_speculation.test_metrics_count_drafts_and_those_that_were_right_under_vllms_names,
}


@pytest.fixture
def milestone():
    return v0_10_scale_out


@pytest.fixture
def serve():
    """`with serve(model, ...) as server`, as everywhere: `server.engine` is the replica's."""
    return lambda model, **options: ingress([model], **options)


globals().update(
    {
        name: test
        for name, test in promises("v0_10").items()
        if test.__module__.startswith("tests.contracts.http_") and test not in LEFT_OUT
    }
)
