"""Prefix caching changes no token and takes no risk: it only saves what has been computed already."""

import pytest
import torch

from common.sampling_params import SamplingParams
from tests.kit.models import Recall, recalled
from tests.kit.tokenizers import byte_tokenizer

SINCE = "v0_6"


def greedy(max_tokens=4, **params):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True} | params)


def seeded(seed, max_tokens=4, **params):
    return SamplingParams(temperature=0.9, max_tokens=max_tokens, ignore_eos=True, seed=seed, **params)


def tokens(num, seed=0):
    return [(17 * i + 5 * i * i + 29 * seed + seed * i) % 251 for i in range(num)]


def recall_engine(milestone, **options):
    """An engine around `Recall`, with blocks of 4."""
    return milestone.LLMEngine(Recall(), tokenizer=byte_tokenizer(), **{"num_blocks": 60, "block_size": 4} | options)


def answers(engine, prompt, params):
    """What `Recall` has to say to a request, a list for each of its choices."""
    return [recalled(prompt, params, vocab_size=engine.vocab_size, index=index) for index in range(params.n)]


def drain(engine, outputs=None, check=True):
    """Step to the end; `{request id: [token ids of each choice]}`, added to `outputs`."""
    outputs = {} if outputs is None else outputs
    while engine.has_unfinished_requests():
        take(engine.step(), outputs)
        if check:
            engine.scheduler.check_integrity()
    return outputs


def take(step, outputs):
    for output in step:
        for delta in output.outputs:
            choices = outputs.setdefault(output.request_id, [])
            choices += [[] for _ in range(delta.index + 1 - len(choices))]
            choices[delta.index] += delta.token_ids


def ask(engine, prompt, params=None, salt=None, request_id="Q"):
    """One request to its end: its choices, which must be right, and how much of it came from the cache."""
    params = greedy() if params is None else params
    engine.add_request(request_id, prompt, params, cache_salt=salt)
    num_before, num_cached, choices = engine.model.num_computed_tokens, 0, {}
    while engine.has_unfinished_requests():
        step = engine.step()
        num_cached = max([num_cached, *(output.num_cached_tokens for output in step)])
        take(step, choices)
        engine.scheduler.check_integrity()
    assert choices[request_id] == answers(engine, prompt, params)
    # What came from the cache was not computed; a last token never is. Nobody was preempted: the pool is wide.
    num_outputs = sum(max(len(choice) - 1, 0) for choice in choices[request_id])
    assert engine.model.num_computed_tokens - num_before == len(prompt) - num_cached + num_outputs
    assert_idle(engine)
    return num_cached


def assert_idle(engine):
    engine.scheduler.check_integrity()
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    assert all(manager.ref_count(block) == 0 for block in range(manager.num_blocks))
    assert not engine.has_unfinished_requests()
    assert engine.output_processor.parents == engine.output_processor._children == {}


def preempt_newest(scheduler):
    newest = scheduler.running[-1]
    return scheduler._preempt_newest(*([newest] if hasattr(scheduler, "events") else []))  # from v0.8 on: for whom


def preempt_all(scheduler):
    while scheduler.running:
        preempt_newest(scheduler)


