"""No body, and no client that leaves, keeps the server from the others: what is refused before it costs any work."""

import importlib
import json
import socket
import threading
from types import SimpleNamespace

import pytest

from tests.contracts.http_errors import post, refused, refusing
from tests.kit.models import ScriptModel, Stepped
from tests.kit.server import PROMPT, USER, wait_for_aborts, wait_until
from tests.kit.tokenizers import EOS, byte_tokenizer

SINCE = "v0_4"
TOO_LONG = {"code": "context_length_exceeded"}
CONTEXT = 100
TEXT = CONTEXT * 5  # the longest token of BYTE-TOK, `<bos>`, has 5 characters


def bodies_module(milestone):
    return importlib.import_module(f"{milestone.__name__}.server.bodies")


def watch_reading(bodies, monkeypatch):
    """Each JSON that the server reads from now on: its length, and the thread that reads it."""
    read = []

    def loads(raw):
        read.append((len(raw), threading.current_thread()))
        return json.loads(raw)

    monkeypatch.setattr(bodies, "json", SimpleNamespace(loads=loads, JSONDecodeError=json.JSONDecodeError))
    return read


def test_unt_1_what_cannot_fit_is_refused_before_the_tokenizer_is_called(serve_script):
    with refusing(serve_script([65], max_model_len=CONTEXT)) as server:
        called = []
        tokenizer = server.engine.tokenizer
        encode, render = tokenizer._encode, tokenizer.render_chat
        tokenizer._encode = lambda *arguments: called.append("encode") or encode(*arguments)
        tokenizer.render_chat = lambda *arguments: called.append("render") or render(*arguments)
        long = f"has {TEXT + 1} characters, at least 101 tokens, but the context holds 100 tokens (max_model_len)"
        refused(server.complete(prompt="x" * (TEXT + 1)), "prompt", long, **TOO_LONG)
        several = server.complete(prompt=["Hi", "x" * (TEXT + 1)])
        refused(several, "prompt", ["Prompt 2 of 2: ", long], **TOO_LONG)
        refused(server.http.post("/tokenize", json={"prompt": " " * (TEXT + 1)}), "prompt", long, **TOO_LONG)
        refused(server.complete(prompt=[1] * 101), "prompt", "has 101 tokens, but", **TOO_LONG)
        refused(server.http.post("/detokenize", json={"tokens": [1] * 101}), "tokens", "are 101 tokens", **TOO_LONG)
        many = "has 101 messages, but"
        refused(server.chat(messages=USER * 101), "messages", many, **TOO_LONG)
        refused(server.http.post("/tokenize", json={"messages": USER * 101}), "messages", many, **TOO_LONG)
        assert called == []
        refused(server.chat(messages=[{"role": "user", "content": "x" * TEXT}]), "messages", "characters", **TOO_LONG)
        assert called == ["render"]
        refused(server.complete(prompt="x" * TEXT), "prompt", f"has {TEXT} tokens", **TOO_LONG)  # encoded, and counted
        assert called == ["render", "encode"]


def test_unt_1_a_body_of_too_many_parts_is_refused_before_python_reads_it(serve_script, milestone, monkeypatch):
    bodies = bodies_module(milestone)
    read = watch_reading(bodies, monkeypatch)
    with refusing(serve_script([65], prompt_len=2, server={"max_body_size": "8MiB"})) as server:
        for part in (b"[]", b"{}", b"[1]", b'{"role":"user","content":""}'):
            many = b",".join([part] * (bodies.MAX_CONTAINERS + 1))
            for body in (b'{"prompt":[%s]}', b'{"messages":[%s]}', b'{"prompt":"Hi","x":[%s]}'):
                refused(post(server, "/v1/completions", body % many), None, "more parts than this server reads")
        values = b",".join([b"1"] * (bodies.MAX_VALUES + 2))
        refused(post(server, "/v1/completions", b'{"prompt":[%s]}' % values), None, "more parts")
        assert read == []
        for text in ("[{,", '\\"[{,', "\\\\[{,"):  # within a text they are no parts
            body = json.dumps({"prompt": "Hi", "max_tokens": 1, "user": text * 170_000}).encode()
            assert post(server, "/v1/completions", body).status_code == 200


def test_unt_1_a_large_body_is_read_in_another_thread_and_a_small_one_at_once(serve_script, milestone, monkeypatch):
    bodies = bodies_module(milestone)
    threads = watch_reading(bodies, monkeypatch)
    with refusing(serve_script([65], prompt_len=2)) as server:
        for size in (100, bodies.SMALL, bodies.SMALL + 1, 2**20):
            body = b'{"prompt":"Hi","max_tokens":1}'.ljust(size)
            assert post(server, "/v1/completions", body).status_code == 200
        assert [size for size, _ in threads] == [100, bodies.SMALL, bodies.SMALL + 1, 2**20]
        [*small, large, largest] = threads
        [loop] = {thread for _, thread in small}
        assert loop not in (large[1], largest[1])


