"""The choices of one request share its prompt, which is computed once; their tokens are those of separate requests."""

import random

import pytest
import torch

from common.errors import RequestError
from common.sampling_params import SamplingParams
from tests.contracts.prefix_caching import (
    answers,
    assert_idle,
    drain,
    greedy,
    preempt_all,
    preempt_newest,
    recall_engine,
    seeded,
    take,
    tokens,
)
from tests.kit.interrupts import interrupt, num_lines
from tests.kit.models import Recall, ScriptModel, Successor
from tests.kit.tokenizers import EOS, byte_tokenizer

SINCE = "v0_6"

either_way = pytest.mark.parametrize("caching", [True, False], ids=["caching", "no_caching"])


def copies(engine):
    """The pairs of blocks that are copied, as they are, step by step."""
    pairs = []
    engine.on_step = lambda scheduled: pairs.extend(scheduled.blocks_to_copy)
    return pairs


@either_way
@pytest.mark.parametrize("params", [greedy(6, n=3), seeded(8, 6, n=3)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 13])
def test_choices_compute_the_prompt_once_and_equal_separate_requests(milestone, caching, params, length):
    engine = recall_engine(milestone, enable_prefix_caching=caching)
    pairs = copies(engine)
    engine.add_request("A", tokens(length), params)
    assert drain(engine) == {"A": answers(engine, tokens(length), params)}
    assert engine.model.num_computed_tokens == length + 3 * 5
    # A partly filled block is copied for two of three; a full one is never written again, so it stays common.
    assert len(pairs) == (0 if length % 4 == 0 else 2)
    assert_idle(engine)


@either_way
def test_choices_equal_separate_requests_on_a_model_with_attention(milestone, tiny, caching):
    llm = milestone.LLM(**tiny.ready, num_blocks=60, block_size=4, enable_prefix_caching=caching)
    for length in (3, 4, 5, 17):
        [together] = llm.generate([tokens(length)], greedy(9, n=3))
        assert [choice.token_ids for choice in together.outputs] == [tiny.tokens(tokens(length), 9)] * 3
        [together] = llm.generate([tokens(length)], seeded(20, 9, n=3))
        llm.reset_prefix_cache()
        alone = [llm.generate([tokens(length)], seeded(20 + index, 9))[0].outputs[0].token_ids for index in range(3)]
        assert [choice.token_ids for choice in together.outputs] == alone
        assert len({tuple(token_ids) for token_ids in alone}) == 3
    assert_idle(llm.engine)


@either_way
def test_logprobs_of_choices_are_those_of_separate_requests(milestone, tiny, caching):
    llm = milestone.LLM(**tiny.ready, num_blocks=60, block_size=4, enable_prefix_caching=caching)
    [together] = llm.generate([tokens(6)], seeded(20, 5, n=3, logprobs=2))
    for index, choice in enumerate(together.outputs):
        [alone] = llm.generate([tokens(6)], seeded(20 + index, 5, logprobs=2))
        assert choice.cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob, abs=1e-4)
        assert [list(entry) for entry in choice.logprobs] == [list(entry) for entry in alone.outputs[0].logprobs]


@either_way
def test_a_prompt_in_chunks_is_computed_once_too_and_nobody_else_takes_the_choices_seats(milestone, caching):
    engine = recall_engine(milestone, max_num_batched_tokens=8, max_num_seqs=4, enable_prefix_caching=caching)
    engine.add_request("A", tokens(30), seeded(1, 5, n=3))
    engine.add_request("B", tokens(5)[::-1], greedy(5, n=2))  # begins with nothing that A has
    for num_chunks in range(1, 4):
        assert engine.step() == []
        assert engine.model.num_computed_tokens == 8 * num_chunks
        assert (engine.scheduler.num_seats, len(engine.scheduler.running)) == (3, 1)
        assert engine.scheduler.num_waiting == 2
    outputs = {}
    take(engine.step(), outputs)
    assert [len(choice) for choice in outputs["A"]] == [1, 1, 1]
    assert len(engine.scheduler.running) == 3  # B is two, and there is one seat
    drain(engine, outputs)
    assert outputs == {
        "A": answers(engine, tokens(30), seeded(1, 5, n=3)),
        "B": answers(engine, tokens(5)[::-1], greedy(5, n=2)),
    }
    assert engine.model.num_computed_tokens == 30 + 3 * 4 + 5 + 2 * 4
    assert_idle(engine)


