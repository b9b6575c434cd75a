"""Two replicas on a real Ray, on this machine: what a client sees, where requests go, and what a lost replica costs.

Ray is started once for the whole file, in processes of its own; a test leaves it idle.
"""

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import v0_10_scale_out
from tests.kit.checkpoints import tiny_llama
from tests.kit.models import reference_tokens
from tests.kit.server import USER, bodies, events, running, wait_until
from tests.kit.tokenizers import byte_tokenizer, save_byte_tokenizer
from tests.v0_10.ray_kit import KEY, Cluster, descendants, kill, listening_addresses, needs_ray, ray_of_our_own
from v0_10_scale_out.cluster import local
from v0_10_scale_out.cluster.cluster_args import ClusterArgs
from v0_10_scale_out.engine_args import EngineArgs
from v0_10_scale_out.server.app import ServerArgs, listening

pytestmark = needs_ray

LONG = {"ignore_eos": True, "max_tokens": 60}
ENGINE = {"num_blocks": 300, "max_num_seqs": 8, "max_num_batched_tokens": 256}
SERVER = {"served_model_name": ["tiny"], "max_queued_requests": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """TINY with a longer context: its folder, and the same in transformers."""
    folder = tmp_path_factory.mktemp("tiny-for-ray")
    hf = tiny_llama(folder, vocab_size=byte_tokenizer().vocab_size, max_position_embeddings=2048)
    save_byte_tokenizer(folder)
    return folder, hf


@pytest.fixture(scope="module")
def cluster(model):
    before, processes = set(Path.home().glob(".ray/*")), descendants(os.getpid())
    with ray_of_our_own():
        with listening.bind(ServerArgs(port=0)) as listener:
            port = listener.getsockname()[1]
        server_args = ServerArgs(port=port, api_key=[KEY], allow_control=True, **SERVER)
        local.start(ClusterArgs(replicas=2), server_args, EngineArgs(model=str(model[0]), **ENGINE))
        yield Cluster(port)
    assert set(Path.home().glob(".ray/*")) == before, "Ray has left something in the home"
    wait_until(lambda: descendants(os.getpid()) <= processes, "no process is left", 30)


@pytest.fixture(autouse=True)
def idle(cluster):
    yield
    wait_until(cluster.is_idle, "nothing runs and all blocks are free")


@pytest.fixture
def clients():
    with ThreadPoolExecutor(40) as pool:
        yield pool


def long_prompt(name):
    """Ten blocks by which it is known, and 40 of the cache's: BYTE-TOK has a token for each byte."""
    return (f"{name} " * 640)[:640]


def test_tokens_equal_transformers_streamed_and_whole(cluster, model):
    for prompt in ("Hi", "The quick brown fox", long_prompt("same")):
        expected = reference_tokens(model[1], list(prompt.encode()), 40)
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        assert cluster.complete(**body).json()["choices"][0]["token_ids"] == expected
        chunks = bodies(cluster.complete(**body, stream=True))
        assert [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]] == expected


def test_events_come_one_by_one_as_they_are_made(cluster):
    with cluster.slowed(0.03):
        start, reads = time.perf_counter(), []
        with cluster.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True, **LONG}) as response:
            for part in response.iter_raw():
                reads.append((time.perf_counter() - start, part.count(b"data: ")))
    num_events = sum(number for _, number in reads)
    assert sum(number == 1 for _, number in reads) >= 0.9 * num_events
    assert reads[0][0] < reads[-1][0] / 2  # the first one has not waited for the others


WRONG = [
    ("POST", "/v1/completions", {"json": {"prompt": "Hi", "temperature": 9}}),
    ("POST", "/v1/completions", {"json": {"prompt": "Hi" * 5000}}),
    ("POST", "/v1/chat/completions", {"json": {"messages": []}}),
    ("POST", "/v1/chat/completions", {"json": {"messages": USER, "model": "other"}}),
    ("POST", "/v1/chat/completions", {"json": {"messages": USER, "tools": [{}]}}),
    ("POST", "/v1/chat/completions", {"content": b"{", "headers": {"content-type": "application/json"}}),
    ("POST", "/v1/chat/completions", {"content": b"x" * 2**21}),
    ("POST", "/v1/chat/completions", {"content": b"x" * 9 * 2**20}),
    ("POST", "/v1/completions", {"json": {"prompt": "Hi", "n": 9}}),
    ("GET", "/v1/completions", {}),
    ("GET", "/nowhere", {}),
    ("GET", "/v1/models/other", {}),
    ("GET", "/v1/models", {"headers": {"Authorization": "Bearer wrong"}}),
    ("POST", "/v1/chat/completions", {"json": {"messages": USER}, "headers": {"Authorization": ""}}),
]


