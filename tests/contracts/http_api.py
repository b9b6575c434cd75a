"""What the server answers: OpenAI's bodies with the engine's values, and what the log and the metrics say of them."""

import importlib
import importlib.metadata
import json
import logging
import math

import pytest
import torch

from tests.kit.models import ScriptModel, Stepped
from tests.kit.server import USER, bodies, counts, events, only, post_lines, streamed, texts, token_counts
from tests.kit.tokenizers import BOS, EOS, EOT, byte_tokenizer, spm_ids, spm_tokenizer

SINCE = "v0_4"
CHAT_LEN = 23  # tokens of `server.chat()`'s prompt: <bos>[user]\nHi<eot>[assistant]\n
NORM = math.log(math.exp(10) + math.exp(5) + 257)  # of SCRIPT's logits: the best, the runner-up, the other tokens


class Shaped(ScriptModel):
    """SCRIPT with other logits: what `change` makes of its own."""

    def __init__(self, script, prompt_len, change):
        super().__init__(script, prompt_len)
        self.change = change

    def logits(self, hidden):
        return self.change(super().logits(hidden))


def test_api_3_every_listed_name_is_accepted_and_given_back(serve_script):
    names = ["org/model", "alias"]
    with serve_script([65, EOS], max_model_len=64, server={"served_model_name": names}) as server:
        listed = server.http.get("/v1/models").json()
        assert listed.keys() == {"object", "data"}
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == names
        for card in listed["data"]:
            assert (card["object"], card["owned_by"], type(card["created"])) == ("model", "mini-vllm", int)
            assert (card["root"], card["max_model_len"]) == ("SmolLM2-135M-Instruct", 64)  # what was loaded by default
            for path in (card["id"], card["id"].replace("/", "%2F")):
                assert server.http.get(f"/v1/models/{path}").json() == card
            for response in (server.chat(model=card["id"]), server.complete(model=card["id"])):
                assert response.json()["model"] == card["id"]
            for call in (server.chat, server.complete):
                assert {chunk["model"] for chunk in bodies(call(model=card["id"], stream=True))} == {card["id"]}
        assert server.chat().json()["model"] == server.complete(model=None).json()["model"] == "org/model"
        assert server.http.get("/health").json() == {"status": "ok"}
        assert server.http.get("/version").json() == {"version": importlib.metadata.version("mini-vllm")}


def test_chat_and_completion_bodies_hold_openais_fields_and_no_others(serve_script):
    with serve_script([65, 66, EOT]) as server:
        chat, other = server.chat().json(), server.chat().json()
        assert chat["id"].startswith("chatcmpl-")
        assert chat["id"] != other["id"]
        end = {"logprobs": None, "finish_reason": "stop", "stop_reason": EOT}
        chat["usage"] = token_counts(chat["usage"])
        assert chat == {
            "id": chat["id"],
            "object": "chat.completion",
            "created": chat["created"],
            "model": "tiny",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "AB"}} | end],
            "usage": {"prompt_tokens": CHAT_LEN, "completion_tokens": 3, "total_tokens": CHAT_LEN + 3},
        }
        body = server.complete(prompt=[65] * CHAT_LEN, max_tokens=2).json()
        assert body["id"].startswith("cmpl-")
        end = {"logprobs": None, "finish_reason": "length", "stop_reason": None}
        body["usage"] = token_counts(body["usage"])
        assert body == {
            "id": body["id"],
            "object": "text_completion",
            "created": body["created"],
            "model": "tiny",
            "choices": [{"index": 0, "text": "AB"} | end],
            "usage": {"prompt_tokens": CHAT_LEN, "completion_tokens": 2, "total_tokens": CHAT_LEN + 2},
        }
        assert type(chat["created"]) is type(body["created"]) is int


def test_len_1_completions_default_to_16_tokens_and_chat_to_the_rest_of_the_context(serve_script):
    with serve_script([65], max_model_len=64) as server:
        assert counts(server.complete()) == (2, 16)
        assert counts(server.complete(max_tokens=None)) == (2, 62)
        for response in (server.chat(), server.chat(max_tokens=None), server.chat(max_completion_tokens=None)):
            assert counts(response) == (CHAT_LEN, 64 - CHAT_LEN)
            assert only(response)["finish_reason"] == "length"


