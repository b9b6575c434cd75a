"""Prompts that are scored over HTTP: `echo` with `logprobs`, and `prompt_logprobs`, as vLLM answers them."""

import pytest
import torch

from tests.kit.server import USER, bodies, counts, metrics, only, post_lines, texts
from tests.kit.tokenizers import BOS, EOT, byte_tokenizer, spm_ids, spm_tokenizer

SINCE = "v0_4"


def expected_scores(hf, prompt):
    """Log-softmax at each place of a prompt but the last, `[len(prompt) - 1, vocab_size]`."""
    with torch.inference_mode():
        return hf(torch.tensor([prompt])).logits[0, :-1, : byte_tokenizer().vocab_size].log_softmax(dim=-1)


def own(hf, prompt):
    rows = expected_scores(hf, prompt)
    return [None, *(pytest.approx(float(row[token]), abs=1e-4) for row, token in zip(rows, prompt[1:], strict=True))]


def joined(chunks, index):
    """What all chunks say of one choice: its text, and its log-probabilities as one object."""
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    return (
        "".join(part["text"] for part in parts),
        {name: [x for entry in logprobs for x in entry[name]] for name in logprobs[0]},
    )


def test_echo_with_logprobs_scores_the_prompt_as_transformers_streamed_and_whole(serve, tiny):
    text = "The sky is blue"
    ids = [*text.encode()]
    with serve(tiny.folder, num_blocks=200, max_num_batched_tokens=8) as server:
        for prompt in (text, [text, "Hi"], ids, [ids, [72, 105]]):
            body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1, "n": 2, "ignore_eos": True}
            whole = server.complete(**body)
            assert counts(whole)[1] == len(whole.json()["choices"])
            chunks = bodies(server.complete(stream=True, **body))
            for choice in whole.json()["choices"]:
                sent = ids if choice["index"] < 2 else [72, 105]
                logprobs = choice["logprobs"]
                assert (choice["text"], logprobs) == joined(chunks, choice["index"])
                assert choice["text"].startswith(bytes(sent).decode())
                assert logprobs["tokens"][: len(sent)] == [chr(token) for token in sent]
                assert logprobs["text_offset"] == list(range(len(sent) + 1))
                assert logprobs["token_logprobs"][: len(sent)] == own(tiny.hf, sent)
                assert logprobs["top_logprobs"][0] is None
                for row, top in zip(expected_scores(tiny.hf, sent), logprobs["top_logprobs"][1:-1], strict=True):
                    assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
                assert {len(entries) for entries in logprobs.values()} == {len(sent) + 1}
                assert "prompt_logprobs" not in choice


def test_max_tokens_0_with_echo_generates_nothing_and_counts_nothing(serve, tiny, caplog):
    caplog.set_level("INFO")
    with serve(tiny.folder, num_blocks=200) as server:
        for given, has in (({}, False), ({"logprobs": 0}, True), ({"logprobs": 1, "n": 2}, True)):
            body = {"prompt": "blue", "echo": True, "max_tokens": 0, "stop": "b"} | given
            whole = server.complete(**body)
            assert counts(whole) == (4, 0)
            assert texts(whole) == ["blue"] * given.get("n", 1)
            for choice in whole.json()["choices"]:
                assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
                if has:
                    assert choice["logprobs"]["token_logprobs"] == own(tiny.hf, [*b"blue"])
                    assert joined(bodies(server.complete(stream=True, **body)), choice["index"]) == (
                        "blue",
                        choice["logprobs"],
                    )
                else:
                    assert choice["logprobs"] is None
        values = metrics(server)
        assert (values["generation_tokens_total"], values["time_to_first_token_seconds_count"]) == (0, 0)
        assert (values["prompt_tokens_total"], values["request_success_total/length"]) == (6 * 4, 9)
        assert all(" output_tokens=0 " in line for line in post_lines(caplog, 6))
        # Nothing at all to do is a mistake.
        for given in ({}, {"prompt_logprobs": 1}):  # vLLM takes neither: there is nothing to answer with
            assert server.complete(max_tokens=0, **given).status_code == 400
            assert server.chat(max_tokens=0, **given).status_code == 400


