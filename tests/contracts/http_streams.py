"""Answers over HTTP, streamed and whole: their text, and their form on the wire."""

import importlib
import json
import logging

import pytest

from tests.kit.models import ScriptModel
from tests.kit.server import PROMPT, USER, answer, bodies, connect, held, text, token_counts
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
        assert (last["choices"], token_counts(last["usage"])) == ([], usage)
        assert (last["id"], last["model"]) == (chunks[0]["id"], "tiny")
        assert chunks[-1]["choices"][0]["finish_reason"] is not None
        assert token_counts(ask(**body).json()["usage"]) == usage
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


@pytest.mark.parametrize("stop", [None, ["TRxyz"], ["xy"], ["TRx"], ["a"]])
def test_a_completions_reason_rides_on_the_last_chunk_that_has_text_with_its_logprobs(serve_script, stop):
    said = [*b"aTRxx"]
    with serve_script([*said, EOS]) as server:
        for limit in (1, 2, 3, 4, 5, 50):
            for n in (1, 2):
                body = {"prompt": PROMPT, "stop": stop, "max_tokens": limit, "n": n, "logprobs": 0}
                whole = server.complete(**body).json()["choices"]
                chunks = [chunk["choices"][0] for chunk in bodies(server.complete(**body, stream=True))]
                for index in range(n):
                    *others, last = [choice for choice in chunks if choice["index"] == index]
                    assert all(choice["finish_reason"] is None and choice["text"] for choice in others)
                    assert last["finish_reason"] == whole[index]["finish_reason"] is not None
                    assert last["stop_reason"] == whole[index]["stop_reason"]
                    assert "".join(choice["text"] for choice in [*others, last]) == whole[index]["text"]
                    assert all(choice["logprobs"]["tokens"] for choice in [*others, last])
                    # Nothing is left to send after an end token or a stop string, but for what was held back till then.
                    held = "x" if stop == ["xy"] and limit == 50 else ""
                    assert (last["text"] == held) if last["finish_reason"] == "stop" else last["text"]
        [*_, last] = bodies(server.complete(prompt=PROMPT, max_tokens=2, stream=True))
        assert last["choices"][0] == {"index": 0, "text": "T", "logprobs": None, "finish_reason": "length"} | {
            "stop_reason": None
        }
        # In a chat the reason has a chunk of its own.
        *_, text_chunk, last = bodies(server.chat(max_tokens=2, stream=True))
        assert (text_chunk["choices"][0]["delta"], text_chunk["choices"][0]["finish_reason"]) == (
            {"content": "T"},
            None,
        )
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")


def test_continuous_usage_stats_put_their_choices_counts_into_every_chunk(serve_script):
    both = {"include_usage": True, "continuous_usage_stats": True}

    def asked(ask, **body):
        chunks = bodies(ask(stream=True, **body))
        return [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks], chunks

    with serve_script([*b"AB", EOS], prompt_len=2) as server:
        counts, chunks = asked(server.complete, prompt=["Hi", "Hi!"], n=2, stream_options=both)
        for index, num_prompt in enumerate((2, 2, 3, 3)):
            own = [
                c for c, chunk in zip(counts, chunks, strict=True) if [x["index"] for x in chunk["choices"]] == [index]
            ]
            assert own == [(num_prompt, number) for number in range(1, len(own) + 1)]
        assert counts[-1] == (5, sum(len(texts) + 1 for texts in ("AB", "AB", "B", "B")))
        assert asked(server.complete, max_tokens=2, stream_options=both)[0] == [(2, 1), (2, 2), (2, 2)]
        assert all(c["usage"]["total_tokens"] == sum(pair) for c, pair in zip(chunks, counts, strict=True))
    with serve_script([*b"AB", EOS]) as server:
        counts, chunks = asked(server.chat, n=2, stream_options=both)
        for index in range(2):
            own = [
                c for c, chunk in zip(counts, chunks, strict=True) if [x["index"] for x in chunk["choices"]] == [index]
            ]
            assert own == [(len(PROMPT), number) for number in (0, 1, 2, 3)]  # the role, two texts, the reason
        assert counts[-1] == (len(PROMPT), 6)
        # As in vLLM only together with include_usage.
        for options in (
            {"continuous_usage_stats": True},
            both | {"include_usage": False},
            both | {"include_usage": None},
        ):
            for ask in (server.chat, server.complete):
                chunks = bodies(ask(stream=True, stream_options=options, max_tokens=2))
                assert not any("usage" in chunk for chunk in chunks)
        for options in ({"include_usage": True}, both | {"continuous_usage_stats": False}):
            *chunks, last = bodies(server.chat(stream=True, stream_options=options))
            assert "usage" in last
            assert not any("usage" in chunk for chunk in chunks)