def test_len_6_max_completion_tokens_wins_over_max_tokens(serve_script):
    with serve_script([65]) as server:
        for more in ({}, {"max_tokens": 50}, {"max_tokens": 2}):
            response = server.chat(max_completion_tokens=5, **more)
            assert counts(response) == (CHAT_LEN, 5)
            assert only(response)["finish_reason"] == "length"
        assert counts(server.chat(max_completion_tokens=None, max_tokens=4)) == (CHAT_LEN, 4)


def test_len_8_min_tokens_holds_back_every_end_and_ignore_eos_shows_no_special_text(serve_script):
    with serve_script([EOT, EOS, 66, 67, EOT]) as server:
        for stream in (False, True):
            response = server.chat(min_tokens=4, stream=stream)
            assert (streamed(response) == {0: ("xxBC", "stop")}) if stream else (counts(response) == (CHAT_LEN, 5))
        assert only(server.chat(min_tokens=4))["message"]["content"] == "xxBC"
        response = server.chat(ignore_eos=True, max_tokens=6)
        assert (only(response)["message"]["content"], only(response)["finish_reason"]) == ("BC", "length")
        assert counts(response) == (CHAT_LEN, 6)
    with serve_script([*b"abcdefgh"], prompt_len=2) as server:
        assert texts(server.complete(min_tokens=4, stop=["b"], max_tokens=8)) == ["abcdefgh"]
        assert texts(server.complete(min_tokens=4, stop_token_ids=[98, 103], max_tokens=8)) == ["axcdef"]


def test_eos_1_every_end_token_ends_and_counts_and_only_the_primary_has_no_stop_reason(serve_script):
    for end, reason in ((EOS, None), (EOT, EOT)):
        with serve_script([65, end, 66]) as server:
            choice = only(server.chat())
            assert choice["message"]["content"] == "A"
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
            assert counts(server.chat()) == (CHAT_LEN, 2)  # the end token counts
            last = bodies(server.chat(stream=True))[-1]["choices"][0]
            assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", reason)
            choice = only(server.chat(stop_token_ids=[65]))
            assert (choice["message"]["content"], choice["stop_reason"]) == ("", 65)
            assert only(server.chat(skip_special_tokens=False))["message"]["content"] == "A"


def test_det_11_an_unfinished_character_is_dropped_streamed_and_whole(serve_script):
    with serve_script([104, 105, 240, 159, 153, 130]) as server:
        assert only(server.chat(max_tokens=4))["message"]["content"] == "hi"
        assert streamed(server.chat(max_tokens=4, stream=True)) == {0: ("hi", "length")}
        assert counts(server.chat(max_tokens=4)) == (CHAT_LEN, 4)


def test_tpl_1_a_chat_has_one_bos_a_text_the_tokenizers_and_ids_get_none(serve):
    tokenizer = byte_tokenizer(add_bos=True)
    with serve(ScriptModel([65, EOS], CHAT_LEN), tokenizer=tokenizer, num_blocks=200) as server:
        tokens = server.http.post("/tokenize", json={"messages": USER}).json()["tokens"]
        assert tokens == [BOS, *b"[user]\nHi", EOT, *b"[assistant]\n"]
        assert counts(server.chat()) == (CHAT_LEN, 2)
        assert counts(server.complete(max_tokens=1)) == (3, 1)
        assert counts(server.complete(prompt=[72, 105], max_tokens=1)) == (2, 1)
        assert server.http.post("/tokenize", json={"prompt": "Hi"}).json()["tokens"] == [BOS, 72, 105]
        without = server.http.post("/tokenize", json={"prompt": "Hi", "add_special_tokens": False}).json()
        assert without["tokens"] == [72, 105]


def test_api_10_an_empty_text_is_the_bos_where_there_is_one(serve):
    model = ScriptModel([65, EOS], 1)
    with serve(model, tokenizer=byte_tokenizer(add_bos=True), num_blocks=200) as server:
        for prompt in ("", [""]):
            assert counts(server.complete(prompt=prompt)) == (1, 2)
            assert texts(server.complete(prompt=prompt)) == ["A"]


