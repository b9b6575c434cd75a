"""Answers over HTTP, streamed and whole: their text, and their form on the wire."""

import importlib
import json

import pytest

from tests.kit.models import ScriptModel
from tests.kit.server import PROMPT, USER, answer, bodies, connect, held, text
from tests.kit.tokenizers import EOS, EOT, pieces_tokenizer, spm_ids, spm_tokenizer

SINCE = "v0_4"


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
    serving = importlib.import_module(f"{milestone.__name__}.server.serving")
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