@either_way
def test_a_preempted_choice_comes_back_as_an_ordinary_request(milestone, caching):
    engine = recall_engine(milestone, enable_prefix_caching=caching)
    params = seeded(2, 8, n=3)
    engine.add_request("A", tokens(6), params)
    for num_steps in range(5):
        outputs = {}
        if num_steps:
            engine.add_request("A", tokens(6), params)
        for _ in range(1 + num_steps):
            take(engine.step(), outputs)
        victim = preempt_newest(engine.scheduler)
        assert (victim.request_id, victim.num_preemptions, victim.forks) == ("A/2", 1, [])
        drain(engine, outputs)
        assert outputs == {"A": answers(engine, tokens(6), params)}
        assert_idle(engine)


@either_way
@pytest.mark.parametrize(("num_blocks", "length"), [(6, 5), (8, 6), (7, 9), (9, 8)])
def test_choices_in_a_pool_too_small_for_them_are_preempted_and_right(milestone, caching, num_blocks, length):
    engine = recall_engine(milestone, num_blocks=num_blocks, enable_prefix_caching=caching)
    preempted = []
    engine.on_step = lambda scheduled: preempted.extend(scheduled.preempted)
    requests = {"A": seeded(3, 14, n=4), "B": greedy(14, n=2)}
    for name, params in requests.items():
        engine.add_request(name, tokens(length, seed=ord(name)), params)
    outputs = drain(engine)
    assert outputs == {name: answers(engine, tokens(length, seed=ord(name)), p) for name, p in requests.items()}
    assert {request.request_id[0] for request in preempted} >= {"A"}
    assert_idle(engine)


@either_way
def test_a_prompt_that_is_preempted_between_its_chunks_still_has_all_its_choices(milestone, caching):
    engine = recall_engine(milestone, max_num_batched_tokens=8, enable_prefix_caching=caching)
    params = seeded(4, 6, n=3)
    for num_steps in range(1, 5):
        engine.reset_prefix_cache()
        engine.add_request("A", tokens(30), params)
        outputs = {}
        for _ in range(num_steps):
            take(engine.step(), outputs)
        num_before = engine.model.num_computed_tokens
        preempt_all(engine.scheduler)
        engine.scheduler.check_integrity()
        assert engine.scheduler.num_waiting == 3
        drain(engine, outputs)
        assert outputs == {"A": answers(engine, tokens(30), params)}
        if num_steps < 4:
            num_again = 30 - 8 * num_steps if caching else 30
            assert engine.model.num_computed_tokens - num_before == num_again + 3 * 5
        assert_idle(engine)


@either_way
def test_an_abort_at_any_step_takes_all_choices_and_leaves_others_as_they_are(milestone, caching):
    for num_steps in range(9):
        engine = recall_engine(milestone, num_blocks=18, max_num_batched_tokens=8, enable_prefix_caching=caching)
        engine.add_request("B", tokens(10), seeded(7, 9, n=2))
        engine.add_request("A", tokens(22), seeded(1, 9, n=3))
        engine.add_request("C", tokens(22), greedy(9, n=2))
        outputs = {}
        for _ in range(num_steps):
            take(engine.step(), outputs)
        engine.abort_request("A")
        engine.scheduler.check_integrity()
        outputs.pop("A", None)
        drain(engine, outputs)
        assert outputs == {
            "B": answers(engine, tokens(10), seeded(7, 9, n=2)),
            "C": answers(engine, tokens(22), greedy(9, n=2)),
        }
        assert_idle(engine)