def test_tpl_3_a_final_assistant_message_gets_a_new_turn_unless_it_is_to_be_continued(serve_script):
    messages = [*USER, {"role": "assistant", "content": "Yes"}]
    begin = [BOS, *b"[user]\nHi", EOT, *b"[assistant]\nYes"]
    with serve_script([65], max_model_len=200) as server:
        for given, end in (
            ({}, [EOT, *b"[assistant]\n"]),
            ({"continue_final_message": False}, [EOT, *b"[assistant]\n"]),
            ({"continue_final_message": True}, []),
            ({"continue_final_message": True, "add_generation_prompt": False}, []),
            ({"add_generation_prompt": False}, [EOT]),
        ):
            body = {"messages": messages} | given
            assert server.http.post("/tokenize", json=body).json()["tokens"] == begin + end
            assert counts(server.chat(max_tokens=1, **body)) == (len(begin + end), 1)


def test_tpl_6_text_parts_are_joined_by_a_newline_for_every_role(serve_script):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    with serve_script([65], max_model_len=200) as server:
        for role in ("system", "user", "assistant", "tool"):
            in_parts = [{"role": role, "content": parts}, *USER]
            as_text = [{"role": role, "content": "a\nb"}, *USER]
            tokens = [server.http.post("/tokenize", json={"messages": m}).json()["tokens"] for m in (in_parts, as_text)]
            assert tokens[0] == tokens[1] == [BOS, *f"[{role}]\na\nb".encode(), EOT, *tokens[0][-CHAT_LEN + 1 :]]
            assert counts(server.chat(messages=in_parts, max_tokens=1)) == (len(tokens[0]), 1)


def test_null_content_is_an_empty_turn_and_a_developer_is_the_system(serve_script):
    messages = [{"role": "developer", "content": "Be."}, {"role": "user", "content": None}]
    with serve_script([65]) as server:
        response = server.http.post("/tokenize", json={"messages": messages})
        assert response.json()["tokens"] == [BOS, *b"[system]\nBe.", EOT, *b"[user]\n", EOT, *b"[assistant]\n"]
        assert server.chat(messages=messages, max_tokens=1).status_code == 200


def test_api_7_n_choices_have_their_own_index_end_and_seed_and_the_prompt_counts_once(serve_script):
    with serve_script([65], prompt_len=2) as server:
        body = {"n": 3, "temperature": 2, "max_tokens": 12, "ignore_eos": True, "seed": 7}
        whole = server.complete(**body)
        assert counts(whole) == (2, 36)
        assert [choice["finish_reason"] for choice in whole.json()["choices"]] == ["length"] * 3
        assert len(set(texts(whole))) == 3
        assert streamed(server.complete(stream=True, **body)) == {i: (t, "length") for i, t in enumerate(texts(whole))}
        chats = [server.chat(**body) for _ in range(2)]
        contents = [[choice["message"]["content"] for choice in chat.json()["choices"]] for chat in chats]
        assert contents[0] == contents[1]
        assert len(set(contents[0])) == 3
        assert counts(chats[0]) == (CHAT_LEN, 36)
        expected = {index: (content, "length") for index, content in enumerate(contents[0])}
        assert streamed(server.chat(stream=True, **body)) == expected
        assert texts(server.complete(**body | {"seed": 8})) != texts(whole)
        # Without a seed each request has its own.
        assert texts(server.complete(**body | {"seed": None})) != texts(server.complete(**body | {"seed": None}))
        # Greedy choices are allowed, and the same.
        assert texts(server.complete(n=3, max_tokens=2)) == ["AA", "AA", "AA"]


def test_several_prompts_with_n_choices_are_numbered_prompt_by_prompt(serve_script):
    with serve_script([*b"ABCDE"], prompt_len=2) as server:
        for prompt in (["Hi", "Hi!", "Hi!!"], ["Hi", [72, 105, 33], "Hi!!"], [[72, 105], [72, 105, 33], [1, 2, 3, 4]]):
            body = {"prompt": prompt, "n": 2, "max_tokens": 2}
            whole = server.complete(**body)
            assert texts(whole) == ["AB", "AB", "BC", "BC", "CD", "CD"]
            assert counts(whole) == (9, 12)
            expected = {index: (text, "length") for index, text in enumerate(texts(whole))}
            assert streamed(server.complete(stream=True, **body)) == expected
        last = bodies(server.complete(stream=True, stream_options={"include_usage": True}, **body))[-1]
        assert last["choices"] == []
        assert token_counts(last["usage"]) == {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}


