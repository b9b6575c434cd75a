"""Clients that people have: OpenAI's own library, sync and async, and two that are built upon it."""

import asyncio
import threading

import openai
import pytest
import torch

from common.sampling_params import SamplingParams
from tests.kit.models import ScriptModel
from tests.kit.server import USER, wait_until
from tests.kit.tokenizers import byte_tokenizer

PROMPT = "Hi"
PROMPT_IDS = [72, 105]
CHAT_IDS = byte_tokenizer().chat_token_ids(USER)
NUM = 12  # tokens of an answer
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": NUM, "extra_body": {"ignore_eos": True}}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server(serve, tiny):
    with serve(tiny.folder, num_blocks=200) as server:
        yield server


@pytest.fixture
def client(server):
    with connect(server) as client:
        yield client


@pytest.fixture
def text(load, tiny):
    """The text that an answer must have: the offline engine's, whose tokens are transformers'."""

    def build(prompt_ids):
        params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True)
        [choice] = load(tiny).generate([prompt_ids], params, use_tqdm=False)[0].outputs
        assert choice.token_ids == tiny.tokens(prompt_ids, NUM)
        return choice.text

    return build


def connect(server, **options):
    return openai.OpenAI(**{"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0} | options)


def logprobs_of(tiny, prompt_ids):
    """Of transformers' greedy answer: the log-probabilities of the whole vocabulary, a row for each token."""
    token_ids = tiny.tokens(prompt_ids, NUM)
    with torch.inference_mode():
        logits = tiny.hf(torch.tensor([prompt_ids + token_ids])).logits[0]
    return token_ids, logits.log_softmax(-1)[len(prompt_ids) - 1 : -1]


def test_a_chat_is_transformers_answer(client, text):
    answer = client.chat.completions.create(messages=USER, **GREEDY)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text(CHAT_IDS))
    assert choice.finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(CHAT_IDS), NUM)
    assert usage.total_tokens == len(CHAT_IDS) + NUM


def test_a_streamed_chat_is_the_same_text_in_pieces_and_its_usage_comes_last(client, text):
    stream = client.chat.completions.create(
        messages=USER, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text(CHAT_IDS)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 4
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(CHAT_IDS), NUM)


def test_the_librarys_own_stream_helper_puts_the_pieces_together(serve_script):
    with (
        serve_script([*"zwölf €".encode(), 257]) as server,
        connect(server) as client,
        client.chat.completions.stream(model="tiny", messages=USER, temperature=0) as stream,
    ):
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert [delta for delta in deltas if delta] == list("zwölf €")
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("zwölf €", "stop")


def test_a_stream_that_is_left_early_ends_its_request(serve):
    script = ScriptModel(list(b"ab") * 10_000, len(CHAT_IDS), max_position_embeddings=50_000)
    with serve(script, num_blocks=6000) as server, connect(server) as client:
        with client.chat.completions.create(model="tiny", messages=USER, max_tokens=20_000, stream=True) as stream:
            pieces = [next(iter(stream)).choices[0].delta.content for _ in range(3)]
        assert pieces == ["", "a", "b"]
        server.assert_idle()
        assert script.num_forwards < 19_000


def test_async_chats_at_once_get_an_answer_each(server, text):
    prompts = [f"Number {number}" for number in range(8)]

    async def ask(client, prompt):
        answer = await client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **GREEDY)
        return answer.choices[0].message.content

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    ids = [byte_tokenizer().chat_token_ids([{"role": "user", "content": prompt}]) for prompt in prompts]
    assert asyncio.run(ask_all()) == [text(prompt_ids) for prompt_ids in ids]


def test_async_streams_at_once_get_an_answer_each(server, text):
    prompts = [f"Number {number}" for number in range(8)]

    async def ask(client, prompt):
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    texts = [text(list(prompt.encode())) for prompt in prompts]
    assert asyncio.run(ask_all()) == texts


def test_a_completion_is_transformers_continuation_of_text_and_of_token_ids(client, text):
    for prompt in (PROMPT, PROMPT_IDS):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        [choice] = answer.choices
        assert (answer.object, choice.text, choice.finish_reason) == ("text_completion", text(PROMPT_IDS), "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, NUM)


def test_completions_of_several_prompts_are_in_the_order_of_the_prompts(client, text):
    answer = client.completions.create(prompt=["Hi", "Ho"], n=2, **GREEDY)
    texts = [text([72, 105])] * 2 + [text([72, 111])] * 2
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 4 * NUM)


