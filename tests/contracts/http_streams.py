"""Answers over HTTP, streamed and whole: their text, their form on the wire, and what becomes of them when a client
leaves, a step fails, the engine dies, the server is full, or it shuts down.

Nothing here hangs on how fast a machine is: where the moment matters, a `Gate` holds the engine before a step.
"""

import asyncio
import contextlib
import functools
import importlib
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.models import ScriptModel
from tests.kit.server import USER, events
from tests.kit.tokenizers import EOS, EOT, byte_tokenizer, pieces_tokenizer, spm_ids, spm_tokenizer

SINCE = "v0_4"

PROMPT = byte_tokenizer().chat_token_ids(USER)  # of `server.chat()`; as long as this is a prompt for both endpoints


class Successor(ScriptModel):
    """Says the byte after the one it has just read (`a` is answered `bcd...`), to each request on its own.

    It fails in the forwards of these numbers, and in all that read the byte `poison`.
    """

    def __init__(self, *, fails_at=(), poison=None):
        super().__init__([], prompt_len=0)
        self.fails_at, self.poison = fails_at, poison

    def forward(self, token_ids, positions, kv_cache, *, rows=None):
        super_rows = super().forward(token_ids, positions.clamp(max=0), kv_cache, rows=rows)
        if self.num_forwards in self.fails_at or (self.poison is not None and ord(self.poison) in token_ids):
            raise RuntimeError("the model failed")
        return token_ids[rows][:, None].expand_as(super_rows).float()

    def logits(self, hidden):
        self.script = [(step + 1) % 128 for step in range(256)]
        return super().logits(hidden)


class Gate:
    """Holds an engine before some of its steps (the first is 1), each until `go`; at the end it holds nothing."""

    def __init__(self, engine, *steps):
        self._reached, self._open = ({step: threading.Event() for step in steps} for _ in range(2))
        self._step, self._number = engine.step, 0
        engine.step = self._held_step

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for event in self._open.values():
            event.set()

    def reached(self, step):
        assert self._reached[step].wait(20), f"the engine has not come to step {step}"

    def go(self, step):
        self._open[step].set()

    def _held_step(self):
        self._number += 1
        if self._number in self._open:
            self._reached[self._number].set()
            assert self._open[self._number].wait(20), f"nobody has let the engine do step {self._number}"
        return self._step()


@contextlib.contextmanager
def held(server, *steps):
    """A gate, and threads for clients that wait meanwhile: `submit(server.chat, ...)` gives a future."""
    with ThreadPoolExecutor() as clients, Gate(server.engine, *steps) as gate:
        yield gate, clients.submit


def bodies(response):
    """A stream's events, read, without the `[DONE]` at the end."""
    data = events(response)
    assert data.index("[DONE]") == len(data) - 1
    return [json.loads(event) for event in data[:-1]]


def text(chunks, index=0):
    """What a stream, of a chat or of completions, says in one of its choices."""
    choices = [choice for chunk in chunks for choice in chunk.get("choices", []) if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def answer(server, endpoints=("chat", "complete"), **body):
    """Text, finish reason and stop reason, after checking that both endpoints say the same, streamed and whole."""
    answers = set()
    for endpoint in endpoints:
        ask = functools.partial(getattr(server, endpoint), **{"prompt": PROMPT, "max_tokens": 50} | body)
        [whole] = ask().json()["choices"]
        whole_text = whole["message"]["content"] if endpoint == "chat" else whole["text"]
        answers.add((whole_text, whole["finish_reason"], whole["stop_reason"]))
        chunks = bodies(ask(stream=True))
        [last] = chunks[-1]["choices"]
        answers.add((text(chunks), last["finish_reason"], last["stop_reason"]))
    assert len(answers) == 1
    return answers.pop()


def connect(server, path, **body):
    """A socket on which the request has been sent; as HTTP/1.0, so that the answer comes as it is, not in chunks."""
    connection = socket.create_connection((server.http.base_url.host, server.http.base_url.port), timeout=20)
    raw = json.dumps({"temperature": 0} | body).encode()
    head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def metric(server, name, label=""):
    pattern = rf"^vllm:{name}\{{[^}}]*{re.escape(label)}[^}}]*\}} (\S+)$"
    return float(re.search(pattern, server.http.get("/metrics").text, re.MULTILINE)[1])


def wait_for_aborts(server, number):
    server.wait_until(
        lambda: metric(server, "request_success_total", 'finished_reason="abort"') == number, f"{number} have left"
    )


def wait_for_queue(server, number):
    server.wait_until(lambda: server.app.state.engine.num_waiting == number, f"{number} wait")


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


def test_det_1_characters_over_several_tokens_over_http(serve_script):
    with serve_script([240, 159, 153, 130, 32, 228, 184, 173, 195, 169, EOS]) as server:
        assert answer(server) == ("🙂 中é", "stop", None)
        chunks = bodies(server.chat(stream=True))
        contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert contents == ["", "🙂", " ", "中", "é", None]  # nothing for a part of a character
        assert answer(server, max_tokens=6) == ("🙂 ", "length", None)  # an unfinished one is dropped


@pytest.mark.parametrize(("prompt", "expected"), [([1], "Hello world  x"), (spm_ids("x"), " Hello world  x")])
def test_det_3_spaces_of_sentencepiece_over_http(serve, prompt, expected):
    script = [*spm_ids("▁Hello", "▁world", "▁", "▁x"), 2]
    with serve(ScriptModel(script, 1), tokenizer=spm_tokenizer(), num_blocks=50) as server:
        assert answer(server, ["complete"], prompt=prompt) == (expected, "stop", None)


def test_det_5_the_end_token_is_not_shown_over_http(serve_script):
    with serve_script([72, 105, 46, EOT]) as server:
        assert answer(server) == ("Hi.", "stop", EOT)
        assert answer(server, skip_special_tokens=False) == ("Hi.", "stop", EOT)
        shown = answer(server, skip_special_tokens=False, include_stop_str_in_output=True)
        assert shown == ("Hi.<eot>", "stop", EOT)
        assert server.chat().json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("stop", "expected", "completion_tokens"), [("DEFGHIJ", "ABC", 5), ("DE", "ABC", 2), (["J", "HI"], "ABCDEFG", 4)]
)
def test_stp_1_2_stop_strings_over_and_within_tokens_over_http(serve, stop, expected, completion_tokens):
    tokenizer = pieces_tokenizer([b"ABC", b"DEF", b"G", b"HI", b"J", b"K"])
    with serve(ScriptModel(range(6), 1), tokenizer=tokenizer, num_blocks=50) as server:
        body = {"prompt": [5], "stop": stop, "max_tokens": 6}
        reason = stop if isinstance(stop, str) else "HI"
        assert answer(server, ["complete"], **body) == (expected, "stop", reason)
        assert server.complete(**body).json()["usage"]["completion_tokens"] == completion_tokens
        chunks = bodies(server.complete(**body, stream=True))
        assert chunks[0]["choices"][0]["text"] == "ABC"  # in its own step, not held back