def test_echo_puts_the_prompt_before_every_choice_and_counts_nothing_more(serve_script):
    with serve_script([*b"ABC"], prompt_len=2) as server:
        for prompt, expected in (
            ("Hi", ["HiAB", "HiAB"]),
            ([72, 105], ["HiAB", "HiAB"]),
            (["é", [240, 159, 153, 130], [BOS, 72]], ["éAB", "éAB", "🙂CC", "🙂CC", "<bos>HAB", "<bos>HAB"]),
        ):
            body = {"prompt": prompt, "echo": True, "n": 2, "max_tokens": 2}
            whole = server.complete(**body)
            assert texts(whole) == expected
            assert streamed(server.complete(stream=True, **body)) == {i: (t, "length") for i, t in enumerate(expected)}
            assert counts(whole)[1] == 2 * len(expected)
        assert texts(server.complete(echo=False, max_tokens=1)) == ["A"]


def test_lgp_1_chat_logprobs_have_one_entry_for_every_token_streamed_and_whole(serve_script):
    with serve_script([65, 195, 169, EOS]) as server:
        best, second = (pytest.approx(value - NORM, abs=1e-4) for value in (10, 5))
        plain = [
            {"token": token, "logprob": best, "bytes": raw, "top_logprobs": []}
            for token, raw in (("A", [65]), ("\ufffd", [195]), ("\ufffd", [169]), ("<eos>", [*b"<eos>"]))
        ]
        runner_up = {"token": "x", "logprob": second, "bytes": [120]}
        top = [
            entry | {"top_logprobs": [{name: entry[name] for name in ("token", "logprob", "bytes")}, runner_up]}
            for entry in plain
        ]
        for given, expected in (({}, plain), ({"top_logprobs": 0}, plain), ({"top_logprobs": 2}, top)):
            assert only(server.chat(logprobs=True, **given))["logprobs"] == {"content": expected}
            parts = [c["choices"][0]["logprobs"] for c in bodies(server.chat(logprobs=True, stream=True, **given))]
            assert [entry for part in parts if part for entry in part["content"]] == expected
        assert only(server.chat(logprobs=False))["logprobs"] is None


def test_lgp_4_the_sampled_token_is_reported_beside_the_likeliest_whatever_the_temperature(serve_script):
    with serve_script([65], prompt_len=2) as server:
        best, other = (pytest.approx(value - NORM, abs=1e-4) for value in (10, 0))
        for temperature in (0, 0.5, 2):
            body = {"max_tokens": 2, "temperature": temperature, "logit_bias": {"90": 100}}
            for stream in (False, True):
                response = server.complete(logprobs=1, stream=stream, **body)
                parts = [c["choices"][0]["logprobs"] for c in (bodies(response) if stream else [response.json()])]
                joined = {name: [x for part in parts if part for x in part[name]] for name in parts[0]}
                assert joined == {
                    "tokens": ["Z", "Z"],
                    "text_offset": [0, 1],
                    "token_logprobs": [other, other],
                    "top_logprobs": [{"A": best, "Z": other}] * 2,
                }
            alone = only(server.complete(logprobs=0, **body))["logprobs"]
            assert (alone["token_logprobs"], alone["top_logprobs"]) == ([other] * 2, [{"Z": other}] * 2)
            [entry, _] = only(server.chat(logprobs=True, top_logprobs=1, **body))["logprobs"]["content"]
            assert (entry["token"], entry["logprob"]) == ("Z", other)
            assert entry["top_logprobs"] == [{"token": "A", "logprob": best, "bytes": [65]}]


