"""Many requests at once: each gets exactly the tokens that it would have had alone, whatever happens on the way."""

import importlib

import pytest

from common.errors import ModelError, RequestError
from common.sampling_params import SamplingParams
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import byte_tokenizer

SINCE = "v0_3"

LENGTHS = [1, 5, 6, 4, 17, 33, 16, 15, 2, 64, 31, 8, 40, 3, 27, 12]
PROMPTS = [[(13 * i + 7 * length + number) % 256 for i in range(length)] for number, length in enumerate(LENGTHS)]


def greedy(max_tokens=24, **params):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True} | params)


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def num_preemptions(outputs):
    return sum(output.metrics.num_preemptions for output in outputs)


def assert_idle(engine):
    engine.scheduler.check_integrity()
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    assert not engine.has_unfinished_requests()
    assert engine.output_processor.parents == engine.output_processor._children == {}


@pytest.mark.parametrize("budget", [8, 16, 64, 512])
def test_16_prompts_batched_in_any_chunks_equal_transformers(milestone, tiny, budget):
    llm = milestone.LLM(tiny.folder, max_num_batched_tokens=budget, max_num_seqs=8, num_blocks=200)
    outputs = llm.generate(PROMPTS, greedy())
    assert token_ids(outputs) == [tiny.tokens(prompt, 24) for prompt in PROMPTS]
    assert_idle(llm.engine)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(24, 4), (8, 16), (30, 4)])
def test_16_prompts_in_a_tight_pool_are_preempted_and_equal_transformers(milestone, tiny, num_blocks, block_size):
    llm = milestone.LLM(
        tiny.folder, max_num_batched_tokens=32, max_num_seqs=16, num_blocks=num_blocks, block_size=block_size
    )
    outputs = llm.generate(PROMPTS, greedy())
    assert token_ids(outputs) == [tiny.tokens(prompt, 24) for prompt in PROMPTS]
    assert num_preemptions(outputs) > 3
    assert_idle(llm.engine)


@pytest.mark.parametrize("num_blocks", [24, 200])
def test_seeded_requests_give_the_same_tokens_alone_batched_and_preempted(milestone, tiny, num_blocks):
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=20, ignore_eos=True, seed=number, logprobs=0)
        for number in range(len(PROMPTS))
    ]
    alone = milestone.LLM(tiny.folder, max_num_seqs=1, max_num_batched_tokens=512, num_blocks=200)
    expected = token_ids(alone.generate(PROMPTS, params))
    llm = milestone.LLM(tiny.folder, max_num_batched_tokens=32, max_num_seqs=16, num_blocks=num_blocks, block_size=4)
    outputs = llm.generate(PROMPTS, params)
    assert token_ids(outputs) == expected
    if num_blocks == 24:
        assert num_preemptions(outputs) > 0
    assert all(len(output.outputs[0].logprobs) == 20 for output in outputs)


def test_sch_3_a_preempted_request_keeps_its_tokens_and_sends_none_twice(milestone, tiny):
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    engine = milestone.LLMEngine(tiny.folder, num_blocks=6, block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, greedy(10))
    streamed = {"0": [], "1": []}
    preemptions = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            streamed[output.request_id] += output.outputs[0].token_ids
            assert len(output.prompt_token_ids) == 6
            if output.finished:
                preemptions += output.metrics.num_preemptions
        engine.scheduler.check_integrity()
    assert list(streamed.values()) == [tiny.tokens(prompt, 10) for prompt in prompts]
    assert preemptions > 0
    assert_idle(engine)


