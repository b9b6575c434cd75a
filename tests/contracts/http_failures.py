"""What becomes of answers when a client leaves, a step fails, the engine dies, the server is full, or it shuts down.

Nothing here hangs on how fast a machine is: where the moment matters, a `Gate` holds the engine before a step.
"""

import asyncio
import functools
import importlib
import json
import socket
import threading

import pytest

from tests.kit.models import Successor
from tests.kit.server import (
    Gate,
    answer,
    bodies,
    connect,
    held,
    metrics,
    text,
    token_counts,
    wait_for_aborts,
    wait_for_queue,
    wait_until,
)
from tests.kit.tokenizers import EOS, byte_tokenizer

SINCE = "v0_4"


def on_loop(server, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, server.app.state.engine._loop)


def check_error(body, type_, code=None):
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["param"], body["error"]["code"]) == (type_, None, code)
    return body["error"]["message"]


def check_refused(response, code=None):
    """A 503 with the error object; one that will pass says when to try again."""
    assert (response.status_code, response.headers.get("retry-after")) == (503, None if code else "1")
    return check_error(response.json(), "service_unavailable_error", code)


def test_sse_6_a_client_that_leaves_its_stream_ends_its_request_alone(serve):
    model = Successor()
    with serve(model, num_blocks=200, block_size=4) as server, held(server, 1, 4) as (gate, submit):
        leaving = {"prompt": "a", "temperature": 0, "max_tokens": 500, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=leaving) as response:
            gate.reached(1)
            neighbour = submit(server.complete, prompt="A", max_tokens=5)
            wait_for_queue(server, 2)
            gate.go(1)
            lines = (line for line in response.iter_lines() if line)
            read = [json.loads(next(lines).removeprefix("data: ")) for _ in range(3)]
            gate.reached(4)
        wait_for_aborts(server, 1)
        gate.go(4)
        assert text(read) == "bcd"
        assert neighbour.result().json()["choices"][0]["text"] == "BCDEF"
        server.assert_idle()
        assert model.num_forwards == 6  # the neighbour's, which came a step later


def test_a_client_that_does_not_read_holds_nobody_up_and_its_blocks_are_free_before_it_has_read(serve):
    body = {"prompt": "0", "max_tokens": 200, "temperature": 0, "n": 20, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with (
        serve(Successor(), num_blocks=2000, block_size=4) as server,
        socket.socket() as slow,
        held(server, 1) as (gate, _),
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.http.base_url.port))
        slow.sendall(head.encode() + data)
        gate.reached(1)
        gate.go(1)
        assert server.complete(prompt="a", max_tokens=5).json()["choices"][0]["text"] == "bcdef"
        server.assert_idle()
        received = b"".join(iter(lambda: slow.recv(2**16), b""))
    assert received.count(b'"finish_reason":"length"') == 20
    assert received.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_sse_6_a_client_that_leaves_the_queue_is_never_computed(serve, stream):
    model = Successor()
    with serve(model, num_blocks=200, block_size=4, max_num_seqs=1) as server, held(server, 2) as (gate, submit):
        first = submit(server.complete, prompt="a", max_tokens=4)
        gate.reached(2)
        with connect(server, "/v1/completions", prompt="A", stream=stream):
            wait_for_queue(server, 1)
            third = submit(server.complete, prompt="0", max_tokens=2)
            wait_for_queue(server, 2)
        wait_for_aborts(server, 1)
        gate.go(2)
        assert first.result().json()["choices"][0]["text"] == "bcde"
        assert third.result().json()["choices"][0]["text"] == "12"
        assert model.num_forwards == 6


@pytest.mark.parametrize("stream", [False, True])
def test_sse_6_a_client_that_leaves_takes_all_its_prompts_and_choices_with_it(serve, stream):
    model = Successor()
    with serve(model, num_blocks=200, block_size=4) as server, held(server, 3) as (gate, _):
        with connect(server, "/v1/completions", prompt=["a", "A", "0"], n=2, max_tokens=500, stream=stream):
            gate.reached(3)
        wait_for_aborts(server, 6)
        gate.go(3)
        server.assert_idle()
        assert model.num_forwards <= 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sends", [True, False])
