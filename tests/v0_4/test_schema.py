"""The server against its own OpenAPI document: whatever is sent, it answers as the document says, never with a 500.

schemathesis makes the requests, the same ones each time. Its own pytest plugin does not know pytest 9, so that its
engine is called here, as its command line does.
"""

import importlib
from collections import Counter

import pytest

pytest.importorskip("schemathesis")

import schemathesis
from schemathesis.config import (
    ChecksConfig,
    CoveragePhaseConfig,
    GenerationConfig,
    PhasesConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
    StatefulPhaseConfig,
)
from schemathesis.engine import events, from_schema

from tests.kit.server import running

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
ROUTES = {
    "POST /v1/chat/completions": {200, 400, 401, 404, 413, 500, 503},
    "POST /v1/completions": {200, 400, 401, 404, 413, 500, 503},
    "GET /v1/models": {200, 401, 500},
    "GET /v1/models/{name}": {200, 401, 404, 500},
    "POST /tokenize": {200, 400, 401, 404, 413, 500},
    "POST /detokenize": {200, 400, 401, 404, 413, 500},
    "GET /health": {200, 500, 503},
    "GET /ping": {200, 500, 503},
    "POST /ping": {200, 500, 503},
    "GET /version": {200, 500},
    "GET /metrics": {200, 500},
}


@pytest.fixture(scope="module")
def server(tiny):
    # A short context, so that no answer is long, whatever is asked for.
    options = {"max_model_len": 64, "num_blocks": 400, "max_num_seqs": 128}
    with running(importlib.import_module("v0_4_http"), tiny.folder, **options) as server:
        yield server


def examine(server, max_examples, *, coverage):
    """What was wrong with which answer, and how often each status came from each route.

    Args:
        server: it is asked.
        max_examples: random requests for each route.
        coverage: whether every field of every body is put through its edges and past them, too.
    """
    project = ProjectConfig(
        checks=ChecksConfig.from_dict({"enabled": False} | {name: {"enabled": True} for name in CHECKS}),
        generation=GenerationConfig(deterministic=True, max_examples=max_examples, database="none"),
        phases=PhasesConfig(
            coverage=CoveragePhaseConfig(enabled=coverage), stateful=StatefulPhaseConfig(enabled=False)
        ),
        continue_on_failure=True,
    )
    config = SchemathesisConfig(seed=0, projects=ProjectsConfig(default=project))
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)
    failures, statuses = [], {route: Counter() for route in ROUTES}
    for event in from_schema(document).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if not isinstance(event, events.ScenarioFinished):
            continue
        interactions = event.recorder.interactions
        for interaction in interactions.values():
            assert interaction.response is not None, f"no answer to {interaction.request}"
            if interaction.request.method == event.recorder.label.split()[0]:  # others are sent, too: 405
                statuses[event.recorder.label][interaction.response.status_code] += 1
        for case, checks in event.recorder.checks.items():
            for check in checks:
                if check.failure_info is not None:
                    body = (interactions[case].request.body or b"")[:500]
                    failures.append(f"{event.recorder.label}: {check.failure_info.failure}\n{body!r}")
    return failures, statuses


def assert_asked_well(statuses, num):
    """The requests were right ones and wrong ones, and not too few, so that their answers say something."""
    for route in ("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"):
        assert statuses[route].total() >= num
        assert statuses[route][200] > 0
        assert statuses[route][400] > 0
    assert set().union(*statuses.values()) == {200, 400, 404}
    assert all(counter.total() > 0 for counter in statuses.values())


def test_every_answer_is_as_the_document_says(server):
    failures, statuses = examine(server, 25, coverage=False)
    assert failures == []
    assert_asked_well(statuses, 25)
    server.assert_idle()


@pytest.mark.slow
def test_every_answer_at_and_past_the_edges_of_every_field_and_to_500_examples_is_as_the_document_says(server):
    failures, statuses = examine(server, 500, coverage=True)
    assert failures == []
    assert_asked_well(statuses, 500)
    server.assert_idle()


def test_the_document_names_every_route_and_every_status_that_it_may_answer_with_and_no_other(server):
    document = server.http.get("/openapi.json").json()
    statuses = {
        f"{method.upper()} {path}": {int(status) for status in operation["responses"]}
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert statuses == ROUTES