def test_sch_1_a_request_that_can_never_fit_is_refused_and_blocks_nobody(milestone, tiny):
    engine = milestone.LLMEngine(tiny.folder, num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(RequestError, match=r"needs KV for 20 tokens .* holds 16"):
        engine.add_request("A", list(range(20)), greedy(1))
    engine.add_request("B", [1, 2, 3, 4], greedy(4))
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == ["B"]


def test_sch_2_the_only_request_fills_the_pool_to_its_last_slot_without_preempting_itself(milestone, tiny):
    llm = milestone.LLM(tiny.folder, num_blocks=4, block_size=4, max_model_len=64)
    outputs = llm.generate([list(range(14))], greedy(3))
    assert token_ids(outputs) == [tiny.tokens(list(range(14)), 3)]
    assert num_preemptions(outputs) == 0


def test_sch_11_a_step_without_requests_does_nothing(milestone, tiny):
    engine = milestone.LLMEngine(tiny.folder, num_blocks=8)
    assert engine.step() == []
    engine.add_request("A", [1, 2, 3], greedy())
    engine.abort_request("A")
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert_idle(engine)


def test_blk_2_blocks_come_back_from_an_abort_at_any_moment(milestone, tiny):
    options = {"num_blocks": 10, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8}
    for num_steps in range(12):
        engine = milestone.LLMEngine(tiny.folder, **options)
        for number in range(5):  # two wait, one is in the middle of its prompt, later some are preempted
            engine.add_request(str(number), list(range(9)), greedy(12))
        for _ in range(num_steps):
            engine.step()
        for number in range(5):
            engine.abort_request(str(number))
            engine.abort_request(str(number))  # twice, and unknown: harmless
            engine.scheduler.check_integrity()
        engine.abort_request("never")
        assert_idle(engine)
        assert engine.step() == []


def test_an_abort_leaves_the_others_tokens_as_they_are(milestone, tiny):
    engine = milestone.LLMEngine(tiny.folder, num_blocks=12, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = {str(number): PROMPTS[number] for number in (1, 2, 3)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(12))
    streamed = {request_id: [] for request_id in prompts}
    for step in range(100):
        if step == 4:
            engine.abort_request("2")
        for output in engine.step():
            streamed[output.request_id] += output.outputs[0].token_ids
    assert streamed["1"] == tiny.tokens(prompts["1"], 12)
    assert streamed["3"] == tiny.tokens(prompts["3"], 12)
    assert len(streamed["2"]) < 12
    assert_idle(engine)


def test_blk_4_an_id_that_is_taken_is_refused_and_free_again_afterwards(milestone, tiny):
    engine = milestone.LLMEngine(tiny.folder, num_blocks=20)
    engine.add_request("A", [1, 2, 3], greedy(2))
    with pytest.raises(RequestError, match="There is a request A already"):
        engine.add_request("A", [4, 5], greedy(2))
    while engine.has_unfinished_requests():
        engine.step()
    engine.add_request("A", [4, 5], greedy(2))
    engine.abort_request("A")
    engine.add_request("A", [4, 5], greedy(2))
    assert engine.has_unfinished_requests()


def test_two_streams_and_a_generate_between_them_share_the_engine(load, tiny):
    llm = load(tiny)
    first, second = llm.stream([1, 2, 3], greedy(9)), llm.stream([4, 5, 6, 7], greedy(9))
    streamed = [[], []]
    for _ in range(3):
        for tokens, stream in zip(streamed, (first, second), strict=True):
            tokens += next(stream).outputs[0].token_ids
    [between] = llm.generate([[8, 9]], greedy(5))
    for tokens, stream in zip(streamed, (first, second), strict=True):
        for output in stream:
            tokens += output.outputs[0].token_ids
    assert streamed == [tiny.tokens([1, 2, 3], 9), tiny.tokens([4, 5, 6, 7], 9)]
    assert between.outputs[0].token_ids == tiny.tokens([8, 9], 5)
    assert_idle(llm.engine)


def test_a_step_that_fails_leaves_nothing_behind_and_the_engine_goes_on(milestone):
    class Failing(ScriptModel):
        fails = True

        def logits(self, hidden):
            if self.fails and self.num_forwards == 3:
                raise RuntimeError("the model failed")
            return super().logits(hidden)

    model = Failing([65] * 20, prompt_len=2)
    llm = milestone.LLM(model, tokenizer=byte_tokenizer(), num_blocks=20, block_size=4)
    with pytest.raises(RuntimeError, match="the model failed"):
        llm.generate(["Hi", "Ho"], greedy(9))
    assert_idle(llm.engine)
    model.fails = False
    assert llm.generate(["Hi"], greedy(3))[0].outputs[0].text == "AAA"


def test_stop_strings_end_a_request_in_the_step_that_completes_them(milestone):
    engine = milestone.LLMEngine(
        ScriptModel(list(b"abcdefgh"), prompt_len=2), tokenizer=byte_tokenizer(), num_blocks=20, block_size=4
    )
    engine.add_request("A", "Hi", greedy(8, stop="cd"))
    engine.add_request("B", "Ho", greedy(8))
    texts = {"A": "", "B": ""}
    steps = {}
    for step in range(20):
        for output in engine.step():
            texts[output.request_id] += output.outputs[0].text
            if output.finished:
                steps[output.request_id] = step
                assert output.outputs[0].stop_reason == {"A": "cd", "B": None}[output.request_id]
    assert (texts, steps) == ({"A": "ab", "B": "abcdefgh"}, {"A": 3, "B": 7})
    assert_idle(engine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
        ({"max_num_seqs": "8"}, "max_num_seqs must be at least 1, got '8'"),
        ({"max_num_batched_tokens": 512.0}, r"max_num_batched_tokens must be at least 1, got 512\.0"),
    ],
)
def test_budgets_that_cannot_be_are_refused(milestone, tiny, arguments, message):
    with pytest.raises(ModelError, match=message):
        milestone.LLM(tiny.folder, **arguments)


def test_no_more_requests_run_than_the_budget_has_tokens(milestone, tiny):
    llm = milestone.LLM(tiny.folder, max_num_batched_tokens=4, num_blocks=200)
    assert llm.engine.scheduler.max_num_seqs == 4
    outputs = llm.generate(PROMPTS[:6], greedy(5))
    assert token_ids(outputs) == [tiny.tokens(prompt, 5) for prompt in PROMPTS[:6]]


@pytest.mark.parametrize("leave", ["close", "drop", "use up"])
def test_a_stream_that_is_left_before_its_first_token_leaves_nothing_in_the_engine(milestone, tiny, leave):
    llm = milestone.LLM(tiny.folder, num_blocks=20)
    stream = llm.stream([1, 2, 3], greedy(50))
    assert llm.engine.has_unfinished_requests()
    if leave == "close":
        stream.close()
        assert list(stream) == []
    elif leave == "drop":
        del stream
        llm.generate([[1]], greedy(1))  # garbage is collected at any moment: it is left at the next step
    else:
        assert len([*stream]) == 50
    assert_idle(llm.engine)
    assert llm._outputs == {}


def test_unseeded_choices_of_one_request_differ(milestone, tiny):
    llm = milestone.LLM(tiny.folder, num_blocks=40)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(n=3, temperature=1.0, max_tokens=12, ignore_eos=True))
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
    assert_idle(llm.engine)