def test_sse_6_a_client_that_has_left_before_the_first_event_leaves_nothing_behind(milestone, stream, sends):
    module = importlib.import_module(f"{milestone.__name__}.server.app")
    model = Successor()
    engine = milestone.LLMEngine(model, tokenizer=byte_tokenizer(), num_blocks=200, block_size=4)
    app, gate = module.build_app(engine, module.ServerArgs()), Gate(engine, 1)
    body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip

    async def receive():
        if messages:
            return messages.pop(0)
        await asyncio.to_thread(gate.reached, 1)  # it leaves when the engine is about to compute its first token
        return {"type": "http.disconnect"}

    async def send(message):
        if not sends and message["type"] == "http.response.start" and message["status"] == 200:
            await asyncio.Event().wait()  # a full socket: of the events not even the first is asked for

    async def main():
        async with app.router.lifespan_context(app):
            with gate:
                await asyncio.wait_for(app(scope, receive, send), 20)
                gate.go(1)
                async with asyncio.timeout(20):
                    while engine.has_unfinished_requests() or engine.output_processor.parents:
                        await asyncio.sleep(0.005)

    asyncio.run(main())
    assert model.num_forwards == 1
    assert engine.scheduler.block_manager.num_free_blocks == 200


def test_sse_8_streams_of_several_servers_on_loops_of_their_own(serve_script):
    for _ in range(2):
        with serve_script([65, EOS]) as server:
            assert text(bodies(server.chat(stream=True))) == "A"
    with serve_script([65, EOS]) as first, serve_script([66, EOS]) as second:
        assert text(bodies(first.chat(stream=True))) == "A"
        assert text(bodies(second.chat(stream=True))) == "B"
        assert text(bodies(first.chat(stream=True))) == "A"


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_api_6_a_fault_of_the_model_is_an_error_in_the_stream_or_a_500(serve, endpoint):
    model = Successor(fails_at=(3, 6))
    with serve(model, num_blocks=200, block_size=4) as server:
        ask = getattr(server, endpoint)
        *chunks, error = bodies(ask(stream=True))
        assert len(text(chunks)) == 2
        message = check_error(error, "server_error")
        whole = ask()
        assert (whole.status_code, check_error(whole.json(), "server_error")) == (500, message)
        assert "RuntimeError" in message
        assert "the model failed" not in message  # what is inside is for the log
        assert ask(max_tokens=1).status_code == 200
        assert metrics(server)["request_success_total/error"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_api_6_what_can_be_known_before_is_a_plain_400_in_a_stream_too(serve_script, stream):
    with serve_script([65], max_model_len=64) as server:
        too_long = [{"role": "user", "content": "x" * 65}]
        answers = [server.chat(messages=too_long, stream=stream), server.complete(prompt=[65] * 65, stream=stream)]
        for response in answers:
            assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
            assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_api_11_the_request_at_fault_fails_alone(serve, stream):
    with serve(Successor(poison="z"), num_blocks=200, block_size=4) as server, held(server, 1) as (gate, submit):
        first = submit(server.complete, prompt="a", max_tokens=8)
        gate.reached(1)
        faulty = submit(server.complete, prompt="w", max_tokens=8, stream=stream)
        wait_for_queue(server, 2)
        third = submit(server.complete, prompt="A", max_tokens=8, stream=True)
        wait_for_queue(server, 3)
        gate.go(1)
        assert first.result().json()["choices"][0]["text"] == "bcdefghi"
        assert text(bodies(third.result())) == "BCDEFGHI"
        if stream:
            *chunks, error = bodies(faulty.result())
            assert text(chunks) == "xyz"
        else:
            error = faulty.result().json()
            assert faulty.result().status_code == 500
        check_error(error, "server_error")
        assert server.http.get("/health").status_code == 200


def test_api_11_a_fault_that_does_not_come_again_costs_nobody_his_answer(serve):
    with serve(Successor(fails_at=(3,)), num_blocks=200, block_size=4) as server, held(server, 1) as (gate, submit):
        answers = [submit(server.complete, prompt="a", max_tokens=4)]
        gate.reached(1)
        answers += [submit(server.complete, prompt=prompt, max_tokens=4) for prompt in "A0"]
        wait_for_queue(server, 3)
        gate.go(1)
        assert [future.result().json()["choices"][0]["text"] for future in answers] == ["bcde", "BCDE", "1234"]


@pytest.mark.parametrize("faulty", [3, 4])  # the forwards that compute the first and the second choice again
@pytest.mark.parametrize("stream", [False, True])
def test_api_11_one_of_two_choices_that_fails_takes_the_other_with_it(serve, faulty, stream):
    model = Successor(fails_at=(2, faulty))
    with serve(model, num_blocks=200, block_size=4) as server, held(server, 1) as (gate, submit):
        two = submit(server.complete, prompt="a", n=2, max_tokens=4, stream=stream)
        gate.reached(1)
        neighbour = submit(server.complete, prompt="A", max_tokens=4)
        wait_for_queue(server, 3)
        gate.go(1)
        assert neighbour.result().json()["choices"][0]["text"] == "BCDE"
        if stream:
            *chunks, error = bodies(two.result())
            assert (text(chunks, 0), text(chunks, 1)) == ("b", "b")
        else:
            error = two.result().json()
            assert two.result().status_code == 500
        check_error(error, "server_error")
        assert metrics(server)["request_success_total/error"] == 2


def test_api_11_when_the_engine_dies_everybody_is_told_at_once(serve, monkeypatch):
    def fail():
        raise RuntimeError("no schedule")

    with serve(Successor(), num_blocks=200, block_size=4, max_num_seqs=1) as server, held(server, 3) as (gate, submit):
        streamed = submit(server.complete, prompt="a", max_tokens=9, stream=True)
        gate.reached(3)
        queued = [submit(server.complete, prompt="A", stream=stream) for stream in (False, True)]
        wait_for_queue(server, 2)
        monkeypatch.setattr(server.engine.scheduler, "schedule", fail)
        gate.go(3)
        *chunks, error = bodies(streamed.result())
        assert text(chunks) == "bc"
        check_error(error, "service_unavailable_error", "engine_dead")
        check_refused(queued[0].result(), "engine_dead")
        [error] = bodies(queued[1].result())  # the status had gone out
        check_error(error, "service_unavailable_error", "engine_dead")
        check_refused(server.http.get("/health"), "engine_dead")
        for stream in (False, True):
            check_refused(server.chat(stream=stream), "engine_dead")
            check_refused(server.complete(stream=stream), "engine_dead")


def test_a_full_queue_refuses_with_503_and_serves_again_afterwards(serve):
    options = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 1, "server": {"max_queued_requests": 2}}
    with serve(Successor(), **options) as server, held(server, 2) as (gate, submit):
        first = submit(server.complete, prompt="a", max_tokens=3)
        gate.reached(2)
        second = submit(server.complete, prompt="A", max_tokens=3)
        wait_for_queue(server, 1)
        for stream in (False, True):  # two more are too many, also as choices or prompts of one request
            assert "full" in check_refused(server.complete(prompt="0", n=2, stream=stream))
            assert "full" in check_refused(server.complete(prompt=["0", "1"], stream=stream))
        third = submit(server.complete, prompt="0", max_tokens=3, stream=True)
        wait_for_queue(server, 2)
        for stream in (False, True):
            assert "full" in check_refused(server.chat(stream=stream))
        assert server.http.get("/health").status_code == 200
        gate.go(2)
        assert [future.result().json()["choices"][0]["text"] for future in (first, second)] == ["bcd", "BCD"]
        assert text(bodies(third.result())) == "123"
        assert answer(server, ["complete"], prompt="a", max_tokens=3) == ("bcd", "length", None)


