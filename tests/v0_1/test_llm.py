"""The engine of v0.1 piece by piece: one step, the loop around it, and what becomes of prompts before it begins."""

import pytest

from common.attention import sdpa
from common.errors import RequestError
from common.outputs import RequestMetrics
from common.sampling_params import SamplingParams, SamplingState
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import EOS, byte_tokenizer
from v0_1_single_request.llm import LLM, Request


class OneStepCache:
    """Attends to what it is given, and keeps no keys and values: enough for a prompt that is computed at once."""

    def __init__(self):
        self.context_len = 0

    def begin_step(self, query_len):
        self.context_len += query_len

    def attend(self, layer, q, k, v):
        return sdpa(q, k, v, [len(q)], [len(q)])


class Watched(ScriptModel):
    """SCRIPT that notes of each forward its tokens, their positions and the rows that are wanted."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = []

    def forward(self, token_ids, positions, kv_cache, *, rows=None):
        self.seen.append((token_ids.tolist(), positions.tolist(), None if rows is None else rows.tolist()))
        return super().forward(token_ids, positions, kv_cache, rows=rows)


def greedy(**params):
    return SamplingParams(temperature=0.0, **params)


def state_of(llm, prompt):
    return SamplingState.create(greedy(), prompt, llm.eos_token_ids, seed=0)


def complete(llm, prompt, **params):
    """What the loop yields for a prompt."""
    request = Request("0", None, prompt, greedy(**params), 0, 0.0)
    return list(llm._complete(request, 0, RequestMetrics(0.0)))


def test_a_step_over_a_prompt_gives_the_token_that_transformers_gives(tiny):
    llm = LLM(**tiny.ready)
    for prompt in ([1, 2, 3], [(7 * i + i * i) % 256 for i in range(33)]):
        sampled = llm._step(OneStepCache(), prompt, state_of(llm, prompt))
        assert sampled.token_ids == tiny.tokens(prompt, 1)


def test_a_step_begins_where_the_cache_ends_and_wants_the_last_row_only():
    model = Watched([65, 66], prompt_len=3)
    llm, cache = LLM(model, tokenizer=byte_tokenizer()), OneStepCache()
    state = state_of(llm, [1, 2, 3])
    assert [llm._step(cache, token_ids, state).token_ids for token_ids in ([1, 2, 3], [65])] == [[65], [66]]
    assert model.seen == [([1, 2, 3], [0, 1, 2], [2]), ([65], [3], [0])]


def test_a_step_never_samples_a_row_without_a_token():
    llm = LLM(ScriptModel([270], prompt_len=1, runner_up=120), tokenizer=byte_tokenizer())
    assert llm._step(OneStepCache(), [1], state_of(llm, [1])).token_ids == [120]


def test_the_loop_yields_a_delta_for_each_token_and_ends_with_the_one_that_ends_the_request():
    llm = LLM(ScriptModel([72, 105, EOS, 65], prompt_len=2), tokenizer=byte_tokenizer())
    deltas = complete(llm, [1, 2])
    assert [(delta.index, delta.text, delta.token_ids) for delta in deltas] == [
        (0, "H", [72]),
        (0, "i", [105]),
        (0, "", [EOS]),
    ]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]


def test_the_loop_computes_the_prompt_once_and_then_each_token_once():
    model = Watched([65, 66, 67], prompt_len=2)
    complete(LLM(model, tokenizer=byte_tokenizer()), [1, 2], max_tokens=3)
    assert [(token_ids, positions) for token_ids, positions, _ in model.seen] == [
        ([1, 2], [0, 1]),
        ([65], [2]),
        ([66], [3]),
    ]


def test_the_loop_gives_the_tokens_that_transformers_gives(tiny):
    prompt = [(5 * i + 3) % 256 for i in range(17)]
    deltas = complete(LLM(**tiny.ready), prompt, max_tokens=12, ignore_eos=True)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == tiny.tokens(prompt, 12)


def test_the_loop_ends_with_a_stop_string_and_says_which():
    llm = LLM(ScriptModel(list(b"abcdef"), prompt_len=1), tokenizer=byte_tokenizer())
    deltas = complete(llm, [1], stop="cd")
    assert "".join(delta.text for delta in deltas) == "ab"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason, len(deltas)) == ("stop", "cd", 4)


def test_requests_are_numbered_and_keep_their_seed_or_get_the_engines_next():
    llm, twin = (LLM(ScriptModel([65], prompt_len=1), tokenizer=byte_tokenizer(), seed=3) for _ in range(2))
    params = [greedy(), greedy(seed=0), greedy()]
    first, second, third = llm._requests(["Hi", [7, 8], "Ho"], params)
    assert [request.request_id for request in (first, second, third)] == ["0", "1", "2"]
    assert (first.prompt, first.prompt_token_ids) == ("Hi", [72, 105])
    assert (second.prompt, second.prompt_token_ids, second.seed) == (None, [7, 8], 0)
    assert first.seed != third.seed
    assert [request.seed for request in twin._requests(["a", "b"], params[::2])] == [first.seed, third.seed]
    assert llm._requests(["more"], [greedy()])[0].request_id == "3"


def test_prompts_that_are_refused_use_up_neither_numbers_nor_seeds():
    llm, twin = (LLM(ScriptModel([65], prompt_len=1), tokenizer=byte_tokenizer(), seed=3) for _ in range(2))
    with pytest.raises(RequestError, match="out of vocabulary"):
        llm._requests(["good", [-1]], [greedy(), greedy()])
    [after], [untouched] = (engine._requests(["Hi"], [greedy()]) for engine in (llm, twin))
    assert (after.request_id, after.seed) == (untouched.request_id, untouched.seed)
