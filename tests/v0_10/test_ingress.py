"""What the ingress does that one server does not: it outlives a replica, asks all of them, and lets what runs end."""

import asyncio
import functools
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.kit.models import ScriptModel, Stepped, Successor
from tests.kit.server import bodies, events, wait_until
from tests.kit.tokenizers import EOS
from tests.v0_10.kit import ingress as serving
from v0_10_scale_out.cluster import ingress

LONG = "A long question about the same thing. " * 10
ABC = [*b"ABC", EOS]


@pytest.fixture
def clients():
    with ThreadPoolExecutor(20) as pool:
        yield pool


@pytest.fixture
def serve():
    return functools.partial(serving, num_blocks=200, block_size=4)


def scripts(number=2, script=ABC):
    return [ScriptModel(script, 2) for _ in range(number)]


def families(server):
    text = server.http.get("/metrics").text
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_prompts_go_where_they_were(serve):
    with serve([Successor(), Successor()]) as server:
        for turn in range(3):
            for name in "abcd":
                server.complete(prompt=name * 200 + f"{turn}", max_tokens=2)
        places = [server.here.asked[i::4] for i in range(4)]
    assert all(len(set(replicas)) == 1 for replicas in places)
    assert len({replicas[0] for replicas in places}) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_messages", [0, 1])