def test_a_streamed_completion_is_the_same_text_and_its_usage_comes_last(client, text):
    stream = client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text(PROMPT_IDS)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.total_tokens) == ([], 2 + NUM)


def test_logprobs_of_a_chat_are_transformers(client, tiny):
    answer = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=3, **GREEDY)
    token_ids, expected = logprobs_of(tiny, CHAT_IDS)
    content = answer.choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in content] == [byte_tokenizer().token_bytes(id_) for id_ in token_ids]
    for entry, row, token_id in zip(content, expected, token_ids, strict=True):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        best = row.topk(3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert [bytes(top.bytes) for top in entry.top_logprobs] == [
            byte_tokenizer().token_bytes(id_) for id_ in best.indices.tolist()
        ]


def test_logprobs_of_a_completion_are_transformers(client, tiny):
    answer = client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY)
    token_ids, expected = logprobs_of(tiny, PROMPT_IDS)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == [byte_tokenizer().token_text(id_) for id_ in token_ids]
    rows = list(zip(expected, token_ids, strict=True))
    assert logprobs.token_logprobs == pytest.approx([float(row[id_]) for row, id_ in rows], abs=1e-3)
    for top, row in zip(logprobs.top_logprobs, expected, strict=True):
        best = row.topk(2)
        texts = [byte_tokenizer().token_text(id_) for id_ in best.indices.tolist()]
        # Tokens with the same text (halves of characters) share an entry: the likelier one's.
        wanted = dict(zip(reversed(texts), reversed(best.values.tolist()), strict=True))
        assert top == pytest.approx(wanted, abs=1e-3)


def test_streamed_logprobs_of_a_chat_are_those_of_the_whole_one(client):
    options = {"messages": USER, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = []
    for chunk in client.chat.completions.create(stream=True, **options):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.model_dump(exclude={"logprob", "top_logprobs"}) for entry in streamed] == [
        entry.model_dump(exclude={"logprob", "top_logprobs"}) for entry in whole
    ]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


def test_sampled_choices_are_those_of_the_offline_engine(client, load, tiny):
    params = SamplingParams(n=3, seed=7, temperature=0.9, top_p=0.95, max_tokens=NUM)
    expected = [choice.text for choice in load(tiny).generate([PROMPT], params, use_tqdm=False)[0].outputs]
    options = {"model": "tiny", "n": 3, "seed": 7, "temperature": 0.9, "top_p": 0.95, "max_tokens": NUM}
    answer = client.completions.create(prompt=PROMPT, **options)
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 3
    texts = ["", "", ""]
    for chunk in client.completions.create(prompt=PROMPT, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_a_stop_string_ends_the_answer_before_it(serve_script):
    with serve_script(list(b"one two three")) as server, connect(server) as client:
        answer = client.chat.completions.create(model="tiny", messages=USER, stop=[" three", "zzz"], max_tokens=30)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two", "stop")


def test_models_are_listed_and_retrieved_by_name(serve, tiny):
    names = ["tiny", "org/tiny-2"]
    with serve(tiny.folder, server={"served_model_name": names}) as server, connect(server) as client:
        assert [model.id for model in client.models.list()] == names
        assert [client.models.retrieve(name).id for name in names] == names
        assert client.models.retrieve("tiny").owned_by == "mini-vllm"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_a_wrong_value_is_a_bad_request_error_that_names_it(client):
    with pytest.raises(openai.BadRequestError, match="temperature must be at least 0") as caught:
        client.chat.completions.create(model="tiny", messages=USER, temperature=3)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as caught:
        client.chat.completions.create(
            model="tiny", messages=USER, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]
        )
    assert caught.value.param == "tools"


def test_a_prompt_that_is_too_long_is_a_bad_request_error_with_openais_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_a_not_found_error_with_openais_code(client):
    with pytest.raises(openai.NotFoundError, match="'other' does not exist") as caught:
        client.chat.completions.create(model="other", messages=USER)
    assert caught.value.code == "model_not_found"