@either_way
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_choice_that_ends_with_its_first_token_leaves_the_others_their_blocks(milestone, caching, index):
    engine = recall_engine(milestone, enable_prefix_caching=caching)
    for seed in range(100):  # the first tokens have to differ, and the one that ends must not come soon again
        plain = answers(engine, tokens(6), seeded(seed, 9, n=3))
        end = plain[index][0]
        if all(end not in choice[:6] for number, choice in enumerate(plain) if number != index):
            break
    params = seeded(seed, 9, n=3, stop_token_ids=[end])
    engine.add_request("A", tokens(6), params)
    take(engine.step(), outputs := {})
    assert outputs["A"] == [choice[:1] for choice in plain]
    assert len(engine.scheduler.running) == 2
    drain(engine, outputs)
    assert outputs["A"] == answers(engine, tokens(6), params)
    assert (len(outputs["A"][index]), min(len(c) for i, c in enumerate(outputs["A"]) if i != index) >= 6) == (1, True)
    assert_idle(engine)


@either_way
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_choice_that_meets_a_stop_string_with_its_first_token_leaves_the_others_their_blocks(
    milestone, tiny, caching, index
):
    llm = milestone.LLM(**tiny.ready, num_blocks=60, block_size=4, enable_prefix_caching=caching)
    letters = {
        "temperature": 1.0,
        "max_tokens": 9,
        "ignore_eos": True,
        "logit_bias": dict.fromkeys(range(97, 123), 50.0),
    }
    for seed in range(100):
        [plain] = llm.generate([tokens(6)], SamplingParams(n=3, seed=seed, **letters))
        texts = [choice.text for choice in plain.outputs]
        if all(texts[index][0] not in text[:6] for number, text in enumerate(texts) if number != index):
            break
    [output] = llm.generate([tokens(6)], SamplingParams(n=3, seed=seed, stop=texts[index][0], **letters))
    assert [choice.text for choice in output.outputs] == [text.split(texts[index][0])[0] for text in texts]
    assert (output.outputs[index].text, output.outputs[index].finish_reason) == ("", "stop")
    assert_idle(llm.engine)


@either_way
@pytest.mark.parametrize("params", [greedy(1, n=3), greedy(5, n=3, ignore_eos=False)], ids=["length", "eos"])
def test_choices_that_all_end_with_their_first_token_leave_nothing(milestone, caching, params):
    llm = milestone.LLM(
        ScriptModel([EOS], prompt_len=6), tokenizer=byte_tokenizer(), num_blocks=9, block_size=4,
        enable_prefix_caching=caching,
    )  # fmt: skip
    [output] = llm.generate([tokens(6)], params)
    assert [choice.token_ids for choice in output.outputs] == [[EOS]] * 3
    assert llm.engine.model.num_forwards == 1
    assert_idle(llm.engine)


def test_choices_of_a_cached_prompt_compute_only_what_is_not_cached_and_say_so_once(milestone):
    engine = recall_engine(milestone)
    engine.add_request("A", tokens(14), greedy(1))
    drain(engine)
    engine.add_request("B", tokens(14), seeded(5, 4, n=3))
    num_before, outputs, num_cached = engine.model.num_computed_tokens, {}, []
    while engine.has_unfinished_requests():
        step = engine.step()
        num_cached += [output.num_cached_tokens for output in step]
        take(step, outputs)
    assert engine.model.num_computed_tokens - num_before == 2 + 3 * 3
    assert num_cached == [12] * 4
    assert outputs["B"] == answers(engine, tokens(14), seeded(5, 4, n=3))


