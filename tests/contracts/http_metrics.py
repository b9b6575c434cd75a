"""What is counted and logged of requests over HTTP."""

import importlib
import importlib.metadata
import logging
import math
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.models import ScriptModel, Stepped
from tests.kit.server import (
    bodies,
    connect,
    counts,
    metrics,
    post_lines,
    streamed,
    texts,
    wait_for_aborts,
    wait_for_queue,
    wait_until,
)
from tests.kit.tokenizers import EOS

SINCE = "v0_4"
CHAT_LEN = 23  # tokens of `server.chat()`'s prompt: <bos>[user]\nHi<eot>[assistant]\n
NORM = math.log(math.exp(10) + math.exp(5) + 257)  # of SCRIPT's logits: the best, the runner-up, the other tokens


def test_answers_are_sent_at_once(milestone):
    # Head and body are two writes. Where Nagle's algorithm holds the second one back until the client has acknowledged
    # the first, every answer takes 40 ms more. asyncio switches it off for sockets that it knows to be TCP.
    module = importlib.import_module(f"{milestone.__name__}.server.app")
    with (
        module.listening.bind(module.ServerArgs(port=0)) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        is_known_to_be_tcp = accepted.proto == socket.IPPROTO_TCP
        assert is_known_to_be_tcp or accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_metrics_count_exactly_what_was_asked_and_answered(serve_script):
    with serve_script([*b"ABC", EOS], prompt_len=2) as server:
        names = ("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total")
        ends = [f"request_success_total/{reason}" for reason in ("stop", "length", "abort", "error")]
        times = [
            f"{name}_seconds_count" for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
        ]

        def now():
            values = metrics(server)
            return [[values[name] for name in group] for group in (names, ends, times)]

        assert now() == [[0, 0, 0], [0, 0, 0, 0], [0, 0, 0]]
        server.complete(max_tokens=10)  # ABC<eos>
        assert now() == [[2, 4, 0], [1, 0, 0, 0], [1, 3, 1]]
        server.complete(max_tokens=2, stream=True)
        assert now() == [[4, 6, 0], [1, 1, 0, 0], [2, 4, 2]]
        server.chat(max_tokens=1, ignore_eos=True)
        assert now() == [[4 + CHAT_LEN, 7, 0], [1, 2, 0, 0], [3, 4, 3]]
        server.complete(prompt=["Hi", "Hi"], max_tokens=3)
        assert now() == [[8 + CHAT_LEN, 13, 0], [1, 4, 0, 0], [5, 8, 5]]
        server.complete(n=3, max_tokens=1)  # one request: its prompt and its times count once
        assert now() == [[10 + CHAT_LEN, 16, 0], [1, 7, 0, 0], [6, 8, 6]]
        for refused in ({"max_tokens": 0}, {"model": "nope"}, {"prompt": [-1]}):
            assert server.complete(**refused).status_code in (400, 404)
        assert now() == [[10 + CHAT_LEN, 16, 0], [1, 7, 0, 0], [6, 8, 6]]


def test_metrics_of_whole_requests_are_those_of_vllms_dashboard(serve_script):
    with serve_script([*b"ABC", EOS], prompt_len=2, num_blocks=50, block_size=4) as server:
        assert server.complete(n=3, max_tokens=2).status_code == 200
        assert server.complete(max_tokens=10).status_code == 200  # ABC<eos>
        values = metrics(server)
        counted = {
            "request_prompt_tokens": (2, 2 + 2),
            "request_generation_tokens": (4, 3 * 2 + 4),
            "request_max_num_generation_tokens": (2, 2 + 4),
        }
        for name, (count, total) in counted.items():
            assert (values[f"{name}_count"], values[f"{name}_sum"]) == (count, total)
        whole = values["e2e_request_latency_seconds_sum"]
        parts = [values[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(whole)
        assert sum(parts[1:]) == pytest.approx(values["request_inference_time_seconds_sum"])
        assert values["request_time_per_output_token_seconds_count"] == 2
        assert values["request_time_per_output_token_seconds_sum"] < parts[2]
        text = server.http.get("/metrics").text
        assert 'vllm:cache_config_info{block_size="4",cache_dtype="float32",enable_prefix_caching="' in text
        assert 'num_gpu_blocks="50"} 1.0' in text


def test_the_wait_for_the_first_step_is_queue_time(serve):
    model = Stepped([*b"AB", EOS], 2)
    with serve(model, num_blocks=50, block_size=4, max_num_seqs=1) as server, ThreadPoolExecutor() as clients:
        first = clients.submit(server.complete)
        model.steps.release(1)
        wait_until(lambda: metrics(server)["time_to_first_token_seconds_count"] == 1, "the first one has a token")
        second = clients.submit(server.complete)
        wait_for_queue(server, 1)
        start = time.perf_counter()
        time.sleep(0.2)
        waited = time.perf_counter() - start
        model.steps.release(1000)
        assert (first.result().status_code, second.result().status_code) == (200, 200)
        values = metrics(server)
        assert values["request_queue_time_seconds_sum"] >= waited
        assert values["request_decode_time_seconds_sum"] >= waited


def test_a_request_that_is_aborted_or_fails_leaves_no_count_behind(serve):
    model = Stepped([65], 2)
    with serve(model, num_blocks=50, block_size=4) as server:
        connection = connect(server, "/v1/completions", prompt=[1, 2], max_tokens=100, stream=True)
        model.steps.release(2)
        wait_until(lambda: metrics(server)["generation_tokens_total"] >= 1, "it has a token")
        connection.close()
        model.steps.release(1)
        wait_for_aborts(server, 1)
        model.steps.release(1000)
        assert server.app.state.engine.observer._num_tokens == {}
        assert metrics(server)["request_generation_tokens_count"] == 0


def test_gauges_follow_the_load_and_come_back_to_nothing(serve):
    model = Stepped([*b"ABC", EOS], 2)
    with serve(model, num_blocks=50, block_size=4, max_num_seqs=1) as server:
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

        def now():
            return [metrics(server)[name] for name in gauges]

        request = {"method": "POST", "url": "/v1/completions"}
        body = {"prompt": "Hi", "stream": True, "temperature": 0}
        assert now() == [0, 0, 0]
        with server.http.stream(**request, json=body) as first, server.http.stream(**request, json=body) as second:
            model.steps.release(1)  # the second one is seen after it
            wait_until(lambda: now()[:2] == [1, 1], "one runs and one waits")
            assert now()[2] == pytest.approx(1 / 50)
            model.steps.release(1000)
            first.read()
            second.read()
        wait_until(lambda: now() == [0, 0, 0], "the gauges are back at 0")
        assert metrics(server)["request_success_total/stop"] == 2


def test_sch_3_preemptions_are_counted_and_change_neither_text_nor_counts(serve, caplog):
    caplog.set_level(logging.INFO)
    body = {"prompt": [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], "max_tokens": 10}
    with serve(ScriptModel([*b"ABCDEFGHIJ"], 6), num_blocks=6, block_size=4, max_num_seqs=2) as server:
        for number, stream in enumerate((False, True), 1):
            response = server.complete(stream=stream, **body)
            if stream:
                assert streamed(response) == {0: ("ABCDEFGHIJ", "length"), 1: ("ABCDEFGHIJ", "length")}
            else:
                assert (texts(response), counts(response)) == (["ABCDEFGHIJ"] * 2, (12, 20))
            values, line = metrics(server), post_lines(caplog, number)[-1]
            assert values["num_preemptions_total"] == number
            assert line.endswith(" finish=length preemptions=1")
            assert (values["prompt_tokens_total"], values["generation_tokens_total"]) == (12 * number, 20 * number)


def test_a_client_that_leaves_between_two_choices_is_counted_and_logged_once_for_each(serve, caplog):
    caplog.set_level(logging.INFO)
    model = Stepped([65], 2)
    # Both choices start in one step. When they need a second block each there are none left, and the second one waits.
    with serve(model, num_blocks=3, block_size=4) as server:
        body = {"prompt": "Hi", "n": 2, "max_tokens": 6, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            model.steps.release(6)
            assert any('"finish_reason":"length"' in line for line in response.iter_lines() if "finish" in line)
        [line] = post_lines(caplog, 1)
        model.steps.release(1000)
        values = metrics(server)
        ends = {reason: values[f"request_success_total/{reason}"] for reason in ("stop", "length", "abort", "error")}
        assert ends == {"stop": 0, "length": 1, "abort": 1, "error": 0}
        assert " finish=abort " in line


def test_the_log_line_has_ids_counts_and_finish_and_no_text(serve_script, caplog):
    caplog.set_level(logging.INFO)
    secret = {"messages": [{"role": "user", "content": "s3cret"}], "max_tokens": 4, "user": "s3cret"}
    with serve_script([*b"ANSWER"], prompt_len=CHAT_LEN + 4) as server:
        for number, (given, num_output) in enumerate((({}, 4), ({"stream": True, "n": 2}, 8)), 1):
            response = server.chat(**secret, **given)
            id_ = bodies(response)[0]["id"] if given else response.json()["id"]
            assert re.fullmatch(
                rf"POST /v1/chat/completions 200 request_id={response.headers['X-Request-Id']} ms=\d+\.\d id={id_} "
                rf"prompt_tokens={CHAT_LEN + 4}(?: cached_tokens=\d+)? "
                rf"output_tokens={num_output} ttft_ms=\d+\.\d tpot_ms=\d+\.\d "
                r"finish=length preemptions=0",
                post_lines(caplog, number)[-1],
            )
        assert "s3cret" not in caplog.text
        assert "ANSW" not in caplog.text