def test_prompt_logprobs_stand_where_vllm_puts_them(serve, tiny):
    with serve(tiny.folder, num_blocks=200) as server:
        prompts = ["blue", [72, 105, 33]]
        answer = server.complete(prompt="blue", prompt_logprobs=2, max_tokens=1)
        assert "prompt_logprobs" not in answer.json()
        for choice in [
            *answer.json()["choices"],
            *server.complete(prompt=["blue"] * 2, prompt_logprobs=2, n=2, max_tokens=1).json()["choices"],
        ]:
            assert choice["logprobs"] is None
            [first, *scores] = choice["prompt_logprobs"]
            assert first is None
            for row, token, entry in zip(expected_scores(tiny.hf, [*b"blue"]), b"lue", scores, strict=True):
                assert next(iter(entry)) == str(token)
                assert set(entry) == {str(token), *map(str, row.topk(2).indices.tolist())}
                for id_, candidate in entry.items():
                    assert candidate == {
                        "logprob": pytest.approx(float(row[int(id_)]), abs=1e-4),
                        "rank": int((row > row[int(id_)]).sum()) + 1,
                        "decoded_token": byte_tokenizer().token_text(int(id_)),
                    }
        several = server.complete(prompt=[[*b"blue"], prompts[1]], prompt_logprobs=0, max_tokens=1).json()["choices"]
        assert [len(choice["prompt_logprobs"]) for choice in several] == [4, 3]
        chat = server.chat(prompt_logprobs=1, max_tokens=1, n=2).json()
        assert all("prompt_logprobs" not in choice for choice in chat["choices"])
        ids = byte_tokenizer().chat_token_ids(USER)
        scores = [
            entry and entry[str(token)]["logprob"] for token, entry in zip(ids, chat["prompt_logprobs"], strict=True)
        ]
        assert scores == own(tiny.hf, ids)


def test_each_field_gets_as_many_likely_tokens_as_it_asked_for(serve, tiny):
    with serve(tiny.folder, num_blocks=200) as server:
        for num_top, num_scores in ((1, 4), (4, 1), (0, 3), (3, 0)):
            body = {"prompt": "blue", "echo": True, "logprobs": num_top, "prompt_logprobs": num_scores, "max_tokens": 0}
            choice = only(server.complete(**body))
            rows = expected_scores(tiny.hf, [*b"blue"])
            for row, token, entry in zip(rows, b"lue", choice["prompt_logprobs"][1:], strict=True):
                assert set(map(int, entry)) == {token, *row.topk(num_scores).indices.tolist()}
            for row, token, top in zip(rows, b"lue", choice["logprobs"]["top_logprobs"][1:], strict=True):
                assert len(top) <= len({token, *row.topk(num_top).indices.tolist()})
                assert chr(token) in top


def test_prompt_logprobs_that_cannot_be_are_refused_before_anything_runs(serve, tiny):
    with serve(tiny.folder, num_blocks=200) as server:
        for call in (server.complete, server.chat):
            for given, says in (
                ({"prompt_logprobs": 0, "stream": True}, "not available with stream: true"),
                ({"prompt_logprobs": 21}, "at least 0 and at most 20, got 21"),
                ({"prompt_logprobs": -1}, "at least 0 and at most 20, got -1"),
                ({"prompt_logprobs": True}, "got True"),
                ({"prompt_logprobs": "1"}, "got '1'"),
            ):
                error = call(**given)
                assert error.status_code == 400, error.text
                assert error.json()["error"]["param"] == "prompt_logprobs"
                assert says in error.json()["error"]["message"]
        for given, param in (
            ({"logprobs": 21}, "logprobs"),
            ({"prompt_logprobs": -1, "logprobs": 2}, "prompt_logprobs"),
        ):
            error = server.complete(echo=True, **given)
            assert (error.status_code, error.json()["error"]["param"]) == (400, param)
        assert not metrics(server)["prompt_tokens_total"]
        assert server.complete(prompt_logprobs=None, stream=True, max_tokens=1).status_code == 200