def test_stp_3_text_held_back_comes_at_the_end_over_http(serve_script):
    with serve_script([*b"UNO DUE TRE", EOS]) as server:
        stop = ["TRE\nAAAAAAAA"]
        assert answer(server, stop=stop) == ("UNO DUE TRE", "stop", None)
        assert answer(server, stop=stop, max_tokens=10) == ("UNO DUE TR", "length", None)
        chunks = bodies(server.chat(stop=stop, stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[-2:] == [{"content": "TRE"}, {}]  # before the finish chunk, which many clients do not read
        assert {"content": ""} not in deltas


def test_stp_5_9_stop_strings_shown_and_stop_token_ids_over_http(serve_script):
    with serve_script(list(b"abcSTOPxyz")) as server:
        assert answer(server, stop=["STOP"]) == ("abc", "stop", "STOP")
        assert answer(server, stop="STOP", include_stop_str_in_output=True) == ("abcSTOP", "stop", "STOP")
        assert answer(server, stop_token_ids=[84]) == ("abcS", "stop", 84)
    with serve_script([65, 66, EOT, 67]) as server:
        for skip in (True, False):
            body = {"stop": ["<eot>"], "ignore_eos": True, "skip_special_tokens": skip, "max_tokens": 4}
            assert answer(server, **body, stop_token_ids=[258]) == ("AB", "stop", 258)
        assert answer(server, stop=["<eot>"]) == ("AB", "stop", EOT)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_sse_1_the_bytes_of_a_stream(milestone, serve_script, monkeypatch, path):
    serving = importlib.import_module(f"{milestone.__name__}.serving")
    monkeypatch.setattr(serving, "PING_SECONDS", 0.01)
    said = 'a\nb\r\n"quoted" \\ \u2028\u2029\x85 🙂\n\ndata: [DONE]\n\n'
    body = {"messages": USER, "prompt": PROMPT, "max_tokens": 99, "stream": True}
    with (
        serve_script([*said.encode(), EOS]) as server,
        held(server, 3) as (gate, _),
        connect(server, path, **body) as connection,
    ):
        raw = b""
        while b": ping" not in raw:
            raw += connection.recv(4096)
        gate.go(3)
        while part := connection.recv(4096):
            raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"content-type: text/event-stream" in head.lower()
    assert b"\r" not in body
    assert body.endswith(b"data: [DONE]\n\n")
    blocks = body.removesuffix(b"\n\n").split(b"\n\n")
    assert b": ping" in blocks
    lines = [block for block in blocks if block != b": ping"]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines.index(b"data: [DONE]") == len(lines) - 1
    assert text([json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]) == said


def test_sse_1_an_event_is_one_line_also_for_clients_that_split_as_python_does(serve_script):
    with serve_script([*"a\u2028b\u2029c\x85d".encode(), EOS]) as server:
        with server.http.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]  # as httpx splits, and `str.splitlines`
        assert all(line.startswith("data: ") for line in lines)


def test_no_event_waits_for_the_acknowledgement_of_the_one_before(milestone):
    module = importlib.import_module(f"{milestone.__name__}.server")
    with module._bind(module.ServerArgs(port=0)) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:  # else head and body of an answer are up to 40 ms apart: Nagle's rule and delayed ACKs
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_sse_3_chunks_of_a_chat_with_three_choices(serve_script):
    with serve_script([65, 66, EOT]) as server:
        chunks = bodies(server.chat(n=3, stream=True))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert (chunks[0]["model"], chunks[0]["object"]) == ("tiny", "chat.completion.chunk")
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    for index in range(3):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        deltas = [{"role": "assistant", "content": ""}, {"content": "A"}, {"content": "B"}, {}]
        assert [choice["delta"] for choice in choices] == deltas
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
        assert choices[-1]["stop_reason"] == EOT


def test_sse_3_chunks_of_completions_with_two_prompts_and_two_choices(serve_script):
    with serve_script([65, 66, EOS], prompt_len=2) as server:
        chunks = bodies(server.complete(prompt=["Hi", "Ho"], n=2, stream=True))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    for index in range(4):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["text"] for choice in choices] == ["A", "B", ""]
        assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]


