"""What the server refuses, and how it says so: OpenAI's error object, the status, the field at fault, the true numbers.

After all of them it still answers (`refusing` asks), and what lies just within the limits is accepted.
"""

import contextlib
import importlib
import json
import logging
import random
import socket

import pytest

from tests.kit.models import ScriptModel
from tests.kit.server import USER, access_lines, events, token_counts, wait_until
from tests.kit.tokenizers import EOS, GEMMA_TEMPLATE, byte_tokenizer

SINCE = "v0_4"
JSON = {"Content-Type": "application/json"}
MAX_BODY_BYTES = 2**20  # of a small context


@contextlib.contextmanager
def refusing(server):
    """A server that still answers after all that it has refused."""
    with server as running:
        yield running
        response = running.complete(prompt=[65, 66], max_tokens=1)
        assert response.status_code == 200, response.text
        assert token_counts(response.json()["usage"]) == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}


def refused(response, param=None, says="", *, status=400, code=None):
    """Check the whole error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    message = response.json()["error"]["message"]
    expected = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert response.json() == {"error": expected}
    for words in [says] if isinstance(says, str) else says:
        assert words in message


def post(server, path, raw, headers=JSON):
    """Send bytes as they are."""
    return server.http.post(path, content=raw, headers=headers)


def completion(server, **body):
    """The text of a completion's one choice."""
    response = server.complete(**body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_api_1_wrong_requests_get_openais_error_object(serve_script):
    with refusing(serve_script([65], prompt_len=2)) as server:
        refused(server.chat(messages={"role": "user"}), "messages", "a list of objects with role and content")
        refused(server.chat(temperature="hot"), "temperature", ["temperature: ", "a valid number, got 'hot'"])
        refused(server.complete(n=True), "n", "got True")
        refused(server.complete(stream="yes"), "stream", "got 'yes'")
        refused(server.complete(stream_options={"include_usage": 1}, stream=True), "stream_options")
        refused(server.complete(stream_options={"include_usage": True}), "stream_options", "stream: true")
        refused(server.complete(model=5), "model", "got 5")
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            refused(post(server, path, b'{"model": '), None, "not valid JSON")
            response = server.http.get(path)
            refused(response, None, f"{path} does not take GET", status=405)
            assert response.headers["allow"] == "POST"
        refused(server.http.post("/v1/chat"), None, "no /v1/chat here", status=404)
        refused(server.http.delete("/v1/models"), None, "does not take DELETE", status=405)


def test_api_3_an_unknown_model_is_404_model_not_found(serve_script):
    unknown = {"status": 404, "code": "model_not_found"}
    with refusing(serve_script([65], server={"served_model_name": ["org/model", "alias"]})) as server:
        for name in ("nope", "/", "ALIAS", "model", "org/model/"):
            says = [f"'{name}' does not exist", "org/model, alias"]
            refused(server.chat(model=name), "model", says, **unknown)
            refused(server.complete(model=name, stream=True), "model", says, **unknown)
            for path, body in (("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [1]})):
                refused(server.http.post(path, json={"model": name} | body), "model", says, **unknown)
            refused(server.http.get(f"/v1/models/{name}"), "model", says, **unknown)


def test_api_9_token_ids_outside_the_vocabulary_are_refused_wherever_they_stand(serve_script):
    with refusing(serve_script([65], prompt_len=2)) as server:
        for prompt in ([-1], [999999], ["Hi", [-1]], [[65], [10**30]], [2**63], [2**31]):
            refused(server.complete(prompt=prompt), "prompt", "out of vocabulary")
        for ids in ([999999], [-1], [259], [2**64]):
            refused(server.complete(stop_token_ids=ids), "stop_token_ids", "out of vocabulary")
            refused(server.chat(stop_token_ids=ids, stream=True), "stop_token_ids", "from 0 to 258")
            detokenize = server.http.post("/detokenize", json={"tokens": [65, *ids]})
            refused(detokenize, "tokens", "out of vocabulary")
        for key, says in (("999999", "out of vocabulary"), ("-1", "out of vocabulary"), ("A", "'A'"), ("1.0", "'1.0'")):
            refused(server.complete(logit_bias={key: 5}), "logit_bias", says)
        for bias in (100.5, -101, "5", None, 10**400):
            refused(server.complete(logit_bias={"65": bias}), "logit_bias")
        refused(post(server, "/v1/completions", b'{"prompt":"Hi","logit_bias":{"65":NaN}}'), "logit_bias")


def test_api_10_prompts_that_are_empty_or_none_are_refused(serve_script):
    with refusing(serve_script([65], prompt_len=2)) as server:
        for prompt, says in (
            *(("", "empty"), ([""], "empty"), ([], "empty"), ([[]], "empty"), (["Hi", ""], "empty")),
            *((None, "must be text"), (5, "must be text"), ({"a": 1}, "must be text"), ([None], "list of token ids")),
            *(([1.5], "list of token ids"), ([72, "Hi"], "list of token ids"), ([True, 1], "list of token ids")),
        ):
            refused(server.complete(prompt=prompt), "prompt", says)
            refused(server.complete(prompt=prompt, stream=True), "prompt", says)
        refused(server.http.post("/v1/completions", json={}), "prompt", "prompt is missing")


def test_len_2_a_number_of_tokens_that_is_none_is_refused_by_name(serve_script):
    with refusing(serve_script([65], prompt_len=2, max_model_len=64)) as server:
        for value, says in ((0, "at least 1"), (-1, "at least 1"), (1.5, "1.5"), ("16", "'16'"), (True, "True")):
            refused(server.complete(max_tokens=value), "max_tokens", says)
            refused(server.chat(max_tokens=value), "max_tokens", says)
            both = server.chat(max_tokens=5, max_completion_tokens=value)
            refused(both, "max_completion_tokens", ["max_completion_tokens", says])
        for value, says in ((2147483648, "2147483648"), (2**63, str(2**63)), (10**400, "about 400 digits")):
            refused(server.complete(max_tokens=value), "max_tokens", says, code="context_length_exceeded")
        for value in (-1, 1.5, "2", True):
            refused(server.complete(min_tokens=value), "min_tokens")
        refused(server.complete(min_tokens=5, max_tokens=4), "min_tokens", ["min_tokens (5)", "max_tokens (4)"])
        response = server.chat(min_tokens=5, max_completion_tokens=4)
        refused(response, "min_tokens", ["min_tokens (5)", "max_completion_tokens (4)"])
        for value in (0, -1, 129, 1.5, "2", 10**400):
            refused(server.complete(n=value), "n")


def test_len_3_a_prompt_over_the_context_is_a_plain_400_with_both_numbers(serve_script):
    long = {"code": "context_length_exceeded"}
    with refusing(serve_script([65], prompt_len=63, max_model_len=64)) as server:
        for stream in (False, True):
            for length in (64, 65):
                says = [f"prompt has {length} tokens", "holds 64 tokens"]
                response = server.complete(prompt="a" * length, max_tokens=1, stream=stream)
                refused(response, "prompt", says, **long)
                content = "a" * (length - 21)
                response = server.chat(messages=[{"role": "user", "content": content}], stream=stream)
                refused(response, "messages", says, **long)
        assert completion(server, prompt="a" * 63, max_tokens=1) == "A"
        # One of several is enough, and none of them runs.
        refused(server.complete(prompt=["Hi", "a" * 65], max_tokens=1), "prompt", "65", **long)


def test_len_5_prompt_and_max_tokens_over_the_context_are_refused_and_not_cut(serve_script):
    long = {"code": "context_length_exceeded"}
    with refusing(serve_script([65], prompt_len=8, max_model_len=64)) as server:
        says = ["8 tokens and max_tokens asks for 60 more", "together 68", "holds 64"]
        refused(server.complete(prompt="12345678", max_tokens=60), "max_tokens", says, **long)
        refused(server.complete(prompt="12345678", max_tokens=57, stream=True), "max_tokens", "65", **long)
        says = ["23 tokens and max_completion_tokens asks for 42 more", "together 65", "lower max_completion_tokens"]
        refused(server.chat(max_completion_tokens=42), "max_completion_tokens", says, **long)
        refused(server.complete(max_tokens=None, min_tokens=63), "min_tokens", "63", **long)
        assert completion(server, prompt="12345678", max_tokens=56) == "A" * 56


def test_a_request_over_the_whole_pool_is_refused_and_blocks_nobody(serve_script):
    with refusing(serve_script([65], prompt_len=2, num_blocks=4, block_size=4, max_model_len=64)) as server:
        for body in ({"prompt": [65] * 20, "max_tokens": 1}, {"max_tokens": 16}):
            param = "prompt" if "prompt" in body else "max_tokens"
            says = "the whole KV pool holds 16"
            refused(server.complete(**body), param, says, code="context_length_exceeded")
        assert completion(server, max_tokens=15) == "A" * 15


def test_tpl_2_without_a_template_chats_are_refused_and_completions_served(serve):
    model = ScriptModel([65], 2)
    with refusing(serve(model, tokenizer=byte_tokenizer(chat_template=None), num_blocks=50)) as server:
        refused(server.chat(), "messages", "no chat template")
        refused(server.chat(stream=True), "messages", "no chat template")
        refused(server.http.post("/tokenize", json={"messages": USER}), "messages", "no chat template")
        assert completion(server, max_tokens=3) == "AAA"


def test_tpl_3_a_turn_cannot_be_opened_and_continued_at_once(serve_script):
    with refusing(serve_script([65])) as server:
        both = {"add_generation_prompt": True, "continue_final_message": True}
        messages = [*USER, {"role": "assistant", "content": "Yes"}]
        refused(server.chat(messages=messages, **both), "continue_final_message", "exclude each other")
        tokenize = server.http.post("/tokenize", json={"messages": messages} | both)
        refused(tokenize, "continue_final_message", "exclude each other")
        refused(server.chat(continue_final_message=True), "continue_final_message", "'user'")


def test_tpl_5_what_the_template_refuses_is_400_in_its_words(serve):
    tokenizer = byte_tokenizer(chat_template=GEMMA_TEMPLATE)
    with refusing(serve(ScriptModel([65], 2), tokenizer=tokenizer, num_blocks=50)) as server:
        for role in ("system", "developer"):
            messages = [{"role": role, "content": "Be."}, *USER]
            refused(server.chat(messages=messages), "messages", "System role not supported")
        for stream in (False, True):
            refused(server.chat(messages=USER * 2, stream=stream), "messages", "roles must alternate")
        refused(server.http.post("/tokenize", json={"messages": USER * 2}), "messages", "roles must alternate")
        assert server.chat(max_tokens=1).status_code == 200


def test_tpl_8_messages_that_are_no_conversation_are_refused(serve_script):
    with refusing(serve_script([65], prompt_len=2)) as server:
        refused(server.chat(messages=[]), "messages", "empty", code="empty_array")
        refused(server.http.post("/v1/chat/completions", json={}), "messages", "messages is missing")
        for messages in ({"role": "user", "content": "Hi"}, "Hi", 5, None, ["Hi"], [[]], [None], [{}]):
            refused(server.chat(messages=messages), "messages")
        for message, says in (
            ({"role": "robot", "content": "Hi"}, ["messages[1]", "'robot'"]),
            ({"role": 5, "content": "Hi"}, ["messages[1]", "role 5"]),
            ({"content": "Hi"}, ["messages[1]", "role None"]),
            ({"role": "user"}, "messages[1] has no content"),
            ({"role": "user", "content": 5}, "messages[1].content"),
            ({"role": "user", "content": ["Hi"]}, "messages[1].content[0]"),
            ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "only text is supported"),
            ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
            ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "tool_calls"),
            ({"role": "user", "content": "Hi", "name": 5}, "messages[1].name"),
        ):
            refused(server.chat(messages=[*USER, message]), "messages", says)


def test_lgp_4_logprobs_that_contradict_themselves_are_refused(serve_script):
    with refusing(serve_script([65], prompt_len=2)) as server:
        refused(server.chat(top_logprobs=3), "top_logprobs", "needs logprobs: true")
        refused(server.chat(top_logprobs=3, logprobs=False), "top_logprobs", "needs logprobs: true")
        for value in (21, -1, 10**30):
            says = ["top_logprobs must be at least 0 and at most 20", str(value)]
            refused(server.chat(logprobs=True, top_logprobs=value), "top_logprobs", says)
            says = ["logprobs must be at least 0 and at most 20", str(value)]
            refused(server.complete(logprobs=value), "logprobs", says)
        refused(server.chat(logprobs=2), "logprobs", "got 2")
        refused(server.complete(logprobs=True), "logprobs", "got True")
        top = server.chat(logprobs=True, top_logprobs=20, max_tokens=1).json()["choices"][0]["logprobs"]
        assert len(top["content"][0]["top_logprobs"]) == 20
        assert server.chat(top_logprobs=0, max_tokens=1).json()["choices"][0]["logprobs"] is None


def test_stp_6_a_stop_is_a_string_or_any_number_of_them_but_never_empty(serve_script):
    with refusing(serve_script([*b"one\ntwo", EOS], prompt_len=2)) as server:
        for stop, text, reason in (
            *((None, "one\ntwo", None), ([], "one\ntwo", None), ("\n", "one", "\n"), (["\n"], "one", "\n")),
            (["1", "2", "3", "4", "5", "tw"], "one\n", "tw"),
        ):
            choice = server.complete(stop=stop).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)
            chunks = [json.loads(event)["choices"][0] for event in events(server.complete(stop=stop, stream=True))[:-1]]
            assert "".join(chunk["text"] for chunk in chunks) == text
            assert (chunks[-1]["text"], chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("", "stop", reason)
        for stop in ("", [""], ["a", ""], 5, [5], {"a": 1}, [None], [["a"]], True):
            refused(server.complete(stop=stop), "stop")
            refused(server.chat(stop=stop, stream=True), "stop")


def test_smp_8_numbers_outside_their_range_or_not_finite_are_refused_by_name(serve_script):
    with refusing(serve_script([65], prompt_len=2)) as server:
        for name, values in (
            ("temperature", ("-0.1", "2.1", "true", '"1"', "[]", "1" + "0" * 400)),
            ("top_p", ("0", "-0.1", "1.1")),
            ("min_p", ("-0.1", "1.1")),
            ("presence_penalty", ("-2.1", "2.1")),
            ("frequency_penalty", ("-2.1", "2.1")),
            ("repetition_penalty", ("0", "-1")),
            ("seed", ("1.5", '"1"', "true", str(2**63), str(-(2**63) - 1), "1" + "0" * 400)),
        ):
            for value in (*values, "NaN", "Infinity", "-Infinity", "1e999"):
                refused(post(server, "/v1/completions", f'{{"prompt":"Hi","{name}":{value}}}'.encode()), name)
        within = {"temperature": 2, "top_p": 1, "min_p": 1, "presence_penalty": -2, "frequency_penalty": 2}
        for name, value in (
            *within.items(),
            ("seed", -1),
            ("seed", 2**63 - 1),
            ("seed", -(2**63)),
            ("repetition_penalty", 0.01),
        ):
            assert server.complete(**{"max_tokens": 1, name: value}).status_code == 200, name


def test_smp_9_top_k_is_off_greedy_or_refused_and_spare_rows_are_never_sampled(serve_script):
    with serve_script([270, 271], prompt_len=2) as server:  # rows that belong to no token
        assert completion(server, max_tokens=2) == "xx"
        sampled = {"temperature": 2, "max_tokens": 40, "ignore_eos": True, "seed": 3, "skip_special_tokens": False}
        off = completion(server, **sampled)
        assert len(set(off)) > 10
        for top_k in (0, -1, None):
            assert completion(server, top_k=top_k, **sampled) == off
        assert completion(server, top_k=1, **sampled) == "x" * 40
        for top_k in (259 + 5, 10**30):  # more than there are
            assert len(set(completion(server, top_k=top_k, **sampled))) > 10
        for top_k in (-2, 1.5, "5", True):
            refused(server.complete(top_k=top_k), "top_k")


def test_fields_that_would_change_the_answer_are_refused_with_the_reason_and_accepted_where_they_would_not(
    serve_script, milestone
):
    fields = importlib.import_module(f"{milestone.__name__}.server.fields")
    asked = {
        "tools": [{"type": "function"}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "best_of": 2,
        "suffix": "x",
        "guided_json": {},
        "bad_words": ["x"],
        "use_beam_search": True,
        "typical_p": 0.9,
        "mirostat": True,
        "mirostat_tau": 5,
        "priority": -1,
        "length_penalty": "1",
        "n_predict": 5,
    }
    assert asked.keys() <= fields.HARMLESS.keys()
    on_chats = {"max_completion_tokens", "top_logprobs"}  # which are used there
    with refusing(serve_script([*b"ABC", EOS], prompt_len=2)) as server:
        for name, values in fields.HARMLESS.items():
            says = f"{name} is not supported: {fields.REASONS[name]}."
            if name != "echo":  # which is used here
                refused(server.complete(**{name: asked.get(name, {"surely": "not harmless"})}), name, says)
                for value in (*values, None):
                    assert completion(server, **{name: value}) == "ABC", (name, value)
            if name not in on_chats:
                refused(server.chat(stream=True, **{name: asked.get(name, 5)}), name, says)
        harmless = {name: values[0] for name, values in fields.HARMLESS.items() if values and name not in on_chats}
        assert server.chat(max_tokens=1, **harmless).status_code == 200
        tokenize = {"messages": USER, "tools": [{}]}
        refused(server.http.post("/tokenize", json=tokenize), "tools", "tools is not supported")
        whole = {"messages": USER, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2, "stream": True}
        assert server.http.post("/tokenize", json=whole).status_code == 200  # a chat's body, to be counted


def test_unt_19_a_value_that_asks_for_what_is_done_anyway_is_accepted_and_any_other_refused(serve_script):
    with refusing(serve_script([*b"ABC", EOS], prompt_len=2)) as server:
        for more in (
            *({"spaces_between_special_tokens": value} for value in (False, True)),
            *({"best_of": value, "n": value} for value in (1, 2, 5)),
            {"best_of": 1},
            {"tools": [], "tool_choice": "none"},
            {"tool_choice": "none", "parallel_tool_calls": True},
            {"response_format": {"type": "text"}},
            {"response_format": {"type": "text", "json_schema": None}},
            {"priority": 0, "length_penalty": 1, "repetition_detection": None, "vllm_xargs": {}},
            {"stream": True, "stream_options": {"include_obfuscation": False}},
            {"stream": False, "stream_options": {"include_usage": False, "unknown": None}},
            {"chat_template_kwargs": {}} | {"modalities": ["text"]},
        ):
            for ask in (server.complete, server.chat):
                response = ask(**more)
                assert response.status_code == 200, (more, response.text)
        for name, value, more in (
            ("best_of", 2, {}),
            ("best_of", 1, {"n": 2}),
            ("best_of", 3, {"n": 2}),
            ("best_of", True, {}),
            ("tools", [{}], {"tool_choice": "none"}),
            ("tool_choice", {"type": "function", "function": {"name": "f"}}, {}),
            ("response_format", {"type": "json_object"}, {}),
            ("response_format", {"type": "text", "json_schema": {}}, {}),
            ("priority", 1, {}),
            ("priority", False, {}),
            ("use_beam_search", 0, {}),
            ("truncate_prompt_tokens", -1, {}),
            ("truncate_prompt_tokens", 1000, {}),
            ("truncation_side", "left", {}),
        ):
            for ask in (server.complete, server.chat):
                refused(ask(**{name: value} | more), name, f"{name} is not supported: ")


def test_every_field_of_openais_api_is_used_refused_or_known_to_change_nothing(milestone):
    chat = pytest.importorskip("openai.types.chat.completion_create_params")
    completion_params = importlib.import_module("openai.types.completion_create_params")
    protocol, fields = (
        importlib.import_module(f"{milestone.__name__}.server.{name}") for name in ("protocol", "fields")
    )
    for kind, theirs in (
        (protocol.ChatCompletionRequest, chat.CompletionCreateParamsStreaming),
        (protocol.CompletionRequest, completion_params.CompletionCreateParamsStreaming),
    ):
        assert theirs.__annotations__.keys() - kind.model_fields.keys() - fields.KNOWN == set()
    used = protocol.ChatCompletionRequest.model_fields.keys() & protocol.CompletionRequest.model_fields.keys()
    assert not used & fields.KNOWN
    names = [name for group in (*fields.REFUSED.values(), *fields.IGNORED.values()) for name in group]
    assert len(names) == len(set(names))


def test_tokenize_and_detokenize_refuse_what_is_neither_text_nor_ids(serve_script):
    with refusing(serve_script([65])) as server:
        for body, param, says in (
            ({}, "prompt", "one of the two"),
            ({"prompt": "Hi", "messages": USER}, "prompt", "one of the two"),
            ({"prompt": ["Hi"]}, "prompt", "valid string"),
            ({"messages": []}, "messages", "empty"),
            ({"prompt": "Hi", "return_token_strs": 1}, "return_token_strs", "got 1"),
        ):
            code = "empty_array" if body == {"messages": []} else None
            refused(server.http.post("/tokenize", json=body), param, says, code=code)
        for tokens in (None, "Hi", 5, ["Hi"], [1.0], [True], [[1]]):
            refused(server.http.post("/detokenize", json={"tokens": tokens}), "tokens")
        refused(server.http.post("/detokenize", json={}), "tokens", "tokens is missing")


def test_bodies_that_are_no_json_object_are_refused(serve_script):
    with refusing(serve_script([65], prompt_len=2)) as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            for raw in (b"", b"null", b"[]", b"5", b'"Hi"', b"true", b"[{}]"):
                refused(post(server, path, raw), None, "must be a JSON object")
        for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
            response = post(server, "/v1/completions", b'{"prompt":"Hi"}', headers)
            refused(response, None, "Content-Type: application/json")
        for content_type in ("application/json; charset=utf-8", "APPLICATION/JSON"):
            response = post(server, "/v1/completions", b'{"prompt":"Hi"}', {"Content-Type": content_type})
            assert response.status_code == 200
        for raw in (b"{", b"{'prompt': 'Hi'}", b'{"prompt":"Hi"}}', b'{"prompt":"Hi",}', b"\x00", b'{"prompt":"a\nb"}'):
            refused(post(server, "/v1/completions", raw), None, "not valid JSON")
        for raw in (b'{"prompt":"\xff"}', b'{"seed":1' + b"0" * 5000 + b"}"):  # no UTF-8; more digits than Python reads
            assert post(server, "/v1/completions", raw).status_code == 400


def test_lone_surrogates_are_refused_where_they_are_text_and_never_a_500(serve_script):
    half = "\\ud83d"
    with refusing(serve_script([65])) as server:
        for path, body, param in (
            ("/v1/completions", f'{{"prompt":"{half}"}}', "prompt"),
            ("/v1/completions", f'{{"prompt":["Hi","{half}"],"stream":true}}', "prompt"),
            ("/v1/chat/completions", f'{{"messages":[{{"role":"user","content":"{half}"}}]}}', "messages"),
            ("/v1/chat/completions", f'{{"messages":[{{"role":"{half}","content":"Hi"}}]}}', "messages"),
            ("/tokenize", f'{{"prompt":"{half}"}}', "prompt"),
            ("/detokenize", f'{{"tokens":"{half}"}}', "tokens"),
            ("/v1/completions", f'{{"prompt":"Hi","tools":"{half}"}}', "tools"),
            ("/v1/completions", f'{{"prompt":"Hi","logit_bias":{{"{half}":1}}}}', "logit_bias"),
        ):
            refused(post(server, path, body.encode()), param)
        unknown = post(server, "/v1/completions", f'{{"prompt":"Hi","model":"{half}"}}'.encode())
        refused(unknown, "model", status=404, code="model_not_found")
        for field in (f'"user":"{half}"', f'"stop":"{half}"'):  # ignored; can never come
            assert post(server, "/v1/completions", f'{{"prompt":"Hi",{field}}}'.encode()).status_code == 200
        response = post(server, "/v1/completions", f'{{"prompt":"Hi","{half}":1}}'.encode())
        assert response.status_code in (200, 400)
        assert "must be a JSON object" not in response.text  # it is one


def test_json_nested_to_any_depth_is_refused_and_never_a_500(serve_script):
    # Around 950 levels Python's limit lets a body in, and then not everything be done with it.
    with refusing(serve_script([65], prompt_len=2)) as server:
        for depth in (2, 100, *range(930, 1000), 5000, 100_000):
            nested = b"[" * depth + b"]" * depth
            response = post(server, "/v1/completions", b'{"prompt":"Hi","stop":%s}' % nested)
            assert response.status_code == 400, (depth, response.text)
        for depth in (100, 900, 100_000):
            nested = b"[" * depth + b"]" * depth
            for path, body in (("chat/completions", b'{"messages":%s}'), ("completions", b'{"prompt":%s}')):
                assert post(server, f"/v1/{path}", body % nested).status_code == 400
            response = post(server, "/v1/completions", b'{"prompt":"Hi","user":%s}' % nested)
            assert response.status_code == (200 if depth < 1000 else 400)
        assert completion(server, max_tokens=2) == "AA"


def test_api_5_a_key_guards_the_api_and_leaves_probes_and_preflights_free(serve_script):
    wrong = {"status": 401, "code": "invalid_api_key"}
    origin = {"Origin": "https://a.example"}
    with refusing(serve_script([65], prompt_len=2, server={"api_key": ["KEY", "second"]})) as server:
        http = server.http
        answers = [
            (http.get("/v1/models", headers=origin), "needs an API key"),
            *((http.get(path), "needs an API key") for path in ("/v1/models/tiny", "/v1/none", "/v1/completions")),
            *((http.post(path, content=b"{"), "needs an API key") for path in ("/tokenize", "/detokenize")),
            *((call(stream=True), "needs an API key") for call in (server.chat, server.complete)),
        ]
        for given in ("Bearer KEYS", "Bearer key", "Bearer KE", "Basic KEY", "Bearer KEY second", b"Bearer \xfc"):
            answers.append((http.get("/v1/models", headers={"Authorization": given}), "The API key is wrong"))
        for given in ("KEY", "Bearer", ""):
            answers.append((http.get("/v1/models", headers={"Authorization": given}), "needs an API key"))
        for given in ("Bearer KEY", "bearer KEY", "BEARER second"):
            assert http.get("/v1/models", headers={"Authorization": given}).status_code == 200
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert http.get(path).status_code == 200
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        preflight = http.options("/v1/chat/completions", headers=origin | asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "*"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        http.headers["Authorization"] = "Bearer KEY"  # for what `refusing` asks
        for response, says in answers:
            refused(response, None, says, **wrong)
            assert response.headers["www-authenticate"] == "Bearer"
        assert answers[0][0].headers["access-control-allow-origin"] == "*"  # or a page could not read why


def test_api_5_the_key_may_come_from_the_environment_and_the_flag_wins(serve_script, monkeypatch):
    for variable, flag, right in (("ENV", None, "ENV"), ("ENV", ["FLAG"], "FLAG"), ("", None, None)):
        monkeypatch.setenv("MINI_VLLM_API_KEY", variable)
        with serve_script([65], server={"api_key": flag}) as server:
            statuses = {
                key: server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
                for key in ("ENV", "FLAG")
            }
            assert statuses == {key: 200 if right in (key, None) else 401 for key in statuses}


def test_api_5_only_allowed_origins_may_call_from_a_page(serve_script):
    with refusing(serve_script([65], server={"allowed_origins": '["https://a.example"]'})) as server:
        for host, status, allowed in (("a", 200, "https://a.example"), ("b", 400, None)):
            headers = {"Origin": f"https://{host}.example", "Access-Control-Request-Method": "POST"}
            preflight = server.http.options("/v1/completions", headers=headers)
            assert preflight.status_code == status
            assert preflight.headers.get("access-control-allow-origin") == allowed
            assert server.http.get("/v1/models", headers=headers).headers.get("access-control-allow-origin") == allowed


def test_a_body_over_the_limit_is_413_announced_and_in_chunks(serve_script):
    large = {"status": 413, "code": "request_too_large"}
    body = b'{"prompt":"Hi","max_tokens":2,"temperature":0}'
    with refusing(serve_script([65], prompt_len=2)) as server:
        fits = post(server, "/v1/completions", body.ljust(MAX_BODY_BYTES))
        assert fits.json()["choices"][0]["text"] == "AA"
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            chunks = (body.ljust(2**17) if number == 0 else b" " * 2**17 for number in range(8))
            in_chunks = post(server, path, (part for parts in (chunks, [b" "]) for part in parts))
            refused(in_chunks, None, f"over {MAX_BODY_BYTES} bytes", **large)
        # Announced: refused before one byte of it is sent.
        with socket.create_connection((server.http.base_url.host, server.http.base_url.port), timeout=20) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        assert answer.startswith("HTTP/1.1 413 ")
        assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "request_too_large"
        assert completion(server, max_tokens=2) == "AA"


@pytest.mark.parametrize("end", ["%0A", "%0D%0A", "%E2%80%A8", "%C2%85"])
def test_no_request_writes_a_second_line_into_the_log(serve_script, caplog, end):
    caplog.set_level(logging.INFO)
    forged = f"GET{end}INFO access: GET /v1/models 200"
    with refusing(serve_script([65])) as server:
        refused(server.http.get(f"/none{end}INFO%20access:%20forged%20200"), None, status=404)
        server.http.get("/health", headers={"X-Request-Id": b"a\x85INFO access: forged \xa0b"})
        server.chat(model=forged)
        wait_until(lambda: len(access_lines(caplog)) == 3, "the log has a line for each")
        health, none, chat = sorted(access_lines(caplog))  # a line comes when its answer has gone, in any order
        assert all(len(line.splitlines()) == 1 for line in access_lines(caplog))
        assert health.startswith("GET /health 200 request_id=aINFOaccess:forgedb ms=")
        assert none.startswith("GET /none\\")
        assert " 404 request_id=" in none
        assert chat.startswith("POST /v1/chat/completions 404 request_id=")


def test_stop_strings_and_ids_without_number_or_end_are_refused(serve_script):
    with refusing(serve_script([65])) as server:
        refused(server.complete(stop=["x"] * 1025), "stop", "at most 1024 characters")
        refused(server.complete(stop="x" * 1025), "stop", "at most 1024 characters")
        refused(server.complete(stop_token_ids=[1] * 1025), "stop_token_ids", "1024")
        assert server.complete(stop=["x" * 1024] * 4, max_tokens=1).status_code == 200


def test_fields_that_mean_something_else_in_a_chat_and_options_of_a_stream_are_refused(serve_script):
    with refusing(serve_script([65])) as server:
        refused(server.chat(echo=True), "echo", "not supported")
        refused(server.chat(add_special_tokens=True), "add_special_tokens", "not supported")
        refused(server.complete(add_special_tokens=False), "add_special_tokens", "not supported")
        options = {"include_usage": True, "include_timings": True}
        refused(server.complete(stream=True, stream_options=options), "stream_options", "include_timings")
        for name in ("continuous_usage_stats", "include_obfuscation"):
            refused(server.chat(stream=True, stream_options={name: 1}), "stream_options", "got 1")
        assert server.chat(echo=False, add_special_tokens=False, max_tokens=1).status_code == 200
        assert server.complete(add_special_tokens=True, max_tokens=1).status_code == 200
        for name, says in (("max_completion_tokens", "called max_tokens"), ("top_logprobs", "called logprobs")):
            refused(server.complete(**{name: 5}), name, says)


def test_a_path_with_a_slash_too_many_is_a_404_and_no_redirect(serve_script):
    with serve_script([65]) as server:
        answer = server.http.post("/tokenize/", json={"prompt": "a"}, headers={"Host": "evil.example"})
    assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_unt_7_numbers_with_thousands_of_digits_are_400_and_no_message_repeats_more_than_a_line(serve_script):
    digits = "9" * 4300  # the most that Python reads
    fields = ("max_tokens", "min_tokens", "n", "top_k", "seed", "logprobs", "top_logprobs", "temperature", "top_p")
    line = 500  # of a whole message; what the caller sent is 4,000 characters and more
    with refusing(serve_script([65], prompt_len=2)) as server:
        for route in ("/v1/completions", "/v1/chat/completions"):
            prompt = '"prompt":"Hi"' if route == "/v1/completions" else '"messages":[{"role":"user","content":"Hi"}]'
            for name in (*fields, "max_completion_tokens", "repetition_penalty", "stop_token_ids", "logit_bias"):
                for value in (digits, f"-{digits}", f'"{digits}"', f"[{digits}]", f'{{"{digits}":{digits}}}'):
                    response = post(server, route, f'{{{prompt},"max_tokens":1,"{name}":{value}}}'.encode())
                    assert response.status_code in (200, 400), (route, name, value[:9], response.text[:300])
                    assert len(response.text) < line or response.status_code == 200, response.text[:600]
            both = f'{{{prompt},"min_tokens":{digits},"max_tokens":{digits[:-1]}}}'
            refused(post(server, route, both.encode()), "min_tokens", ["about 4,300 digits", "about 4,299 digits"])
        long = {"status": 404, "code": "model_not_found"}
        asked = (
            (server.complete(max_tokens=int(digits)), "max_tokens", {"code": "context_length_exceeded"}),
            (
                server.complete(max_tokens=None, min_tokens=int(digits)),
                "min_tokens",
                {"code": "context_length_exceeded"},
            ),
            (server.complete(prompt=[int(digits)]), "prompt", {}),
            (server.complete(stop_token_ids=[int(digits)]), "stop_token_ids", {}),
            (server.complete(logit_bias={"a" * 5000: 1}), "logit_bias", {}),
            (server.complete(logit_bias={"a" * 5000: "b"}), "logit_bias", {}),
            (server.complete(model="a" * 5000), "model", long),
            (server.complete(stream=True, stream_options={"a" * 5000: 1}), "stream_options", {}),
            (server.complete(stop=[["a" * 5000] * 9] * 9), "stop", {}),
            (server.chat(messages=[{"role": "a" * 5000, "content": "Hi"}]), "messages", {}),
            (server.chat(messages=[{"role": "user", "content": [{"type": "a" * 5000}]}]), "messages", {}),
            (server.http.post("/detokenize", json={"tokens": [int(digits)]}), "tokens", {}),
            (server.http.get("/none/" + "a" * 5000), None, {"status": 404}),
            (server.http.get("/v1/models/" + "a" * 5000), "model", long),
            (server.http.request("A" * 5000, "/v1/models"), None, {"status": 405}),
            (server.http.request("GET", "/v1/completions/" + "\\u2028" * 999), None, {"status": 404}),
        )
        for response, param, more in asked:
            refused(response, param, **more)
            assert len(response.text) < line, response.text[:600]


def test_what_the_server_tells_a_template_itself_may_not_be_overridden(serve_script):
    names = ("messages", "tokenize", "chat_template", "add_generation_prompt", "continue_final_message", "tools")
    with refusing(serve_script([65])) as server:
        for name in (*names, "conversation", "conversations", "self", "return_dict", "padding"):
            for ask in (server.chat, lambda **body: server.http.post("/tokenize", json={"messages": USER} | body)):
                refused(ask(chat_template_kwargs={name: True}), "chat_template_kwargs", f"may not have {name}")
        for kwargs in ([], "a", 5, True, [["a", 1]]):
            refused(server.chat(chat_template_kwargs=kwargs), "chat_template_kwargs")
        for depth in (90, 400, 700, 900, 940):
            nested = '{"a":' * depth + "1" + "}" * depth
            body = f'{{"messages":[{{"role":"user","content":"Hi"}}],"max_tokens":1,"chat_template_kwargs":{nested}}}'
            assert post(server, "/v1/chat/completions", body.encode()).status_code in (200, 400), depth


WRONG = [
    *(None, True, False, 0, 1, -1, 2, 0.5, 1.0, 2**31, 2**63, -(2**64), 10**30, 10**400, 1e300, -0.0),
    *("", "a", "1", "é\x00", "x" * 5000, [], {}, [None], [1], [0.5], ["a"], [[]], [{}], [True]),
    *({"a": 1}, {"1": 1}, {"1": "a"}, {"type": "text"}, {"type": "a"}, {"a": {"a": {}}}, [[1]], [["a"]], ["a", 1]),
]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_every_field_with_a_value_of_each_wrong_type_is_400_or_accepted_and_never_a_5xx(serve_script, milestone, route):
    protocol, fields = (
        importlib.import_module(f"{milestone.__name__}.server.{name}") for name in ("protocol", "fields")
    )
    kind, least = {
        "/v1/completions": (protocol.CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
        "/v1/chat/completions": (protocol.ChatCompletionRequest, {"messages": USER, "max_tokens": 1}),
        "/tokenize": (protocol.TokenizeRequest, {"prompt": "Hi"}),
        "/detokenize": (protocol.DetokenizeRequest, {"tokens": [65]}),
    }[route]
    chooser, statuses = random.Random(0), set()
    used = [(name, value) for name in kind.model_fields for value in WRONG]
    others = [(name, chooser.choice(WRONG)) for name in [*sorted(fields.KNOWN), "unknown"]]
    with refusing(serve_script([65], prompt_len=2, max_model_len=64)) as server:
        for name, value in used + others:
            response = server.http.post(route, json=least | {name: value})
            assert response.status_code in (200, 400, 404), (name, value, response.text[:500])
            assert response.status_code != 404 or name == "model"
            assert response.status_code == 200 or len(response.text) < 600, (name, response.text)
            statuses.add(response.status_code)
        for name in ("include_usage", "continuous_usage_stats", "include_obfuscation", "unknown"):
            for value in WRONG if route.startswith("/v1") else ():
                response = server.http.post(route, json=least | {"stream": True, "stream_options": {name: value}})
                assert response.status_code in (200, 400), (name, value)
                assert "server_error" not in response.text
    assert statuses == {200, 400, 404}


def test_unt_23_a_chat_template_that_fails_is_a_400_that_says_how(serve_script):
    for template, says in (("{{ 1/0 }}", "ZeroDivisionError"), ("{{ '{5}'.format(1) }}", "IndexError")):
        tokenizer = byte_tokenizer(chat_template=template)
        with refusing(serve_script([65], prompt_len=2, tokenizer=tokenizer)) as server:
            refused(server.chat(), "messages", ["chat template failed", says])
            refused(server.chat(stream=True), "messages", ["chat template failed", says])


def test_unt_60_min_tokens_alone_is_told_of_the_default_that_it_is_above(serve_script):
    with refusing(serve_script([65], prompt_len=2)) as server:
        says = ["min_tokens (17)", "max_tokens, which was not sent and is 16 by default"]
        refused(server.complete(min_tokens=17), "min_tokens", says)