def test_an_answer_that_would_be_too_long_is_refused_with_the_number(serve, tiny):
    with serve(tiny.folder, num_blocks=200) as server:
        long = {"prompt": [1] * 100, "n": 128, "max_tokens": 1}
        for given, param, number in (
            ({"prompt_logprobs": 20}, "prompt_logprobs", 128 * 100 * 21),
            ({"logprobs": 20, "echo": True}, "logprobs", 128 * 100 * 21),
            ({"logprobs": 9, "prompt_logprobs": 9, "echo": True}, "prompt_logprobs", 128 * 100 * 20),
        ):
            error = server.complete(**long | given)
            assert (error.status_code, error.json()["error"]["param"]) == (400, param)
            assert f"would hold {number} log-probabilities" in error.json()["error"]["message"]
        assert not metrics(server)["prompt_tokens_total"]
        assert server.complete(**long, logprobs=20).status_code == 200  # of the answers alone
        assert server.complete(**long | {"n": 2}, prompt_logprobs=20).status_code == 200


def test_unt_9_echo_of_ids_is_what_detokenize_gives_or_as_skip_special_tokens_says(serve_script):
    with serve_script([65], prompt_len=3) as server:
        ids = [BOS, 72, EOT]
        shown = server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert shown == "<bos>H<eot>"
        for given, text, offsets in (
            ({}, shown, [0, 5, 6, 11]),
            ({"skip_special_tokens": False}, shown, [0, 5, 6, 11]),
            ({"skip_special_tokens": True}, "H", [0, 0, 1, 1]),
        ):
            body = {"prompt": ids, "echo": True, "max_tokens": 1} | given
            assert texts(server.complete(**body)) == [text + "A"]
            logprobs = only(server.complete(logprobs=0, **body))["logprobs"]
            assert (logprobs["tokens"], logprobs["text_offset"]) == (["<bos>", "H", "<eot>", "A"], offsets)
        # A text is given back as it came.
        assert texts(server.complete(prompt="<bos>H<eot>", echo=True, max_tokens=1)) == ["<bos>H<eot>A"]


def test_offsets_of_an_echoed_prompt_are_places_in_its_text(serve, tiny):
    from tests.kit.models import ScriptModel

    with serve(ScriptModel([65], 2), tokenizer=byte_tokenizer(add_bos=True), num_blocks=200) as server:
        logprobs = only(server.complete(prompt="é<eot>🙂x", echo=True, logprobs=0, max_tokens=1))["logprobs"]
        assert logprobs["tokens"] == ["<bos>", "\ufffd", "\ufffd", "<eot>", *["\ufffd"] * 4, "x", "A"]
        assert logprobs["text_offset"] == [0, 0, 0, 1, 6, 6, 6, 6, 7, 8]
    with serve(ScriptModel([65], 2), tokenizer=spm_tokenizer(), num_blocks=200) as server:
        for prompt in ("Hello world", spm_ids("▁Hello", "▁world")):
            choice = only(server.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0))
            assert choice["text"] == "Hello world"
            assert choice["logprobs"]["tokens"] == [" Hello", " world"]
            assert choice["logprobs"]["text_offset"] == [0, 5]


def test_a_client_that_leaves_while_its_prompt_is_scored_leaves_nothing_behind(serve, tiny):
    from tests.kit.server import connect, held, wait_for_aborts

    with serve(tiny.folder, num_blocks=200, max_num_batched_tokens=8) as server, held(server, 2) as (gate, _):
        connection = connect(server, "/v1/completions", prompt=[1] * 40, prompt_logprobs=3, max_tokens=1)
        gate.reached(2)
        connection.close()
        wait_for_aborts(server, 1)
        gate.go(2)
        server.assert_idle()


@pytest.mark.real_model
def test_echoed_logprobs_of_the_real_model_equal_transformers(serve, real):
    with serve(real.ready["model"], tokenizer=real.ready["tokenizer"]) as server:
        text = "The capital of France is Paris. 中文 🙂."
        choice = only(server.complete(prompt=text, echo=True, logprobs=1, max_tokens=1))
        ids = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        with torch.inference_mode():
            rows = real.hf(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
        expected = [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]
        assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-3)