def test_api_12_a_shutdown_without_time_ends_answers_with_an_error(serve):
    with serve(Successor(), num_blocks=200, block_size=4) as server, held(server, 3) as (gate, submit):
        streamed = submit(server.complete, prompt="a", max_tokens=500, stream=True)
        gate.reached(3)
        whole = submit(server.complete, prompt="A", max_tokens=500)
        wait_for_queue(server, 1)
        ended = on_loop(server, server.app.state.engine.shutdown(0))
        *chunks, error = bodies(streamed.result())  # nobody waits for the step
        assert text(chunks) == "bc"
        assert "shutting down" in check_error(error, "service_unavailable_error")
        assert "shutting down" in check_refused(whole.result())
        assert "shutting down" in check_refused(server.chat(stream=True))
        gate.go(3)
        ended.result(20)
        manager = server.engine.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks
        assert "shutting down" in check_refused(server.chat())  # also when it is done: that was no fault


def test_api_12_a_shutdown_with_time_lets_answers_end_and_takes_no_new_ones(serve):
    with serve(Successor(), num_blocks=200, block_size=4) as server, held(server, 3) as (gate, submit):
        streamed = submit(server.complete, prompt="a", max_tokens=5, stream=True)
        gate.reached(3)
        ended = on_loop(server, server.app.state.engine.shutdown(20))
        wait_until(lambda: not server.app.state.engine.accepting, "the shutdown has begun")
        for stream in (False, True):
            assert "shutting down" in check_refused(server.complete(stream=stream))
        assert not ended.done()
        gate.go(3)
        chunks = bodies(streamed.result())
        assert (text(chunks), chunks[-1]["choices"][0]["finish_reason"]) == ("bcdef", "length")
        ended.result(20)