def test_unt_1_the_largest_body_follows_from_the_context_and_a_flag_sets_it(serve_script, milestone):
    limit = bodies_module(milestone).default_limit
    tokenizer = byte_tokenizer()
    sizes = [limit(tokenizer, length) for length in (100, 100_000, 1_000_000)]
    assert sizes == [2**20, 100_000 * 5 * 4, 8 * 2**20]
    tokenizer.length_bound = None
    assert limit(tokenizer, 100) == 8 * 2**20
    with refusing(serve_script([65], server={"max_body_size": "1KiB"})) as server:
        refused(server.complete(prompt="x" * 1024), None, "over 1024 bytes", status=413, code="request_too_large")


EARLY = {
    "a byte": b"\n",
    "a request": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "half of one": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    "a long one": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n" + b" " * 300_000,
}


def test_log_probabilities_are_written_in_another_thread(serve_script, milestone, monkeypatch):
    answers = importlib.import_module(f"{milestone.__name__}.server.answers")
    threads, whole = [], answers.ChatAnswer.whole

    def watched(self):
        threads.append(threading.current_thread())
        return whole(self)

    monkeypatch.setattr(answers.ChatAnswer, "whole", watched)
    with serve_script([65, EOS]) as server:
        assert server.chat().status_code == server.chat(logprobs=True, top_logprobs=2).status_code == 200
    of_event_loop, other = threads
    assert of_event_loop is not other


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("early", EARLY)
def test_unt_16_a_client_that_sends_more_and_then_leaves_is_aborted(serve, early, stream, at_once):
    model = Stepped([65], 2)
    with serve(model, num_blocks=200, block_size=4) as server:
        raw = raw_request({"prompt": [1, 2], "max_tokens": 500, "stream": stream})
        connection = open_connection(server)
        connection.sendall(raw + EARLY[early] if at_once else raw)
        model.steps.release(2)
        wait_until(lambda: len(server.engine.scheduler.running) == 1, "it runs")
        if not at_once:
            connection.sendall(EARLY[early])
        connection.close()
        model.steps.release(1)
        wait_for_aborts(server, 1)
        model.steps.release(1000)


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
def test_requests_that_are_sent_before_the_answer_are_answered_in_turn(serve, at_once):
    model = Stepped([65, 66, EOS], 2)
    with serve(model, num_blocks=200, block_size=4) as server, open_connection(server) as connection:
        first, second = (raw_request({"prompt": [1, 2], "max_tokens": n, "temperature": 0}) for n in (1, 2))
        connection.sendall(first + second if at_once else first)
        wait_until(lambda: len(server.engine.scheduler.running) + server.app.state.engine.num_waiting == 1, "it is in")
        if not at_once:
            for piece in (second[:20], second[20:]):
                connection.sendall(piece)
        last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        connection.sendall(last)
        model.steps.release(1000)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    heads = received.split(b"HTTP/1.1 200 OK\r\n")
    assert len(heads) == 4
    texts = [json.loads(head.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for head in heads[1:3]]
    assert texts == ["A", "AB"]
    assert heads[3].endswith(b'{"status":"ok"}')


def raw_request(body):
    """A completion, as bytes."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    return f"{head}\r\n\r\n".encode() + raw


def open_connection(server):
    return socket.create_connection((server.http.base_url.host, server.http.base_url.port), timeout=20)


def test_unt_14_a_request_target_in_absolute_form_is_served(serve_script):
    with serve_script([65], server={"api_key": ["KEY"]}) as server:
        for target, status in (
            ("http://localhost:8000/health", 200),
            ("HTTP://a.example/version?x=1", 200),
            ("https://a.example/none", 404),
            ("http://a.example", 404),
            ("http://[/health", 200),  # whatever the host: this server is meant
            ("http://a.example/v1/models", 401),  # no way around the key
            ("/health", 200),
        ):
            with open_connection(server) as connection:
                connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (target, answer)


def test_unt_60_head_is_answered_as_get_without_a_body(serve_script):
    with serve_script([65], server={"api_key": ["KEY"]}) as server:
        for path in ("/health", "/ping", "/version", "/openapi.json", "/docs"):
            got, head = server.http.get(path), server.http.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == got.headers["content-type"]
            assert head.headers["content-length"] == got.headers["content-length"]
        assert server.http.head("/v1/models").status_code == 401
        assert server.http.head("/v1/models", headers={"Authorization": "Bearer KEY"}).status_code == 200
        assert server.http.head("/v1/completions", headers={"Authorization": "Bearer KEY"}).status_code == 405
        assert server.http.head("/none").status_code == 404


def test_unt_13_a_page_of_an_allowed_origin_may_ask_for_a_private_network(serve_script):
    with serve_script([65], server={"allowed_origins": '["https://a.example"]'}) as server:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
        allowed = server.http.options("/v1/completions", headers=asks | {"Origin": "https://a.example"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-private-network"] == "true"
        assert server.http.options("/v1/completions", headers=asks | {"Origin": "https://b.example"}).status_code == 400


def test_the_apis_that_are_not_here_are_a_404_that_names_the_one_that_is(serve_script):
    with refusing(serve_script([65])) as server:
        for path in ("/v1/responses", "/v1/messages"):
            for method in ("GET", "POST"):
                answer = server.http.request(method, path, json={"model": "tiny", "input": "Hi"})
                refused(answer, None, [f"There is no {path} here.", "/v1/chat/completions"], status=404)


def test_ping_says_what_health_says(serve_script):
    with serve_script([65], server={"api_key": ["KEY"]}) as server:
        for answer in (server.http.get("/ping"), server.http.post("/ping")):
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_root_path_serves_under_the_prefix_and_without_it_and_the_key_guards_both(serve_script):
    with serve_script([65], prompt_len=2, server={"root_path": "/llm", "api_key": ["KEY"]}) as server:
        for path in ("/llm/v1/models", "/v1/models"):
            assert server.http.get(path).status_code == 401
            assert server.http.get(path, headers={"Authorization": "Bearer KEY"}).status_code == 200
        for prefix in ("/llm", ""):
            assert server.http.get(f"{prefix}/health").status_code == 200
            document = server.http.get(f"{prefix}/openapi.json").json()
            assert document["servers"] == [{"url": "/llm"}]
            assert "'/llm/openapi.json'" in server.http.get(f"{prefix}/docs").text


def test_tokenize_gives_the_vocabularys_own_pieces(serve):
    with serve(ScriptModel([65], 1), num_blocks=50) as server:
        answer = server.http.post("/tokenize", json={"prompt": "a é", "return_token_strs": True}).json()
        assert answer["tokens"] == [97, 32, 195, 169]
        assert answer["token_strs"] == ["a", "Ġ", "Ã", "©"]


def test_tokenizer_info_has_what_an_evaluation_reads_and_is_served_only_where_asked_for(serve_script):
    with serve_script([65]) as server:
        refused(server.http.get("/tokenizer_info"), None, "There is no /tokenizer_info here", status=404)
    options = {"enable_tokenizer_info_endpoint": True, "api_key": ["KEY"]}
    with serve_script([65], server=options) as server:
        assert server.http.get("/tokenizer_info").status_code == 401
        info = server.http.get("/tokenizer_info", headers={"Authorization": "Bearer KEY"}).json()
        assert (info["bos_token"], info["eos_token"]) == ("<bos>", "<eos>")
        assert info["chat_template"].startswith("{{ bos_token }}")
        assert isinstance(info["tokenizer_class"], str)


def test_the_models_sampling_holds_where_a_request_is_silent_and_only_there(serve, monkeypatch):
    defaults = {"temperature": 0.0, "top_k": 7, "repetition_penalty": 1.5, "max_tokens": 3}
    with serve(ScriptModel([65], len(PROMPT)), num_blocks=200, block_size=4, defaults=defaults) as server:
        asked = []
        submit = server.app.state.engine.submit
        monkeypatch.setattr(server.app.state.engine, "submit", lambda *args: asked.append(args[2]) or submit(*args))

        def params(path="/v1/chat/completions", **body):
            body = ({"messages": USER} if "chat" in path else {"prompt": PROMPT}) | body
            assert server.http.post(path, json=body).status_code == 200
            p = asked.pop()
            return p.temperature, p.top_k, p.repetition_penalty, p.top_p, p.max_tokens

        assert params() == (0.0, 7, 1.5, 1.0, 3)
        assert params(temperature=None, top_k=None) == (0.0, 7, 1.5, 1.0, 3)
        own = {"temperature": 0.5, "top_k": 0, "repetition_penalty": 1.0, "top_p": 0.9, "max_tokens": 2}
        assert params(**own) == (0.5, 0, 1.0, 0.9, 2)
        assert params(max_completion_tokens=5)[4] == 5
        assert params(min_tokens=4, ignore_eos=True)[4] == 4
        assert params("/v1/completions")[4] == 16
        assert params("/v1/completions", max_tokens=None)[4] == 3


def test_a_default_of_max_tokens_shortens_an_answer_and_refuses_no_prompt(serve):
    defaults = {"temperature": 0.0, "max_tokens": 50}
    with serve(ScriptModel([65], 1), num_blocks=200, max_model_len=len(PROMPT) + 4, defaults=defaults) as server:
        answer = server.http.post("/v1/chat/completions", json={"messages": USER, "ignore_eos": True}).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (4, "length")