def test_a_wrong_key_is_an_authentication_error_and_each_right_one_lets_in(serve, tiny, text):
    with serve(tiny.folder, server={"api_key": ["first", "second"]}) as server:
        for key in ("wrong", "firs", "first second"):
            with connect(server, api_key=key) as client, pytest.raises(openai.AuthenticationError) as caught:
                client.chat.completions.create(messages=USER, **GREEDY)
            assert caught.value.code == "invalid_api_key"
        for key in ("first", "second"):
            with connect(server, api_key=key) as client:
                answer = client.chat.completions.create(messages=USER, **GREEDY)
            assert answer.choices[0].message.content == text(CHAT_IDS)


class FailsLater(ScriptModel):
    """Fails at its fifth token, and whenever that is computed again."""

    def forward(self, token_ids, positions, *args, **options):
        if int(positions.max()) >= self.prompt_len + 3:
            raise RuntimeError("a made-up fault")
        return super().forward(token_ids, positions, *args, **options)


def test_a_fault_is_an_api_error_after_the_text_before_it_in_a_stream_and_the_next_request_is_served(serve):
    model = FailsLater(list(b"abcdefgh"), len(CHAT_IDS))
    with serve(model, num_blocks=200) as server, connect(server) as client:
        stream = client.chat.completions.create(model="tiny", messages=USER, stream=True)
        pieces = (chunk.choices[0].delta.content for chunk in stream)
        assert [next(pieces) for _ in range(5)] == ["", *"abcd"]
        with pytest.raises(openai.APIError, match="The model failed on this request") as caught:
            next(pieces)
        assert caught.value.type == "server_error"
        assert "made-up" not in str(caught.value)
        with pytest.raises(openai.InternalServerError, match="The model failed on this request") as caught:
            client.chat.completions.create(model="tiny", messages=USER)
        assert caught.value.request_id  # by which it is found in the log
        answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=4)  # on the same connection
        assert answer.choices[0].message.content == "abcd"


class Gated(ScriptModel):
    """Computes nothing before `gate` is set; `entered` says that somebody waits for it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gate, self.entered = threading.Event(), threading.Event()

    def forward(self, *args, **options):
        self.entered.set()
        assert self.gate.wait(60)
        return super().forward(*args, **options)


def test_a_full_queue_is_a_503_that_the_client_tries_again_until_there_is_room(serve):
    model = Gated([*b"abc", 257], len(CHAT_IDS))
    answers = []
    statuses = []

    def ask(client):
        answers.append(client.chat.completions.create(model="tiny", messages=USER, temperature=0))

    def on_response(response):
        statuses.append((response.status_code, response.headers.get("retry-after")))
        model.gate.set()  # from now on there is room, for whoever comes again

    limits = {"num_blocks": 200, "max_num_seqs": 1, "server": {"max_queued_requests": 1}}
    with serve(model, **limits) as server, connect(server) as impatient, connect(server, max_retries=2) as patient:
        try:
            runs = threading.Thread(target=ask, args=(impatient,))
            runs.start()
            wait_until(model.entered.is_set, "the first one runs")
            waits = threading.Thread(target=ask, args=(impatient,))
            waits.start()
            wait_until(lambda: server.app.state.engine.num_waiting == 1, "the second one waits")
            with pytest.raises(openai.InternalServerError, match="The queue is full") as caught:
                ask(impatient)
            assert caught.value.status_code == 503
            patient._client.event_hooks["response"].append(on_response)
            ask(patient)
        finally:
            model.gate.set()
            runs.join(60)
            waits.join(60)
    assert statuses == [(503, "1"), (200, None)]
    assert [answer.choices[0].message.content for answer in answers] == ["abc"] * 3


def test_langchain_invokes_and_streams(server, text):
    chat_models = pytest.importorskip("langchain_openai")
    llm = chat_models.ChatOpenAI(
        model="tiny",
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=NUM,
        max_retries=0,
        extra_body={"ignore_eos": True},
    )
    answer = llm.invoke(USER[0]["content"])
    assert answer.content == text(CHAT_IDS)
    assert answer.usage_metadata["output_tokens"] == NUM
    assert answer.response_metadata["finish_reason"] == "length"
    assert "".join(chunk.content for chunk in llm.stream(USER[0]["content"])) == text(CHAT_IDS)


def test_litellm_completes(server, text, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet as it is imported
    litellm = pytest.importorskip("litellm")
    answer = litellm.completion(
        model="openai/tiny",
        api_base=f"{server.url}/v1",
        api_key="none",
        messages=USER,
        temperature=0,
        max_tokens=NUM,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content == text(CHAT_IDS)
    assert answer.usage.completion_tokens == NUM