def test_all_choices_are_found_again_as_far_as_their_blocks_are_full(milestone):
    engine = recall_engine(milestone)
    params = seeded(6, 12, n=3)
    engine.add_request("A", tokens(6), params)
    [choices] = drain(engine).values()
    assert len({tuple(choice) for choice in choices}) == 3
    for number, choice in enumerate(choices):
        engine.add_request("B", [*tokens(6), *choice, 1], greedy(1))
        [output] = engine.step()
        assert output.num_cached_tokens == 16, number  # 17 tokens have KV
        assert [output.outputs[0].token_ids] == answers(engine, [*tokens(6), *choice, 1], greedy(1))


@either_way
def test_a_scored_prompt_with_choices_is_scored_once_whether_it_is_cached_or_not(milestone, caching):
    engine = recall_engine(milestone, enable_prefix_caching=caching)
    params = seeded(5, 4, n=3, prompt_logprobs=1)
    all_scores = []
    for _ in range(2):
        num_before, outputs = engine.model.num_computed_tokens, {}
        engine.add_request("A", tokens(14), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                take([output], outputs)
                all_scores += [output.prompt_logprobs] if output.prompt_logprobs is not None else []
        assert engine.model.num_computed_tokens - num_before == 14 + 3 * 3
        assert outputs == {"A": answers(engine, tokens(14), params)}
    assert [len(scores) for scores in all_scores] == [14, 14]
    assert all_scores[0] == all_scores[1]


def test_more_choices_than_may_run_at_once_are_refused_and_change_nothing(milestone):
    engine = recall_engine(milestone, max_num_seqs=3)
    with pytest.raises(RequestError, match=r"n is 4, but at most 3 requests run at once \(max_num_seqs\)") as error:
        engine.add_request("A", tokens(6), greedy(4, n=4))
    assert error.value.param == "n"
    assert_idle(engine)
    # What the budget has no tokens for cannot run at once either.
    engine = recall_engine(milestone, max_num_batched_tokens=2)
    with pytest.raises(RequestError, match="n is 3, but at most 2 requests run at once"):
        engine.add_request("A", tokens(6), greedy(4, n=3))


@either_way
def test_as_many_choices_as_may_run_wait_for_the_others_and_are_served(milestone, caching):
    engine = recall_engine(milestone, max_num_seqs=3, enable_prefix_caching=caching)
    requests = {"A": greedy(5), "B": seeded(3, 5, n=3), "C": greedy(3)}
    engine.add_request("A", tokens(6), requests["A"])
    take(engine.step(), outputs := {})
    engine.add_request("B", tokens(7), requests["B"])
    engine.add_request("C", tokens(5), requests["C"])
    order = []
    engine.on_step = lambda scheduled: order.append("".join(r.request_id[0] for r in scheduled.requests_and_forks))
    drain(engine, outputs)
    assert order == ["A"] * 4 + ["BBB"] * 5 + ["C"] * 3
    assert outputs == {
        name: answers(engine, tokens(length), requests[name]) for name, length in (("A", 6), ("B", 7), ("C", 5))
    }
    assert_idle(engine)


@either_way
@pytest.mark.parametrize("fails_in", [0, 1, 2])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_that_fails_is_computed_again_with_its_copies_and_no_token_changes(milestone, caching, fails_in, step):
    engine = recall_engine(milestone, max_num_batched_tokens=16, enable_prefix_caching=caching)
    failed, pairs = [], copies(engine)
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    requests = {"A": (tokens(6), seeded(3, 7, n=3)), "B": (tokens(7), seeded(4, 7, n=2)), "C": (tokens(9), greedy(7))}
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    outputs = {}
    while engine.has_unfinished_requests():
        if engine.model.num_forwards == step - 1:  # the second step copies, and has the rest of a prompt
            engine.model.fails_in = fails_in
        take(engine.step(), outputs)
        engine.scheduler.check_integrity()
    assert outputs == {name: answers(engine, *request) for name, request in requests.items()}
    assert (failed, len(pairs)) == ([], 3)
    assert_idle(engine)


@either_way
@pytest.mark.parametrize("poisoned", ["A", "B"])
def test_a_request_that_fails_takes_its_choices_along_and_no_other(milestone, caching, poisoned):
    """`Successor` fails in every forward that reads an `x`: one of the requests comes to it in its answer."""
    engine = milestone.LLMEngine(
        Successor(poison="x"), tokenizer=byte_tokenizer(), num_blocks=40, block_size=4, enable_prefix_caching=caching
    )
    failed = []
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    prompts = {name: "abcdew" if name == poisoned else "abcdea" for name in "AB"}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(6, n=3))
    outputs = drain(engine)
    assert failed == [poisoned]
    assert outputs == {name: [list(b"x")] * 3 if name == poisoned else [list(b"bcdefg")] * 3 for name in prompts}
    assert_idle(engine)