@pytest.mark.parametrize(
    ("body", "completion_tokens"), [({}, 4), ({"max_tokens": 2}, 2), ({"stop": "BC"}, 3), ({"n": 2}, 8)]
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_sse_4_usage_comes_once_at_the_end_and_only_when_asked_for(serve_script, endpoint, body, completion_tokens):
    with serve_script([*b"ABC", EOS]) as server:
        ask = getattr(server, endpoint)
        body = body | ({"prompt": PROMPT} if endpoint == "complete" else {})
        *chunks, last = bodies(ask(**body, stream=True, stream_options={"include_usage": True}))
        num_prompt, total = len(PROMPT), len(PROMPT) + completion_tokens
        usage = {"prompt_tokens": num_prompt, "completion_tokens": completion_tokens, "total_tokens": total}
        assert (last["choices"], last["usage"]) == ([], usage)
        assert (last["id"], last["model"]) == (chunks[0]["id"], "tiny")
        assert chunks[-1]["choices"][0]["finish_reason"] is not None
        assert ask(**body).json()["usage"] == usage
        without = bodies(ask(**body, stream=True)) + bodies(ask(**body, stream=True, stream_options={}))
        assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks + without)


@pytest.mark.parametrize("stop", [["TRxyz"], ["xy"], ["TRx"]])
def test_streamed_logprobs_have_one_entry_for_each_token_also_of_text_held_back(serve_script, stop):
    with serve_script([*"aTRxé".encode(), EOS]) as server:
        body = {"stop": stop, "logprobs": True, "top_logprobs": 2}
        whole = server.chat(**body).json()
        chunks = bodies(server.chat(**body, stream=True))
        entries = [
            entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert entries == whole["choices"][0]["logprobs"]["content"]
        expected = b"aTRx" if stop == ["TRx"] else "aTRxé".encode()
        assert b"".join(bytes(entry["bytes"]) for entry in entries)[: len(expected)] == expected
        assert len(entries) == whole["usage"]["completion_tokens"] == (4 if stop == ["TRx"] else 7)
        body = {"stop": stop, "logprobs": 2, "prompt": PROMPT}
        chunks = bodies(server.complete(**body, stream=True))
        [choice] = server.complete(**body).json()["choices"]
        for name, values in choice["logprobs"].items():
            assert [v for c in chunks for v in (c["choices"][0]["logprobs"] or {name: []})[name]] == values
            assert len(values) == len(entries)


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
    module = importlib.import_module(f"{milestone.__name__}.server")
    model = Successor()
    engine = milestone.LLMEngine(model, tokenizer=byte_tokenizer(), num_blocks=200, block_size=4)
    app = module.build_app(engine, module.ServerArgs())
    body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip

    async def receive():
        return messages.pop(0) if len(messages) > 1 else messages[0]

    async def send(message):
        if not sends and message["type"] == "http.response.start" and message["status"] == 200:
            await asyncio.Event().wait()  # a full socket: of the events not even the first is asked for

    async def main():
        async with app.router.lifespan_context(app):
            with Gate(engine, 1) as gate:
                await asyncio.wait_for(app(scope, receive, send), 20)
                gate.go(1)
                async with asyncio.timeout(20):
                    while engine.has_unfinished_requests() or engine.output_processor.parents:
                        await asyncio.sleep(0.005)

    asyncio.run(main())
    assert model.num_forwards <= 1
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
        assert metric(server, "request_success_total", 'finished_reason="error"') == 2


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
        assert metric(server, "request_success_total", 'finished_reason="error"') == 2


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
        server.wait_until(lambda: not server.app.state.engine.accepting, "the shutdown has begun")
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
            assert (metric(server, "num_preemptions_total") > 0) == (num_blocks == 6)
    token_text = byte_tokenizer().token_text
    for prompt, tight, large in zip(prompts, streams[6], streams[64], strict=True):
        assert text(tight) == text(large)
        assert tight[-1]["usage"] == large[-1]["usage"] == usage
        choices = [choice for chunk in tight for choice in chunk["choices"]]
        tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        assert tokens == [token_text(token_id) for token_id in tiny.tokens(prompt, 10)]