def test_preemptions_of_all_choices_are_counted(milestone, tiny):
    llm = milestone.LLM(tiny.folder, num_blocks=6, block_size=4, max_num_seqs=3)
    preempted = []
    llm.engine.on_step = lambda scheduled: preempted.extend(scheduled.preempted)
    [output] = llm.generate([[1, 2, 3, 4, 5]], greedy(14, n=3))
    assert [choice.token_ids for choice in output.outputs] == [tiny.tokens([1, 2, 3, 4, 5], 14)] * 3
    assert output.metrics.num_preemptions == len(preempted) > 1


def test_a_step_that_fails_leaves_other_streams_whole(milestone, tiny, monkeypatch):
    llm = milestone.LLM(tiny.folder, num_blocks=40, block_size=4)
    stream = llm.stream([1, 2, 3], greedy(12))
    tokens = [*next(stream).outputs[0].token_ids, *next(stream).outputs[0].token_ids]
    run = llm.engine.model_runner.run

    def fail(scheduled):
        raise RuntimeError("the step failed")

    monkeypatch.setattr(llm.engine.model_runner, "run", fail)
    with pytest.raises(RuntimeError, match="the step failed"):
        llm.generate([[4, 5]], greedy(3))
    llm.engine.scheduler.check_integrity()
    monkeypatch.setattr(llm.engine.model_runner, "run", run)
    for output in stream:
        tokens += output.outputs[0].token_ids
    assert tokens == tiny.tokens([1, 2, 3], 12)
    assert_idle(llm.engine)