def test_sch_3_answers_in_a_tight_pool_are_preempted_and_stay_the_same_over_http(serve, tiny):
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    usage = {"prompt_tokens": 6, "completion_tokens": 10, "total_tokens": 16}
    body = {"max_tokens": 10, "ignore_eos": True, "logprobs": 0, "stream": True}
    streams = {}
    for num_blocks in (6, 64):
        options = {"num_blocks": num_blocks, "block_size": 4, "max_num_seqs": 2}
        with serve(tiny.folder, **options) as server, held(server, 1) as (gate, submit):
            ask = functools.partial(submit, server.complete, **body, stream_options={"include_usage": True})
            answers = [ask(prompt=prompts[0])]
            gate.reached(1)
            answers.append(ask(prompt=prompts[1]))
            wait_for_queue(server, 2)
            gate.go(1)
            streams[num_blocks] = [bodies(future.result()) for future in answers]
            assert (metrics(server)["num_preemptions_total"] > 0) == (num_blocks == 6)
    token_text = byte_tokenizer().token_text
    for prompt, tight, large in zip(prompts, streams[6], streams[64], strict=True):
        assert text(tight) == text(large)
        assert token_counts(tight[-1]["usage"]) == token_counts(large[-1]["usage"]) == usage
        choices = [choice for chunk in tight for choice in chunk["choices"]]
        tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        assert tokens == [token_text(token_id) for token_id in tiny.tokens(prompt, 10)]


def test_health_is_200_while_the_queue_is_full_or_over_full_by_preemptions(serve):
    with serve(Successor(), num_blocks=40, max_num_seqs=1, server={"max_queued_requests": 2}) as server:
        with held(server, 1) as (gate, submit):
            first = submit(server.complete, prompt="a", max_tokens=3)
            gate.reached(1)
            second = submit(server.complete, prompt="A", max_tokens=3)
            wait_for_queue(server, 2)
            assert server.complete(prompt="x").status_code == 503
            server.engine.scheduler.waiting.append(server.engine.scheduler.waiting[0])  # as a victim would stand there
            assert server.http.get("/health").status_code == 200
            server.engine.scheduler.waiting.pop()
            gate.go(1)
        assert {first.result().status_code, second.result().status_code} == {200}


def test_health_is_503_while_the_server_shuts_down(serve):
    with serve(Successor(), num_blocks=40) as server:
        assert server.http.get("/health").status_code == server.http.head("/health").status_code == 200
        on_loop(server, server.app.state.engine.shutdown(0)).result(20)
        check_refused(server.http.get("/health"))


def test_what_nobody_has_foreseen_is_a_500_with_an_id_and_the_connection_goes_on(serve, monkeypatch, caplog):
    with serve(Successor(), num_blocks=40) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.app.state.engine, "submit", lambda *_: 1 / 0)
            refused = server.complete(max_tokens=2, prompt="a")
        assert refused.status_code == 500
        assert check_error(refused.json(), "server_error").startswith("The server failed (ZeroDivisionError)")
        assert refused.headers["x-request-id"]
        assert refused.headers.get("connection") != "close"
        assert "ZeroDivisionError" in caplog.text  # with its traceback
        assert server.complete(prompt="a", max_tokens=2).json()["choices"][0]["text"] == "bc"


def test_an_observer_that_fails_costs_nobody_his_answer(serve, monkeypatch):
    with serve(Successor(), num_blocks=40) as server:
        observer = server.app.state.engine.observer
        monkeypatch.setattr(observer, "on_output", lambda *_: 1 / 0)
        assert server.complete(prompt="a", max_tokens=3).json()["choices"][0]["text"] == "bcd"


def test_a_client_that_leaves_while_its_prompt_is_tokenised_is_never_submitted(serve):
    with serve(Successor(), num_blocks=40) as server:
        release = threading.Event()
        on_loop(server, server.app.state.engine.tokenize(lambda: None)).result(20)
        blocked = on_loop(server, server.app.state.engine.tokenize(release.wait, 20))
        connection = connect(server, "/v1/completions", prompt="a", max_tokens=3)
        wait_until(lambda: server.app.state.engine._num_tokenizing == 2, "the second one waits")
        connection.close()
        wait_until(lambda: server.app.state.engine._num_tokenizing == 1, "it has been given up")
        release.set()
        blocked.result(20)
        assert metrics(server)["prompt_tokens_total"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_is_logged_as_an_error_with_its_id(serve, caplog, stream):
    caplog.set_level("INFO")
    with serve(Successor(poison="!"), num_blocks=40) as server:
        server.complete(prompt="a!", max_tokens=3, stream=stream)
        wait_until(lambda: "finish=" in caplog.text, "it has been logged")
    [line] = [record.getMessage() for record in caplog.records if "finish=" in record.getMessage()]
    assert "finish=error" in line