@either_way
def test_a_step_that_raises_with_copies_in_it_has_not_happened(milestone, caching):
    engine = recall_engine(milestone, enable_prefix_caching=caching)
    params = seeded(3, 7, n=3)
    for step in range(1, 5):
        engine.add_request("A", tokens(6), params)
        outputs, num_before = {}, engine.model.num_forwards
        while engine.has_unfinished_requests():
            if engine.model.num_forwards - num_before == step - 1:
                engine.model.fails_in = 1
                with pytest.raises(RuntimeError, match="the model failed"):
                    engine.step()
                engine.scheduler.check_integrity()
                assert engine.scheduler.block_manager.num_free_blocks == 60
                engine.model_runner.kv_cache.kv.fill_(torch.nan)
            take(engine.step(), outputs)
        assert outputs == {"A": answers(engine, tokens(6), params)}
        assert_idle(engine)


@pytest.mark.thorough
def test_unt_11_an_interrupt_at_any_line_leaves_shared_blocks_and_forks_as_they_were(milestone):
    prompts, params = [tokens(5), tokens(7), tokens(6, seed=1)], [seeded(1, 4, n=3), seeded(2, 4), greedy(3, n=2)]

    def prepare():
        """A stream that runs, two choices in blocks that others will find; some of these wait and are preempted."""
        llm = milestone.LLM(Recall(), tokenizer=byte_tokenizer(), num_blocks=9, block_size=2)
        stream = llm.stream(tokens(5), seeded(3, 7, n=2))
        take([next(stream)], streamed := {})
        return llm, stream, streamed

    def generate(llm):
        return [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]

    llm, stream, _ = prepare()
    preempted, cached = [], []
    llm.engine.on_step = lambda s: (preempted.extend(s.preempted), cached.extend(s.num_cached_tokens.values()))
    expected = generate(llm)
    assert (len(preempted) > 0, sum(cached) > 0) == (True, True)
    stream.close()
    assert expected == [answers(llm.engine, *request) for request in zip(prompts, params, strict=True)]
    llm, stream, _ = prepare()  # as each try below finds it: a listener, or a block cached before, are other lines
    total = num_lines(lambda: generate(llm), (milestone.__name__,))
    stream.close()
    for place in sorted(random.Random(6).sample(range(total), 80)):
        llm, stream, streamed = prepare()
        assert interrupt(lambda: generate(llm), (milestone.__name__,), place)  # noqa: B023
        llm.engine.scheduler.check_integrity()
        assert len(llm.engine.output_processor.parents) <= 1  # the stream, unless it has ended meanwhile
        assert generate(llm) == expected
        take(stream, streamed)
        assert list(streamed.values()) == [answers(llm.engine, tokens(5), seeded(3, 7, n=2))]
        assert_idle(llm.engine)


def test_choices_take_a_fraction_of_the_blocks_of_separate_requests(milestone):
    engine = recall_engine(milestone, num_blocks=400)
    engine.add_request("A", tokens(201), greedy(6, n=8))
    engine.step()
    engine.step()
    # 50 full blocks, and of the one that is partly filled each has its own.
    assert engine.scheduler.block_manager.num_blocks - engine.scheduler.block_manager.num_free_blocks == 50 + 8
    assert drain(engine)
    assert_idle(engine)