def test_what_is_lost_before_a_token_is_answered_by_another_one(serve, stream, num_messages):
    """Be it before or after the lost one has taken it."""
    with serve(scripts()) as server:
        server.here.lost["r0"] = num_messages
        for _ in range(2):  # the lost one is asked once
            response = server.complete(stream=stream, max_tokens=10)
            if stream:
                assert "".join(body["choices"][0]["text"] for body in bodies(response)) == "ABC"
            else:
                assert response.json()["choices"][0]["text"] == "ABC"
        assert server.here.asked.count("r0") <= 1
        assert families(server)["mini_vllm:retried_requests_total"] == server.here.asked.count("r0")
        assert families(server)["mini_vllm:lost_requests_total"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/health"])
@pytest.mark.parametrize("stream", [False, True])
def test_with_both_lost_it_is_a_503_with_an_error_object(serve, path, stream):
    with serve(scripts()) as server:
        server.here.lost = {"r0": 0, "r1": 0}
        body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        response = server.http.get(path) if path == "/health" else server.http.post(path, json=body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "replica_lost")
        assert server.http.get("/metrics").status_code == 200  # of none
        server.here.lost.clear()


def test_a_stream_that_has_begun_ends_with_an_error_that_openais_client_raises(serve, clients):
    models = [Stepped([65], 2), Stepped([65], 2)]
    with serve(models) as server:
        asked = clients.submit(server.complete, stream=True, max_tokens=50)
        for model in models:
            model.steps.release(3)
        wait_until(lambda: server.here.num_passed >= 3, "accepted, the head and a token have come to the client")
        server.here.lost[server.here.asked[0]] = 0
        for model in models:
            model.steps.release(1000)
        *tokens, last, done = events(asked.result())
        assert len(tokens) >= 1
        assert done == "[DONE]"
        error = json.loads(last)["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "replica_lost")
        assert "ask again" in error["message"]
        assert server.here.asked == server.here.asked[:1]  # a second answer would have begun again
        server.here.lost.clear()
        assert families(server)["mini_vllm:lost_requests_total"] == 1


@pytest.mark.parametrize("path", ["/health", "/v1/completions"])
def test_where_no_replica_takes_a_request_it_is_told_so_in_time(serve, monkeypatch, path):
    monkeypatch.setattr(ingress, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(ingress, "ACCEPT_SECONDS", 0.3)
    with serve(scripts(1)) as server:
        server.here.is_deaf = True
        start = time.perf_counter()
        response = server.http.get(path) if path == "/health" else server.complete()
        assert time.perf_counter() - start < 1
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "No replica has taken the request within 0." in response.json()["error"]["message"]


def test_a_client_that_leaves_while_nobody_takes_its_request_leaves_nothing_behind(serve):
    with serve(scripts(1)) as server:
        server.here.is_deaf = True
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/completions", json={"prompt": "Hi"}, timeout=0.2)
        wait_until(lambda: server.ingress._num_running == 0, "it has been given up")
        server.here.is_deaf = False
        assert server.complete().status_code == 200


def test_an_answer_that_fails_in_a_replica_is_no_lost_replica(serve):
    """The second one would fail, too."""
    models = [Successor(poison="p"), Successor(poison="p")]
    with serve(models) as server:
        response = server.complete(prompt="p")
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert len(server.here.asked) == 1


def test_what_is_said_to_one_is_said_to_all(serve):
    with serve(scripts(3), server={"allow_control": True}) as server:
        assert server.http.post("/events/control", json={"delay": 0.5}).json() == {"paused": False, "delay": 0.5}
        assert server.http.post("/events/control", json={"delay": 0}).json() == {"paused": False, "delay": 0.0}
        assert server.http.post("/reset_prefix_cache").json() == {"success": True}
        assert server.here.asked == []
        wrong = server.http.post("/events/control", json={"delay": 99})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "delay")
        server.here.lost = dict.fromkeys(server.here.replicas, 0)
        assert server.http.post("/reset_prefix_cache").status_code == 503
        server.here.lost.clear()


def test_metrics_of_all_replicas_are_one_scrape(serve):
    with serve(scripts()) as server:
        for _ in range(4):
            server.complete()
        samples = [
            (sample.labels["replica"], sample.value)
            for family in text_string_to_metric_families(server.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == "vllm:request_prompt_tokens_count"
        ]
        assert sorted(name for name, _ in samples) == ["r0", "r1"]
        assert sum(value for _, value in samples) == 4
        server.here.lost["r0"] = 0
        text = server.http.get("/metrics").text
        assert 'replica="r1"' in text
        assert 'vllm:num_requests_running{engine="0",model_name="tiny",replica="r0"}' not in text
        server.here.lost.clear()


@pytest.mark.parametrize("path", ["/v1/models", "/reset_prefix_cache", "/events/control", "/tokenize"])
def test_the_key_is_asked_for_before_a_replica_is(serve, path):
    with serve(scripts(), server={"api_key": ["secret"]}) as server:
        method = "GET" if path == "/v1/models" else "POST"
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert server.http.request(method, path, headers=headers).status_code == 401
        assert server.here.asked == []
        headers = {"Authorization": "Bearer secret"}
        assert server.http.request(method, path, headers=headers, json={}).status_code in (200, 400, 403)
        assert server.http.get("/metrics").status_code == server.http.get("/health").status_code == 200


def test_a_replica_sees_neither_key_nor_origin(serve, monkeypatch):
    seen = []
    with serve(scripts(1), server={"api_key": ["secret"], "allowed_origins": '["http://a"]'}) as server:
        ask = server.here.ask
        monkeypatch.setattr(
            server.here, "ask", lambda route, scope, body: seen.append(scope) or ask(route, scope, body)
        )
        headers = {"Authorization": "Bearer secret", "Origin": "http://a", "X-Mine": "kept"}
        response = server.http.get("/v1/models", headers=headers)
        assert response.headers.get_list("access-control-allow-origin") == ["http://a"]
        assert response.headers.get_list("vary") == ["Origin"]
    names = [name for name, _ in seen[0]["headers"]]
    assert b"x-mine" in names
    assert b"authorization" not in names
    assert b"origin" not in names


def test_the_log_says_where_a_request_went_and_why(serve, caplog):
    caplog.set_level(logging.INFO)
    with serve([Successor()]) as server:
        for _ in range(2):
            server.complete(prompt="x" * 130, max_tokens=1)
        server.http.get("/nowhere")
    lines = [record.getMessage() for record in caplog.records if record.name.endswith(".routed")]
    words = [line.split() for line in lines]
    assert [line[:3] for line in words[:2]] == [["POST", "/v1/completions", "200"]] * 2
    assert [line[-3:] for line in words] == [
        ["replica=r0", "rule=new", "held=0/2"],
        ["replica=r0", "rule=prefix", "held=2/2"],
        ["replica=r0", "rule=new", "held=0/0"],
    ]


def drain(server, seconds):
    return asyncio.run_coroutine_threadsafe(server.ingress.drain(seconds), server.loop)


def test_while_it_drains_what_runs_may_end_and_nothing_new_is_taken(serve, clients):
    models = [Stepped(ABC, 2), Stepped(ABC, 2)]
    with serve(models) as server:
        asked = [clients.submit(server.complete, stream=stream, max_tokens=10) for stream in (True, False)]
        wait_until(lambda: len(server.here.asked) == 2, "both run")
        draining = drain(server, 20)
        wait_until(lambda: server.complete().status_code == 503, "nothing new is taken")
        refused = server.http.get("/health")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "shutting down" in refused.json()["error"]["message"]
        for model in models:
            model.steps.release(1000)
        draining.result(20)
        assert [body["choices"][0]["finish_reason"] for body in bodies(asked[0].result())][-1] == "stop"
        assert asked[1].result().json()["choices"][0]["text"] == "ABC"


def test_what_does_not_end_in_time_is_cut_short_with_an_error(serve, clients):
    models = [Stepped([65], 2), Stepped([65], 2)]
    with serve(models) as server:
        asked = [clients.submit(server.complete, stream=stream, max_tokens=100) for stream in (True, False)]
        wait_until(lambda: len(server.here.asked) == 2, "both run")
        for model in models:
            model.steps.release(2)
        drain(server, 0.2).result(20)
        stream, whole = (future.result() for future in asked)
        assert "cut short" in json.loads(events(stream)[-2])["error"]["message"]
        assert whole.status_code == 503
        assert "cut short" in whole.json()["error"]["message"]
        for model in models:
            model.steps.release(1000)


def test_a_drain_does_not_wait_for_those_who_only_watch(serve):
    with (
        serve([Successor()]) as server,
        connect(server.url.replace("http", "ws", 1) + "/events", proxy=None) as watching,
    ):
        assert json.loads(watching.recv(timeout=20))["type"] == "snapshot"
        drain(server, 3600).result(20)
        with pytest.raises(ConnectionClosed, match="shutting down"):
            list(watching)


@pytest.mark.parametrize("path", ["/metrics", "/replicas", "/visualizer/"])
def test_a_head_is_answered_as_a_get_without_its_body(serve, path):
    with serve([Successor(), Successor()]) as server:
        head, get = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert server.here.asked == []  # no replica alone


def test_the_last_prompts_are_known_behind_a_root_path_too(serve):
    with serve([Successor()], server={"root_path": "/llm"}) as server:
        server.http.post("/llm/v1/completions", json={"prompt": "a" * 200, "max_tokens": 1})
        server.http.post("/llm/tokenize", json={"prompt": "a" * 200})
        [prompt] = server.http.get("/llm/replicas").json()["recent"]
        assert (prompt["replica"], prompt["rule"], prompt["num_blocks"]) == ("r0", "new", 3)


def test_a_large_prompt_is_looked_at_in_another_thread(serve, monkeypatch):
    threads = []
    key_of = ingress.key_of
    monkeypatch.setattr(ingress, "key_of", lambda body: threads.append(threading.current_thread()) or key_of(body))
    with serve([Successor()]) as server:
        for size in (10, ingress.SMALL + 1):
            server.complete(prompt="x" * size)
    assert threads[0] is not threads[1]


def test_the_replicas_are_listed_with_what_they_have_and_what_was_routed_to_them(serve):
    with serve([Successor(), Successor()]) as server:
        for _ in range(3):
            server.complete(prompt="a" * 200, max_tokens=1)
        replicas = {replica["name"]: replica for replica in server.http.get("/replicas").json()["replicas"]}
        assert list(replicas) == ["r0", "r1"]
        used, other = server.here.asked[0], {"r0": "r1", "r1": "r0"}[server.here.asked[0]]
        assert replicas[used]["routed"] == {"new": 1, "prefix": 2}
        assert replicas[other]["routed"] == {}
        assert {replica["num_blocks"] for replica in replicas.values()} == {200}
        recent = server.http.get("/replicas").json()["recent"]
        assert [(prompt["replica"], prompt["rule"], prompt["num_held"], prompt["num_blocks"]) for prompt in recent] == [
            (used, "prefix", 3, 3), (used, "prefix", 3, 3), (used, "new", 0, 3)
        ]  # fmt: skip
        server.here.lost[other] = 0
        assert [replica["name"] for replica in server.http.get("/replicas").json()["replicas"]] == [used]
        server.here.lost.clear()


def test_a_replica_can_be_asked_by_its_name(serve):
    with serve(scripts(3), server={"allow_control": True}) as server:
        for name in ("r1", "r2", "r1"):
            assert server.http.post(f"/replicas/{name}/v1/completions", json={"prompt": "Hi"}).status_code == 200
        assert server.here.asked == ["r1", "r2", "r1"]
        assert server.http.post("/replicas/r0/events/control", json={"delay": 0.1}).json()["delay"] == 0.1
        paces = [replica.app.state.engine.pace.delay for replica in server.here.replicas.values()]
        assert paces == [0.1, 0, 0]


@pytest.mark.parametrize("path", ["/replicas/nobody/v1/models", "/replicas/%0A/health"])
def test_a_name_that_no_replica_has_is_404(serve, path):
    with serve(scripts()) as server:
        response = server.http.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "no_such_replica")
        assert server.http.get("/replicas/r0").status_code == 404


def test_a_lost_replica_that_was_asked_by_its_name_is_404_and_no_other_one_answers(serve):
    with serve(scripts()) as server:
        server.here.lost["r0"] = 0
        response = server.http.post("/replicas/r0/v1/completions", json={"prompt": "Hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "no_such_replica")
        server.here.lost.clear()


def test_a_name_in_front_opens_nothing_that_a_key_or_an_origin_guards(serve):
    with serve(scripts(), server={"api_key": ["secret"]}) as server:
        assert server.http.get("/replicas/r0/v1/models").status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert server.http.get("/replicas/r0/v1/models", headers=key).status_code == 200
        other = server.http.post("/replicas/r0/events/control", json={}, headers=key | {"Origin": "http://elsewhere"})
        assert (other.status_code, other.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_each_replicas_events_come_by_its_name(serve):
    with serve([Successor(), Successor()]) as server:
        url = server.url.replace("http", "ws", 1)
        pages = [connect(f"{url}/replicas/{name}/events", proxy=None) for name in ("r0", "r1")]
        with pages[0] as r0, pages[1] as r1:
            assert [json.loads(page.recv(timeout=20))["type"] for page in (r0, r1)] == ["snapshot", "snapshot"]
            server.http.post("/replicas/r1/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
            assert "seq" in json.loads(r1.recv(timeout=20))
            with pytest.raises(TimeoutError):
                r0.recv(timeout=0.2)


def test_the_visualizer_of_all_has_a_frame_for_the_page_of_each(serve):
    with serve(scripts(), server={"root_path": "/engine"}) as server:
        assert server.http.get("/visualizer").headers["location"] == "visualizer/"
        page = server.http.get("/visualizer/")
        assert "<h1>mini-vLLM <span>replicas</span></h1>" in page.text
        assert "frame-src 'self'" in page.headers["content-security-policy"]
        for name in ("overview.js", "overview.css", "icon.svg"):
            assert server.http.get(f"/visualizer/{name}").status_code == 200
            assert name in page.text
        assert server.http.get("/visualizer/../secret").status_code == 404
        for prefix in ("/replicas/r1", "/engine/replicas/r1"):
            assert "mini-vLLM <span>visualizer</span>" in server.http.get(f"{prefix}/visualizer/").text