def test_lgp_2_what_json_cannot_say_is_minus_9999(serve):
    def read(text):
        def no_number(constant):
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(text, parse_constant=no_number)["choices"][0]["logprobs"]

    impossible = Shaped([65, EOS], 2, lambda logits: logits.masked_fill(logits == 0, -torch.inf))
    nan = Shaped([65, EOS], 2, lambda logits: torch.full_like(logits, torch.nan))
    for model, expected in ((impossible, [-0.0067153, -5.0067153, -9999, -9999, -9999]), (nan, [-9999] * 5)):
        with serve(model, num_blocks=200) as server:
            for stream in (False, True):
                response = server.complete(max_tokens=1, logprobs=5, stream=stream)
                logprobs = read(events(response)[0] if stream else response.text)
                assert logprobs["token_logprobs"] == pytest.approx(expected[:1], abs=1e-5)
                # The keys are texts, and all bytes that are no character share one.
                values = {round(value, 2) for value in logprobs["top_logprobs"][0].values()}
                assert values == {round(value, 2) for value in expected}
            [entry] = read(server.chat(max_tokens=1, logprobs=True, top_logprobs=5).text)["content"]
            assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(expected, abs=1e-5)


def test_api_4_null_is_the_same_as_leaving_a_field_out(serve, milestone):
    protocol, fields = (
        importlib.import_module(f"{milestone.__name__}.server.{name}") for name in ("protocol", "fields")
    )
    certain = Shaped([*b"ABC", EOS], 2, lambda logits: logits * 100)  # so that the default temperature is greedy, too
    with serve(certain, num_blocks=200) as server:
        for path, body, kind in (
            ("/v1/completions", {"prompt": "Hi"}, protocol.CompletionRequest),
            ("/v1/chat/completions", {"messages": USER, "max_completion_tokens": 7}, protocol.ChatCompletionRequest),
        ):
            plain = server.http.post(path, json=body)
            nulls = dict.fromkeys([*kind.model_fields, *fields.KNOWN]) | body
            if "prompt" in body:
                nulls["max_tokens"] = 16  # where null has a meaning of its own
            answer = server.http.post(path, json=nulls)
            assert only(answer) == only(plain)
            assert counts(answer) == counts(plain)
            assert answer.json()["model"] == "tiny"


def test_api_4_unknown_fields_are_ignored_with_one_line_in_the_log(serve_script, caplog):
    caplog.set_level(logging.INFO)
    ignored = {"user": "u", "store": True, "metadata": {"a": "b"}, "two\nlines": 1, "nothing": None}
    with serve_script([*b"ABC", EOS], prompt_len=2) as server:
        assert texts(server.complete(frequency_penalty=0, **ignored)) == ["ABC"]
        assert server.chat(max_tokens=1, **ignored).status_code == 200
        assert server.http.post("/tokenize", json={"prompt": "Hi"} | ignored).json()["tokens"] == [72, 105]
        lines = [r.getMessage() for r in caplog.records if r.name.endswith(".protocol")]
        assert lines == [r"ignored fields: user, store, metadata, two\nlines (unknown)"] * 3