def test_errors_are_those_of_one_server_and_each_has_one_id(cluster, model):
    server = {**SERVER, "api_key": [KEY]}
    with running(v0_10_scale_out, str(model[0]), server=server, **ENGINE) as direct:
        direct.http.headers["Authorization"] = f"Bearer {KEY}"
        for method, path, request in WRONG:
            ours, theirs = (client.request(method, path, **request) for client in (cluster.http, direct.http))
            assert ours.status_code == theirs.status_code >= 400, (method, path, ours.text)
            assert ours.json() == theirs.json()
            kept = [name for name in theirs.headers if name not in ("date", "server", "x-request-id")]
            assert {name: ours.headers.get_list(name) for name in kept} == {
                name: theirs.headers.get_list(name) for name in kept
            }
            assert len(ours.headers.get_list("x-request-id")) == 1


def test_an_id_that_the_client_chose_comes_back_once(cluster):
    response = cluster.http.get("/health", headers={"X-Request-Id": "mine"})
    assert response.headers.get_list("x-request-id") == ["mine"]


def test_openais_client_works(cluster):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY)
    assert [model.id for model in client.models.list()] == ["tiny"]
    said = client.chat.completions.create(model="tiny", messages=USER, max_tokens=5, stream=True, extra_body=LONG)
    assert len([chunk for chunk in said if chunk.choices]) >= 5


def test_a_page_of_another_origin_is_told_once_that_it_may(cluster):
    response = cluster.http.get("/v1/models", headers={"Origin": "http://elsewhere"})
    assert response.headers.get_list("access-control-allow-origin") == ["*"]
    assert response.headers.get_list("vary") == ["Origin"]


def test_full_queues_refuse_with_503_and_probes_are_answered_at_once(cluster, clients):
    with cluster.slowed(0.2):
        asked = [clients.submit(cluster.complete, prompt=f"{i}", max_tokens=20) for i in range(40)]
        wait_until(lambda: sum(future.done() for future in asked) >= 40 - 2 * 16, "the others have been refused")
        for _ in range(3):
            start = time.perf_counter()
            assert cluster.http.get("/health").status_code == 200
            assert time.perf_counter() - start < 1
    responses = [future.result() for future in asked]
    refused = [response for response in responses if response.status_code == 503]
    assert 40 - 2 * 16 <= len(refused) <= 40 - 2 * 8  # before a first step, not even those wait that could run
    assert {response.status_code for response in responses} == {200, 503}
    for response in refused:
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("seconds", [0, 0.02, 0.3], ids=["at once", "soon", "later"])
def test_a_client_that_leaves_has_its_blocks_freed_within_a_second(cluster, stream, seconds):
    with cluster.slowed():
        connections = [leaver(cluster, f"{i}", stream) for i in range(12)]
        time.sleep(seconds)
        for connection in connections:
            connection.close()
        start = time.perf_counter()
        wait_until(cluster.is_idle, "all blocks are free")
        assert time.perf_counter() - start < 1


def test_a_client_that_leaves_takes_no_other_answer_with_it(cluster, clients):
    """The first one above all: its request has opened the stream in which the answers of its replica come."""
    with cluster.slowed(0.02):
        first = [leaver(cluster, f"{i}", True) for i in range(4)]
        wait_until(lambda: all(state["num_running"] for state in cluster.states()), "both replicas are at work")
        asked = [clients.submit(cluster.complete, prompt=f"{i}!", stream=True, **LONG) for i in range(8)]
        wait_until(lambda: sum(state["num_running"] for state in cluster.states()) == 12, "all run")
        for connection in first:
            connection.close()
        for future in asked:
            chunks = [body for body in bodies(future.result()) if body.get("choices")]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length", future.result().text[-500:]