def test_include_obfuscation_is_accepted_and_said_once_in_the_log(serve_script, milestone, caplog):
    caplog.set_level(logging.INFO)
    importlib.import_module(f"{milestone.__name__}.server.protocol")._say_once.cache_clear()
    with serve_script([*b"AB", EOS]) as server:
        for ask in (server.chat, server.complete):
            plain = bodies(ask(stream=True, max_tokens=1))
            for value in (False, True, None):
                chunks = bodies(ask(stream=True, max_tokens=1, stream_options={"include_obfuscation": value}))
                same = [[chunk["choices"] for chunk in answer] for answer in (chunks, plain)]
                assert same[0] == same[1]
                assert [chunk.keys() for chunk in chunks] == [chunk.keys() for chunk in plain]
    lines = [record.getMessage() for record in caplog.records if "obfuscat" in record.getMessage()]
    assert lines == ["stream_options.include_obfuscation: nothing to obfuscate, chunks go out as they are"]


@pytest.mark.parametrize("stop", [None, ["éx"], ["zz"]])
def test_token_ids_are_where_vllm_has_them_streamed_and_whole(serve_script, stop):
    script = [*"aézx".encode(), EOS]
    with serve_script(script) as server:
        body = {"return_token_ids": True, "n": 2, "stop": stop}
        given = server.chat(**body).json()
        assert given["prompt_token_ids"] == PROMPT
        ids = [choice["token_ids"] for choice in given["choices"]]
        assert ids == [script] * 2
        chunks = bodies(server.chat(**body, stream=True))
        for index in range(2):
            first, *others = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert (first["prompt_token_ids"], "token_ids" in first["choices"][0]) == (PROMPT, False)
            assert not any("prompt_token_ids" in chunk for chunk in others)
            assert [token_id for chunk in others for token_id in chunk["choices"][0]["token_ids"]] == script
        body |= {"prompt": [PROMPT, PROMPT[1:]]}
        given = server.complete(**body).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in given] == [PROMPT, PROMPT, PROMPT[1:], PROMPT[1:]]
        chunks = [chunk["choices"][0] for chunk in bodies(server.complete(**body, stream=True))]
        for index, whole in enumerate(given):
            first, *others = [choice for choice in chunks if choice["index"] == index]
            assert first["prompt_token_ids"] == whole["prompt_token_ids"]
            assert not any("prompt_token_ids" in choice for choice in others)
            assert [token_id for choice in [first, *others] for token_id in choice["token_ids"]] == whole["token_ids"]
        assert given[0]["token_ids"] == script
        for value in (None, False):
            for ask in (server.chat, server.complete):
                assert "token_ids" not in ask(return_token_ids=value, stop=stop).text
                assert "token_ids" not in ask(return_token_ids=value, stop=stop, stream=True).text


def test_unt_8_a_text_offset_is_a_place_in_the_text_streamed_and_whole(serve_script, serve):
    def logprobs(server, **body):
        body = {"logprobs": 0, "max_tokens": 50} | body
        [choice] = server.complete(**body).json()["choices"]
        parts = [chunk["choices"][0]["logprobs"] for chunk in bodies(server.complete(**body, stream=True))]
        assert {name: [x for part in parts for x in part[name]] for name in choice["logprobs"]} == choice["logprobs"]
        return choice["text"], choice["logprobs"]["text_offset"]

    with serve_script([*"🦜 🦜".encode(), EOT, *"é!".encode(), EOS], prompt_len=2) as server:
        shown = {"ignore_eos": True, "stop_token_ids": [EOS]}
        assert logprobs(server, **shown) == ("🦜 🦜é!", [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 4, 5])
        # Where special tokens are shown, they count.
        text, offsets = logprobs(server, skip_special_tokens=False, **shown)
        assert (text, offsets) == ("🦜 🦜<eot>é!", [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 8, 8, 9, 10])
        for limit in range(1, 10):  # an unfinished character is dropped, and nothing stands behind the end
            text, offsets = logprobs(server, max_tokens=limit)
            assert offsets == [0, 0, 0, 0, 1, 2, 2, 2, 2][:limit]
            assert offsets[-1] <= len(text)
        # A stop string's tokens have no place of their own.
        assert logprobs(server, stop=[" 🦜"]) == ("🦜", [0, 0, 0, 0, 1, 1, 1, 1, 1])
        assert logprobs(server, stop=["!"], **shown) == ("🦜 🦜é", [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 4])
    with serve_script([88, 88, 88, 88, 88, 89, EOS], prompt_len=2) as server:
        assert logprobs(server, stop=["XXXXZ"]) == ("XXXXXY", [0, 1, 2, 3, 4, 5, 6])  # held back, and sent in parts
    # A decoder that strips the space at the beginning, and a prompt that ends within a character.
    script = [*spm_ids("▁Hello", "▁world"), 2]
    with serve(ScriptModel(script, 1), tokenizer=spm_tokenizer(), num_blocks=50) as server:
        assert logprobs(server, prompt=[1]) == ("Hello world", [0, 5, 11])
        assert logprobs(server, prompt=spm_ids("x")) == (" Hello world", [0, 6, 12])
    with serve_script([153, 130, 65, EOS], prompt_len=3) as server:
        assert logprobs(server, prompt=[65, 240, 159]) == ("🙂A", [0, 0, 1, 2])