def test_tokenize_and_detokenize_are_each_others_inverse(serve):
    with serve(ScriptModel([65], 2), tokenizer=spm_tokenizer(), num_blocks=200, max_model_len=99) as server:
        ids = spm_ids("▁Hello", "▁world", 0xC3, 0xA9)
        answer = server.http.post("/tokenize", json={"prompt": "Hello worldé", "return_token_strs": True}).json()
        strings = ["▁Hello", "▁world", "<0xC3>", "<0xA9>"]
        assert answer == {"count": 4, "max_model_len": 99, "tokens": ids, "token_strs": strings}
        assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello worldé"}
        assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    with serve(ScriptModel([65], 2), num_blocks=200) as server:
        chat = server.http.post("/tokenize", json={"messages": USER, "model": "tiny"}).json()
        assert (chat["count"], chat["token_strs"]) == (CHAT_LEN, None)
        text = server.http.post("/detokenize", json={"tokens": chat["tokens"], "model": None}).json()["prompt"]
        assert text == "<bos>[user]\nHi<eot>[assistant]\n"
        assert server.http.post("/tokenize", json={"prompt": text}).json()["tokens"] == chat["tokens"]
        assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_blk_4_two_requests_with_one_client_chosen_id_at_once_are_answered_apart(serve, caplog):
    caplog.set_level(logging.INFO)
    model = Stepped([*b"ABC", EOS], 2)
    request = {"method": "POST", "url": "/v1/completions", "headers": {"X-Request-Id": "mine"}}
    asked = [{"prompt": prompt, "stream": True, "temperature": 0} for prompt in ("Hi", "Hi!")]
    with serve(model, num_blocks=200) as server:
        with (
            server.http.stream(**request, json=asked[0]) as first,
            server.http.stream(**request, json=asked[1]) as second,
        ):
            model.steps.release(1000)  # both have been taken by now
            for response in (first, second):
                response.read()
                assert response.headers["X-Request-Id"] == "mine"
        assert [streamed(first), streamed(second)] == [{0: ("ABC", "stop")}, {0: ("BC", "stop")}]
        ids = [{chunk["id"] for chunk in bodies(response)} for response in (first, second)]
        assert [len(id_) for id_ in ids] == [1, 1]
        assert ids[0] != ids[1]
        lines = post_lines(caplog, 2)
        assert all(" request_id=mine " in line for line in lines)
        # Without one, the server makes one.
        assert len({server.http.get("/health").headers["X-Request-Id"] for _ in range(2)}) == 2


def test_what_chat_template_kwargs_say_reaches_the_template_and_nothing_else_does(serve):
    template = (
        "{{ bos_token }}{% if think is defined and think %}<think>{% endif %}"
        "{{ messages[0]['content'] }}{{ name | default('nobody') }}{% if add_generation_prompt %}:{% endif %}"
    )
    tokenizer = byte_tokenizer(chat_template=template)
    with serve(ScriptModel([65, EOS], 9), tokenizer=tokenizer, num_blocks=50) as server:
        for kwargs, rendered in (
            (None, "Hinobody:"),
            ({}, "Hinobody:"),
            ({"think": True}, "<think>Hinobody:"),
            ({"think": False, "name": "é"}, "Hié:"),
            ({"name": ["a", {"b": 1}], "unread": {"x": None}}, "Hi['a', {'b': 1}]:"),
        ):
            body = {"messages": USER, "chat_template_kwargs": kwargs}
            assert server.http.post("/tokenize", json=body).json()["tokens"] == [BOS, *rendered.encode()]
            assert counts(server.chat(max_tokens=1, **body))[0] == 1 + len(rendered.encode())


def test_the_list_of_models_has_its_address_with_a_slash_too(serve_script):
    with serve_script([65], server={"served_model_name": ["org/model"]}) as server:
        listed = server.http.get("/v1/models")
        assert server.http.get("/v1/models/").json() == listed.json()
        assert server.http.get("/v1/models/org/model").json() == listed.json()["data"][0]
        assert server.http.get("/v1/models/%0A").status_code == 404  # Starlette's patterns end before a line end, too


def test_unt_22_what_an_assistant_has_refused_with_is_its_turns_text(serve_script):
    refusal = {"type": "refusal", "refusal": "No."}
    turns = [
        {"content": [refusal]},
        {"content": None, "refusal": "No."},
        {"content": "", "refusal": "No."},
        {"refusal": "No."},
        {"content": "No.", "refusal": None},
        {"content": [{"type": "output_text", "text": "No."}]},
    ]
    with serve_script([65], max_model_len=200) as server:
        tokens = [
            server.http.post("/tokenize", json={"messages": [*USER, {"role": "assistant"} | turn, *USER]}).json()[
                "tokens"
            ]
            for turn in turns
        ]
        assert (
            tokens
            == [[BOS, *b"[user]\nHi", EOT, *b"[assistant]\nNo.", EOT, *b"[user]\nHi", EOT, *b"[assistant]\n"]] * 6
        )
        messages = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "Well."}, refusal]}, *USER]
        assert counts(server.chat(messages=messages, max_tokens=1))[0] == len(tokens[0]) + len("Well.\n")
        messages[1]["content"] = [{"type": "refusal", "text": "No."}]
        assert "messages[1].content[0].refusal must be a string" in server.chat(messages=messages).text