def leaver(cluster, prompt, stream):
    body = json.dumps({"prompt": prompt, "stream": stream, "ignore_eos": True, "max_tokens": 500}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json"
    connection = socket.create_connection(("127.0.0.1", cluster.http.base_url.port), timeout=20)
    connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_each_prefix_has_its_replica_and_both_are_used(cluster):
    places = {}
    for turn in range(6):
        for name in ("one", "two", "three", "four", "five", "six"):
            before = cluster.answered()
            response = cluster.complete(prompt=long_prompt(name) + f"{turn}", max_tokens=2)
            assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == (turn > 0) * 640
            [replica] = cluster.answered() - before
            places.setdefault(name, set()).add(replica)
    assert all(len(replicas) == 1 for replicas in places.values()), places
    assert len(set.union(*places.values())) == 2


def test_many_at_once_with_one_prefix_spread(cluster, clients):
    before = cluster.answered()
    with cluster.slowed(0.02):
        asked = [clients.submit(cluster.complete, prompt=long_prompt("crowd") + f"{i}", **LONG) for i in range(16)]
        assert {future.result().status_code for future in asked} == {200}
    spread = cluster.answered() - before
    assert sum(spread.values()) == 16
    assert min(spread.values()) >= 4
    assert len(spread) == 2


def test_a_salt_is_not_led_to_what_was_computed_under_another(cluster):
    def rules(**body):
        before = cluster.counts("mini_vllm:routed_requests_total", "rule")
        response = cluster.complete(prompt=long_prompt("salted"), max_tokens=2, **body)
        now = cluster.counts("mini_vllm:routed_requests_total", "rule")
        return dict(now - before), response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert rules(cache_salt="a") == ({"new": 1}, 0)
    assert rules(cache_salt="b") == ({"new": 1}, 0)
    assert rules() == ({"new": 1}, 0)
    assert rules(cache_salt="a") == ({"prefix": 1}, 624)  # the last block is computed again


def test_a_conversation_finds_its_own_cache_again(cluster):
    messages = [{"role": "system", "content": long_prompt("be brief")}, {"role": "user", "content": "And?"}]
    for turn in range(4):
        answer = cluster.chat(messages=messages, max_tokens=30).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == 0 if turn == 0 else cached > 600
        said = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]


def test_metrics_have_every_replica_once_and_forget_nothing(cluster):
    names = {state["name"] for state in cluster.states()}
    assert len(names) == 2
    for name in ("vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:cache_config_info"):
        assert sorted(dict(labels)["replica"] for labels in cluster.samples(name)) == sorted(names)
    response = httpx.get(f"{cluster.url}/metrics", trust_env=False)  # a scraper has no key
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_reset_empties_the_caches_of_both(cluster, clients):
    for name in ("left", "right", "up", "down"):
        cluster.complete(prompt=long_prompt(name), max_tokens=2)
    assert cluster.http.post("/reset_prefix_cache").json() == {"success": True}
    for name in ("left", "right", "up", "down"):
        usage = cluster.complete(prompt=long_prompt(name), max_tokens=2).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_nothing_listens_beyond_this_machine(cluster):
    addresses = listening_addresses(descendants(os.getpid()))
    here = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert addresses
    assert addresses <= here


def test_a_killed_replica_ends_its_streams_with_an_error_and_all_else_is_answered(cluster, clients):
    """Those who had no token yet are served by the other one, and a new replica comes."""
    victim, other = cluster.states()
    with cluster.slowed():
        streams = [clients.submit(cluster.complete, prompt=f"{i}", stream=True, **LONG) for i in range(8)]
        wholes = [clients.submit(cluster.complete, prompt=f"whole {i}", **LONG) for i in range(8)]
        wait_until(lambda: cluster.num_running() == 16, "all run")
        time.sleep(0.3)
        kill(victim)
        killed = time.perf_counter()
        later = [cluster.complete(prompt="later", max_tokens=2).status_code for _ in range(5)]
        ends = [events(future.result()) for future in streams]
    assert later == [200] * 5
    assert {future.result().status_code for future in wholes} == {200}
    errors = [json.loads(end[-2])["error"] for end in ends if "error" in json.loads(end[-2])]
    assert 1 <= len(errors) <= 7
    assert {(error["type"], error["code"]) for error in errors} == {("service_unavailable_error", "replica_lost")}
    assert all(json.loads(end[-2])["choices"][0]["finish_reason"] for end in ends if "error" not in end[-2])
    cluster.wait_for_replicas(2, 30)
    assert time.perf_counter() - killed < 30
    assert {state["name"] for state in cluster.states()} - {other["name"]} != {victim["name"]}
    before = cluster.answered()
    for i in range(4):
        assert cluster.complete(prompt=long_prompt(f"after {i}"), max_tokens=2).status_code == 200
    assert len(cluster.answered() - before) == 2  # the new one, too


def test_what_runs_on_a_replica_that_is_scaled_down_ends_whole(cluster, clients):
    with cluster.slowed():
        streams = [clients.submit(cluster.complete, prompt=f"{i}", stream=True, **LONG) for i in range(6)]
        wait_until(lambda: all(state["num_running"] for state in cluster.states()), "both run something")
        scale(1)
        cluster.wait_for_replicas(1)
        later = [cluster.complete(prompt=f"later {i}", max_tokens=2) for i in range(4)]
        ends = [events(future.result()) for future in streams]
    assert [response.status_code for response in later] == [200] * 4
    assert {json.loads(end[-2])["choices"][0]["finish_reason"] for end in ends} == {"length"}


def scale(number):
    """By the interface that Ray gives operators."""
    import ray
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    controller = _get_global_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID("Replica", "mini-vllm"), number))