def test_a_request_given_to_the_engine_itself_disturbs_no_generate(milestone, tiny):
    llm = milestone.LLM(tiny.folder, num_blocks=40)
    llm.engine.add_request("mine", [7, 8], greedy(3))
    [output] = llm.generate([[1, 2, 3]], greedy(9))
    assert output.outputs[0].token_ids == tiny.tokens([1, 2, 3], 9)
    assert_idle(llm.engine)


def test_an_abort_from_within_a_step_is_no_fault(milestone, tiny):
    engine = milestone.LLMEngine(tiny.folder, num_blocks=40)
    engine.add_request("A", [1, 2, 3], greedy(9))
    engine.add_request("B", [1, 2, 3], greedy(3))
    engine.on_step = lambda scheduled: engine.abort_request("A")
    tokens = [output.outputs[0].token_ids for _ in range(3) for output in engine.step()]
    assert [token for delta in tokens for token in delta] == tiny.tokens([1, 2, 3], 3)
    assert_idle(engine)


def test_decodes_of_like_lengths_are_gathered_together_whatever_the_order_of_arrival(milestone, tiny):
    # Where blocks are read in place, nothing is gathered: this is about the path without kernels.
    has_kernels = hasattr(importlib.import_module(f"{milestone.__name__}.engine_args").EngineArgs, "kernels")
    plain = {"kernels": "torch"} if has_kernels else {}
    engine = milestone.LLMEngine(tiny.folder, num_blocks=200, block_size=4, **plain)
    for number, length in enumerate((60, 3, 61, 4, 62, 5)):
        engine.add_request(str(number), [number + 1] * length, greedy(3))
    for _ in range(2):
        engine.step()
    shapes = [tuple(tables.shape) for _, tables, _ in engine.model_runner.kv_cache.decode_batches]
    assert shapes == [(3, 2), (3, 16)]


def test_a_prompt_is_needed(milestone, tiny):
    engine = milestone.LLMEngine(tiny.folder, num_blocks=20)
    with pytest.raises(RequestError, match="A prompt must be text or a list of token ids, got None"):
        engine.add_request("A", None, greedy())


@pytest.mark.real_model
def test_a_sample_on_the_real_model_batched_chunked_and_preempted_equals_transformers(milestone, real):
    llm = milestone.LLM(**real.ready, num_blocks=14, max_num_batched_tokens=32, max_num_seqs=4)
    questions = ["Why is the sky blue?", "Name three colours.", "Count from 1 to 20.", "Write a short poem."]
    prompts = [llm.tokenizer.chat_token_ids([{"role": "user", "content": question}]) for question in questions]
    outputs = llm.generate(prompts, greedy(32))
    assert token_ids(outputs) == [real.tokens(prompt, 32) for prompt in prompts]
    assert num_preemptions(outputs) > 0


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("budget", [8, 64, 512])
@pytest.mark.parametrize("num_blocks", [12, 400])
def test_16_prompts_on_the_real_model_equal_transformers(milestone, real, budget, num_blocks):
    llm = milestone.LLM(**real.ready, num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=8)
    text = llm.tokenizer.encode("Once upon a time, in a land of rivers and mills, there lived a clockmaker. " * 8)
    prompts = [text[number : number + length] for number, length in enumerate(LENGTHS)]
    outputs = llm.generate(prompts, greedy(24))
    assert token_ids(outputs) == [real.tokens(prompt, 24) for prompt in prompts]
    if num_blocks == 12:
        assert num_preemptions(outputs) > 0