@pytest.mark.parametrize(("length", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_pfx_1_of_a_prompt_that_is_all_cached_at_least_the_last_token_is_computed_again(milestone, length, num_cached):
    engine = recall_engine(milestone)
    assert ask(engine, tokens(length), greedy(1)) == 0
    assert ask(engine, tokens(length), greedy(1)) == num_cached
    assert ask(engine, tokens(length), greedy(6)) == num_cached
    assert ask(engine, tokens(length), seeded(5, 6)) == num_cached


def test_pfx_1_the_prompt_keeps_its_length_in_the_output_and_says_what_was_cached(milestone, tiny):
    llm = milestone.LLM(**tiny.ready, num_blocks=60, block_size=4)
    first, second = (llm.generate([tokens(8)], greedy(5))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    assert first.prompt_token_ids == second.prompt_token_ids == tokens(8)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == tiny.tokens(tokens(8), 5)
    llm.reset_prefix_cache()
    assert llm.generate([tokens(8)], greedy(5))[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "num_cached"),
    [
        ([9, 9, 9, 9, 5, 6, 7, 8, 1], 0),  # an equal block behind another past
        ([1, 2, 3, 4, 5, 6, 0, 0, 1], 4),  # half a block is none
        ([5, 6, 7, 8, 1], 0),  # an equal block at another place
        ([1, 2, 3, 4, 9, 9, 9, 9, 9], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 4, 3, 2, 1, 5, 6, 7, 8], 4),
        ([2, 1, 4, 3, 5, 6, 7, 8, 9], 0),  # the same tokens in another order
    ],
)
def test_pfx_3_a_hit_is_a_full_block_with_the_same_tokens_behind_the_same_past(milestone, prompt, num_cached):
    engine = recall_engine(milestone)
    ask(engine, [1, 2, 3, 4, 5, 6, 7, 8], greedy(1))
    assert ask(engine, prompt) == num_cached


def test_pfx_3_blocks_are_not_found_before_they_are_full_and_then_with_what_was_generated(milestone):
    engine = recall_engine(milestone)
    [answer] = answers(engine, tokens(6), greedy(7))
    ask(engine, tokens(6), greedy(7))  # 12 tokens with KV: the last token of the answer has none
    assert ask(engine, [*tokens(6), *answer, 1, 2, 3], greedy(1)) == 12
    assert ask(engine, [*tokens(6), *answer[:1], (answer[1] + 1) % 24, 3], greedy(1)) == 4


def test_pfx_5_two_equal_prompts_in_one_step_are_both_computed_and_a_third_finds_them(milestone):
    engine = recall_engine(milestone)
    for name in "AB":
        engine.add_request(name, tokens(14), greedy(6))
    take(engine.step(), outputs := {})
    assert engine.model.num_computed_tokens == 28
    tables = [engine.scheduler.block_manager.block_table(request.request_id) for request in engine.scheduler.running]
    assert not set(tables[0]) & set(tables[1])
    engine.add_request("C", tokens(14), greedy(6))
    take(engine.step(), outputs)
    assert engine.model.num_computed_tokens == 28 + 2 + 2  # a token of each decode, and what is not cached of C
    assert drain(engine, outputs) == {name: answers(engine, tokens(14), greedy(6)) for name in "ABC"}
    assert_idle(engine)


@pytest.mark.parametrize(("num_steps", "num_cached"), [(0, 0), (1, 8), (2, 16), (3, 20)])
def test_pfx_5_of_an_aborted_prompt_only_what_was_computed_is_found(milestone, num_steps, num_cached):
    engine = recall_engine(milestone, max_num_batched_tokens=8)
    engine.add_request("A", tokens(22), greedy())
    for _ in range(num_steps):
        engine.step()
    engine.abort_request("A")
    assert_idle(engine)
    assert ask(engine, tokens(22)) == num_cached


@pytest.mark.parametrize("fails_in", [0, 1, 2])
def test_pfx_5_what_a_failed_step_has_written_is_never_found(milestone, fails_in):
    engine = recall_engine(milestone, max_num_batched_tokens=8)
    failed = []
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    engine.add_request("A", tokens(22), greedy())
    engine.step()
    engine.model.fails_in = fails_in
    engine.step()
    assert failed == ["A"]
    assert_idle(engine)
    assert ask(engine, tokens(22)) == 8
    # Without anybody to tell, the step raises, and nobody knows what is written: everything is forgotten.
    engine.on_failure = None
    engine.add_request("A", tokens(22), greedy())
    engine.model.fails_in = fails_in
    with pytest.raises(RuntimeError, match="the model failed"):
        engine.step()
    engine.abort_request("A")
    assert ask(engine, tokens(22)) == 0


def test_pfx_6_shared_blocks_are_counted_down_evicted_oldest_first_and_then_not_found(milestone):
    engine = recall_engine(milestone, num_blocks=8)
    manager = engine.scheduler.block_manager
    engine.add_request("A", tokens(9), greedy(2))
    engine.step()
    shared = manager.block_table("A/0")[:2]
    engine.add_request("B", tokens(9), greedy(6))
    take(engine.step(), outputs := {})  # A ends in it, and B begins
    assert manager.block_table("B/0")[:2] == shared
    assert [manager.ref_count(block) for block in shared] == [1, 1]
    engine.add_request("C", tokens(9), greedy(3))
    take(engine.step(), outputs)
    assert [manager.ref_count(block) for block in shared] == [2, 2]
    drain(engine, outputs)
    assert outputs["B"] == answers(engine, tokens(9), greedy(6))
    assert outputs["C"] == answers(engine, tokens(9), greedy(3))
    assert [manager.ref_count(block) for block in shared] == [0, 0]
    assert_idle(engine)
    # Another prompt needs 6 blocks: those without a name and the later blocks go first, the first block last.
    assert ask(engine, tokens(22, seed=1), greedy(1)) == 0
    assert ask(engine, tokens(9), greedy(1)) == 8
    assert ask(engine, tokens(30, seed=2), greedy(1)) == 0  # all 8
    assert ask(engine, tokens(9), greedy(1)) == 0


def test_a_block_that_somebody_still_uses_is_never_taken_for_another(milestone):
    engine = recall_engine(milestone, num_blocks=10)
    engine.add_request("A", tokens(17), greedy(12))
    take(engine.step(), outputs := {})
    for number in range(9):  # each finds A's blocks or fills all that is left of the pool
        prompt = tokens(17) if number % 3 == 0 else tokens(15, seed=number)
        engine.add_request(str(number), prompt, greedy(1))
        take(engine.step(), outputs)
        engine.scheduler.check_integrity()
        if number % 3 == 0:
            assert outputs[str(number)] == answers(engine, prompt, greedy(1))
    drain(engine, outputs)
    assert outputs["A"] == answers(engine, tokens(17), greedy(12))
    assert_idle(engine)


def test_blocks_that_were_found_lately_stay_and_others_go(milestone):
    engine = recall_engine(milestone, num_blocks=7)
    ask(engine, tokens(9, seed=1), greedy(1))
    ask(engine, tokens(9, seed=2), greedy(1))
    assert ask(engine, tokens(9, seed=1), greedy(1)) == 8  # now the latest
    ask(engine, tokens(16, seed=3), greedy(1))  # takes the three without a name, and one of the second prompt
    assert ask(engine, tokens(9, seed=1), greedy(1)) == 8
    assert ask(engine, tokens(9, seed=2), greedy(1)) < 8


def test_the_budget_counts_only_tokens_that_are_computed(milestone):
    engine = recall_engine(milestone, max_num_batched_tokens=10)
    ask(engine, tokens(40), greedy(1))
    for number in range(3):  # 3 tokens each that are not in the cache
        engine.add_request(str(number), [*tokens(40), number, 2, 3], greedy())
    num_before = engine.model.num_computed_tokens
    outputs = {}
    take(engine.step(), outputs)
    assert engine.model.num_computed_tokens - num_before == 9
    assert sorted(outputs) == ["0", "1", "2"]
    drain(engine, outputs)
    assert outputs == {str(number): answers(engine, [*tokens(40), number, 2, 3], greedy()) for number in range(3)}


def test_a_long_prompt_is_chunked_behind_what_is_cached_of_it(milestone):
    engine = recall_engine(milestone, max_num_batched_tokens=8)
    ask(engine, tokens(22), greedy(1))
    chunks = []
    engine.on_step = lambda scheduled: chunks.append(scheduled.num_scheduled_tokens)
    assert ask(engine, [*tokens(22), *tokens(19, seed=4)], greedy(3)) == 20
    assert chunks == [[8], [8], [5], [1], [1]]


def test_a_prompt_that_joins_between_two_chunks_of_an_equal_one_computes_hardly_more_than_its_own(milestone):
    """With what is left of the budget it begins behind the first chunk, and then catches up with the second."""
    engine = recall_engine(milestone, max_num_batched_tokens=20)
    for number in range(4):
        engine.add_request(str(number), [*tokens(38), number, 9], greedy(2))
    chunks = []
    engine.on_step = lambda scheduled: chunks.append(dict(scheduled.num_cached_tokens))
    outputs = {}
    for _ in range(3):
        take(engine.step(), outputs)
        engine.scheduler.check_integrity()
    # 40 tokens of the first in two steps. In the third the others find all blocks of what they share.
    assert chunks == [{"0/0": 0}, {}, {"1/0": 36, "2/0": 36, "3/0": 36}]
    drain(engine, outputs)
    assert outputs == {str(number): answers(engine, [*tokens(38), number, 9], greedy(2)) for number in range(4)}
    assert_idle(engine)
    # Now the second step has 8 tokens left for the second request, which begins behind the 20 that are there.
    engine = recall_engine(milestone, max_num_batched_tokens=20)
    for number in range(2):
        engine.add_request(str(number), [*tokens(30), number, 9], greedy(2))
    chunks.clear()
    engine.on_step = lambda scheduled: chunks.append(
        (dict(scheduled.num_cached_tokens), dict(zip("01", scheduled.num_scheduled_tokens, strict=False)))
    )
    outputs = {}
    drain(engine, outputs)
    # 30 and 2 tokens: 20 and 12 of the first; 20 found, 8 computed of the second, all of which the first has computed,
    # too. Both have 28 by now: there is nothing that the one could take over from the other.
    assert chunks[:3] == [({"0/0": 0}, {"0": 20}), ({"1/0": 20}, {"0": 12, "1": 8}), ({}, {"0": 1, "1": 4})]
    assert outputs == {str(number): answers(engine, [*tokens(30), number, 9], greedy(2)) for number in range(2)}
    # With fewer left it has computed less than the first, and takes the rest over.
    engine = recall_engine(milestone, max_num_batched_tokens=20)
    for number in range(2):
        engine.add_request(str(number), [*tokens(37), number], greedy(2))
    chunks.clear()
    drain(engine, outputs := {})
    assert engine.model.num_computed_tokens == 38 + 2 + 2 + 2
    assert outputs == {str(number): answers(engine, [*tokens(37), number], greedy(2)) for number in range(2)}
    assert_idle(engine)


def test_a_preempted_request_finds_its_own_blocks_again(milestone):
    engine = recall_engine(milestone)
    engine.add_request("A", tokens(17), seeded(3, 9))
    take(engine.step(), outputs := {})
    for _ in range(3):
        take(engine.step(), outputs)
    num_before = engine.model.num_computed_tokens
    preempt_all(engine.scheduler)
    take(engine.step(), outputs)
    # Of 21 tokens, 20 had KV, and all five blocks of these are full.
    assert engine.model.num_computed_tokens - num_before == 1
    engine.reset_prefix_cache()
    preempt_all(engine.scheduler)
    take(engine.step(), outputs)
    assert engine.model.num_computed_tokens - num_before == 1 + 22
    drain(engine, outputs)
    assert outputs["A"] == answers(engine, tokens(17), seeded(3, 9))
    assert_idle(engine)


def test_a_prompt_that_is_to_be_scored_gets_all_scores_though_it_is_cached(milestone, tiny):
    llm = milestone.LLM(**tiny.ready, num_blocks=60, block_size=4, max_num_batched_tokens=8)
    scored = greedy(3, prompt_logprobs=2)
    [expected] = llm.generate([tokens(21)], scored)
    [output] = llm.generate([tokens(21)], scored)
    assert output.num_cached_tokens == 0
    assert [list(entry or ()) for entry in output.prompt_logprobs] == [list(e or ()) for e in expected.prompt_logprobs]
    for entry, other in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(other[token_id].logprob, abs=1e-5)
    assert output.outputs[0].token_ids == tiny.tokens(tokens(21), 3)
    assert llm.generate([tokens(21)], greedy(3))[0].num_cached_tokens == 20  # others find what it has computed


def test_a_scored_prompt_that_is_preempted_takes_over_only_what_has_its_scores(milestone):
    engine = recall_engine(milestone, max_num_batched_tokens=8)
    ask(engine, tokens(30), greedy(1))
    engine.add_request("A", tokens(30), greedy(3, prompt_logprobs=0))
    engine.step()
    engine.step()
    preempt_all(engine.scheduler)  # 16 rows are scored, and those of positions 0 to 15 are needed no more
    num_before, scores, outputs = engine.model.num_computed_tokens, [], {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            scores += output.prompt_logprobs or []
            take([output], outputs)
    assert engine.model.num_computed_tokens - num_before == 14 + 2
    assert len(scores) == 30
    assert outputs["A"] == answers(engine, tokens(30), greedy(3))


def test_a_salt_keeps_blocks_from_being_found_without_it(milestone):
    engine = recall_engine(milestone)
    prompt = tokens(13)
    for salt in ("x", "y", None, ""):
        assert ask(engine, prompt, salt=salt) == 0
        assert ask(engine, prompt, salt=salt) == 12
    assert ask(engine, prompt, salt="x") == 12
    assert ask(engine, prompt, salt="xx") == 0


def test_requests_with_different_salts_at_the_same_time_share_nothing(milestone):
    engine = recall_engine(milestone)
    outputs, manager = {}, engine.scheduler.block_manager
    for name, salt in (("A", "x"), ("B", "y"), ("C", None), ("D", "x")):
        engine.add_request(name, tokens(13), greedy(6), cache_salt=salt)
        take(engine.step(), outputs)
    tables = {name: manager.block_table(f"{name}/0") for name in "ABCD"}
    assert tables["A"][:3] == tables["D"][:3]
    assert len({block for name in "ABC" for block in tables[name]}) == sum(len(tables[name]) for name in "ABC")
    drain(engine, outputs)
    assert outputs == {name: answers(engine, tokens(13), greedy(6)) for name in "ABCD"}
    # A request keeps its salt through a preemption, too.
    engine.add_request("E", tokens(13, seed=1), greedy(6), cache_salt="z")
    engine.step()
    preempt_all(engine.scheduler)
    drain(engine)
    assert ask(engine, tokens(13, seed=1), salt=None) == 0
    assert ask(engine, tokens(13, seed=1), salt="z") == 12


def test_after_a_reset_nothing_is_found_and_what_runs_goes_on_without_being_found(milestone):
    engine = recall_engine(milestone)
    ask(engine, tokens(13))
    engine.reset_prefix_cache()
    assert ask(engine, tokens(13)) == 0
    assert ask(engine, tokens(13)) == 12
    engine.add_request("A", tokens(13), greedy(12))
    take(engine.step(), outputs := {})
    engine.reset_prefix_cache()
    for name in "BC":
        engine.add_request(name, tokens(13), greedy(3))
        num_before, num_running = engine.model.num_computed_tokens, len(engine.scheduler.running)
        take(engine.step(), outputs)
        expected = {"B": 13, "C": 1}[name]  # B computes all again, and C finds what B has computed
        assert engine.model.num_computed_tokens - num_before == num_running + expected
    drain(engine, outputs)
    assert outputs["A"] == answers(engine, tokens(13), greedy(12))
    assert outputs["B"] == outputs["C"] == answers(engine, tokens(13), greedy(3))
    assert_idle(engine)
    # The second half of A's answer was computed after the reset, behind blocks from before it.
    assert ask(engine, [*tokens(13), *outputs["A"][0]], greedy(1)) == 12


def test_without_prefix_caching_nothing_is_shared_and_every_prompt_is_computed(milestone):
    engine = recall_engine(milestone, enable_prefix_caching=False)
    for _ in range(2):
        assert ask(engine, tokens(13)) == 0
    for name in "AB":
        engine.add_request(name, tokens(13), greedy(6))
        engine.step()
    first, second = (engine.scheduler.block_manager.block_table(f"{name}/0") for name in "AB")
    assert not set(first) & set(second)
    engine.reset_prefix_cache()  # nothing to forget: no error
    drain(engine)
    assert_idle(engine)


@pytest.mark.parametrize("caching", [True, False])
def test_what_is_not_a_number_in_free_blocks_reaches_nobody_and_shared_blocks_are_not_wiped(milestone, caching):
    engine = recall_engine(milestone, num_blocks=40, max_num_batched_tokens=8, enable_prefix_caching=caching)
    kv = engine.model_runner.kv_cache.kv
    kv.fill_(torch.nan)
    prompts = {"A": tokens(14), "B": [*tokens(12), 3, 4, 5], "C": tokens(13), "D": tokens(6)}
    params = {"A": greedy(9), "B": greedy(9), "C": seeded(1, 9, n=3), "D": greedy(9, n=2)}
    outputs = {}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params[name])
        for _ in range(3):
            take(engine.step(), outputs)
    drain(engine, outputs)
    assert outputs == {name: answers(engine, prompt, params[name]) for name, prompt in prompts.items()}
    # Only what nothing leads to may be lost: all of it, where nothing is found.
    manager = engine.scheduler.block_manager
    manager.forget()
    kv.fill_(torch.nan)
    assert ask(engine, tokens(14), seeded(4, 9)) == 0
    assert ask(engine, tokens(14), seeded(4, 9)) == (12 if caching else 0)


PREFIXES = [tokens(length, seed=7) for length in (0, 3, 4, 16, 17, 32, 33)]
PROMPTS = [[*prefix, *tokens(1 + 3 * number, seed=number)] for number, prefix in enumerate(PREFIXES * 2)]


@pytest.mark.parametrize(("budget", "num_blocks"), [(8, 200), (64, 200), (512, 200), (32, 22)])
def test_greedy_tokens_equal_transformers_with_a_cold_and_a_warm_cache(milestone, tiny, budget, num_blocks):
    llm = milestone.LLM(
        **tiny.ready, max_num_batched_tokens=budget, max_num_seqs=8, num_blocks=num_blocks, block_size=4
    )
    expected = [tiny.tokens(prompt, 12) for prompt in PROMPTS]
    cold = llm.generate(PROMPTS, greedy(12))
    warm = llm.generate(PROMPTS[::-1], greedy(12))[::-1]
    for outputs in (cold, warm):
        assert [output.outputs[0].token_ids for output in outputs] == expected
        if num_blocks == 22:
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if num_blocks == 200:
        assert [o.num_cached_tokens for o in warm] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    assert_idle(llm.engine)


@pytest.mark.parametrize("num_blocks", [200, 22])
def test_seeded_tokens_are_the_same_with_and_without_caching(milestone, tiny, num_blocks):
    params = [seeded(number, 12) for number in range(len(PROMPTS))]
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "block_size": 4}
    off = milestone.LLM(**tiny.ready, **options, num_blocks=200, enable_prefix_caching=False)
    on = milestone.LLM(**tiny.ready, **options, num_blocks=num_blocks)
    expected = [output.outputs[0].token_ids for output in off.generate(PROMPTS, params)]
    for _ in range(2):
        outputs = on.generate(PROMPTS, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.num_cached_tokens for output in outputs) > 0
    assert_idle(on.engine)


@pytest.mark.real_model
def test_cached_prefixes_and_choices_of_the_real_model_equal_transformers(milestone, real):
    llm = milestone.LLM(**real.ready, num_blocks=60)
    text = llm.tokenizer.encode("The history of computing begins long before the first machine was built. " * 4)
    prompts = [text[:33], text[:48], [*text[:32], *text[3:9]]]
    expected = [real.tokens(prompt, 12) for prompt in prompts]
    for num_cached in ([0, 0, 0], [32, 32, 32]):
        outputs = llm.generate(prompts, greedy(12, n=2))
        assert [output.num_cached_tokens for output in outputs] == num_cached
        for output, token_ids in zip(outputs, expected, strict=True):
            assert [choice.token_ids for choice in output.outputs] == [token_ids] * 2
    [together] = llm.generate([text[:37]], seeded(11, 8, n=3))
    alone = llm.generate([text[:37]] * 3, [seeded(11 + index, 8) for index in range(3)])
    assert [c.token_ids for c in together.outputs] == [output.outputs[0].token_ids for output in alone]
    assert_idle(llm.engine)
