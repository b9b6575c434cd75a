"""Speculative decoding gives the tokens of plain decoding: every drafter, any number of drafts, whatever happens."""

import functools
import math
import random

import pytest
import torch

from common.sampling_params import SamplingParams
from tests.contracts import interrupts
from tests.kit.drafters import SPECULATION, Counts, options, right, speculate, wrong
from tests.kit.models import Successor
from tests.kit.tokenizers import EOS, byte_tokenizer

SINCE = "v0_7"

METHODS = SPECULATION[:3]  # the model itself is a draft model that is right more often
# Two begin alike, for the prefix cache; one repeats itself, for n-grams.
HEAD = [(7 * i + i * i) % 256 for i in range(20)]
PROMPTS = [[1], [*HEAD, 5], [*HEAD, 6, 7, 8], [3, 1, 4, 1, 5, 9, 2, 6] * 4, list(range(60, 93)), [200, 100]]
FEW = dict.fromkeys((3, 5, 9, 250), 100.0)  # only these come, so that n-grams come again
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True, **params)
    for params in (
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "seed": 11, "n": 3},
        {"temperature": 1.0, "seed": 12, "logit_bias": FEW},
        {"temperature": 1.1, "seed": 13, "top_p": 0.8, "top_k": 40},
        {"temperature": 0.8, "logit_bias": FEW, "n": 2},  # the engine gives it a seed
    )
]
# Each is a way to be computed, and together all of them.
CIRCUMSTANCES = {
    "batched": {"num_blocks": 200, "enable_prefix_caching": False},
    "chunked": {"num_blocks": 200, "max_num_batched_tokens": 12},
    "cached": {"num_blocks": 200, "block_size": 4},
    "preempted": {"num_blocks": 40, "block_size": 4, "enable_prefix_caching": False},
    "all at once": {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 24},
}


def tokens_of(outputs):
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@functools.cache
def plain_tokens(milestone, tiny):
    """What `PROMPTS` are answered without any drafter."""
    llm = milestone.LLM(**tiny.ready, num_blocks=200)
    return tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def assert_idle(engine):
    engine.scheduler.check_integrity()
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    assert engine.output_processor.parents == engine.output_processor._children == {}


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True} | params)


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("method", METHODS)
def test_every_drafter_with_any_number_of_drafts_gives_plain_decodings_tokens(milestone, tiny, method, num_tokens):
    llm = milestone.LLM(**tiny.ready, num_blocks=200, **options(method, tiny, num_tokens))
    counts = Counts(llm.engine)
    assert tokens_of(llm.generate(PROMPTS[1:4], PARAMS[1:4], use_tqdm=False)) == plain_tokens(milestone, tiny)[1:4]
    assert 0 < counts.num_right < counts.num_drafts
    assert_idle(llm.engine)


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES)
@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_token_however_requests_are_computed(milestone, tiny, method, circumstances):
    llm = milestone.LLM(**tiny.ready, **CIRCUMSTANCES[circumstances], **options(method, tiny))
    counts = Counts(llm.engine)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert tokens_of(outputs) == plain_tokens(milestone, tiny)
    assert 0 < counts.num_right < counts.num_drafts
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert (num_preemptions > 0) == (CIRCUMSTANCES[circumstances]["num_blocks"] == 40)
    if circumstances == "cached":  # once more: now all blocks of the prompts are there, of a draft model's KV, too
        outputs = llm.generate(PROMPTS[:5], PARAMS[:5], use_tqdm=False)
        assert tokens_of(outputs) == plain_tokens(milestone, tiny)[:5]
        assert [output.num_cached_tokens for output in outputs] == [0, 20, 20, 28, 32]
    assert_idle(llm.engine)


@pytest.mark.parametrize("num_tokens", range(1, 6))
def test_spd_4_early_exit_after_layer_1_gives_64_greedy_tokens_of_transformers(milestone, tiny, num_tokens):
    llm = milestone.LLM(**tiny.ready, num_blocks=40, **options("early_exit", tiny, num_tokens))
    for prompt in ([1, 2, 3], HEAD):
        assert tokens_of(llm.generate([prompt], greedy(64), use_tqdm=False)) == [[tiny.tokens(prompt, 64)]]


@pytest.mark.parametrize("method", SPECULATION)
def test_each_request_alone_gives_the_tokens_that_it_gives_among_others(milestone, tiny, method):
    llm = milestone.LLM(**tiny.ready, num_blocks=200, **options(method, tiny))
    for prompt, params, expected in zip(PROMPTS[:5], PARAMS[:5], plain_tokens(milestone, tiny), strict=False):
        assert tokens_of(llm.generate([prompt], params, use_tqdm=False)) == [expected]


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_the_model_itself_as_draft_model_is_always_right_where_the_answer_is_greedy(milestone, tiny, num_tokens):
    llm = milestone.LLM(**tiny.ready, num_blocks=200, block_size=4, **options("itself", tiny, num_tokens))
    counts = Counts(llm.engine)
    for _ in range(2):  # the second time with blocks from the prefix cache, which the draft model has filled, too
        [output] = llm.generate([HEAD], greedy(21), use_tqdm=False)
        assert output.outputs[0].token_ids == tiny.tokens(HEAD, 21)
    assert output.num_cached_tokens == 16
    # One token comes from the prompt, then one more than are drafted in each step.
    num_steps = -(-20 // (num_tokens + 1))
    num_right = 20 - num_steps
    assert (counts.num_steps, counts.num_drafts, counts.num_right) == (2 + 2 * num_steps, 2 * num_right, 2 * num_right)


def test_what_a_former_owner_left_in_blocks_that_drafts_have_yet_to_fill_reaches_no_draft(milestone, tiny):
    llm = milestone.LLM(**tiny.ready, num_blocks=200, block_size=2, **options("itself", tiny, 7))
    for pool in (llm.engine.model_runner.kv_cache, llm.engine.model_runner.drafter.kv_cache):
        pool.kv.fill_(torch.nan)
    counts = Counts(llm.engine)
    prompts = [HEAD, HEAD[:5], HEAD[:7][::-1]]
    outputs = llm.generate(prompts, greedy(21), use_tqdm=False)
    assert tokens_of(outputs) == [[tiny.tokens(prompt, 21)] for prompt in prompts]
    assert counts.num_right == counts.num_drafts > 40


def test_each_choice_has_its_own_copy_of_the_draft_models_last_block(milestone, tiny):
    """The prompt's last block is not full: two of three choices write into copies of it, in both models' pools."""
    llm = milestone.LLM(**tiny.ready, num_blocks=200, block_size=4, **options("itself", tiny, 3))
    counts = Counts(llm.engine)
    [output] = llm.generate([HEAD[:11]], greedy(13, n=3), use_tqdm=False)
    assert tokens_of([output]) == [[tiny.tokens(HEAD[:11], 13)] * 3]
    assert (counts.num_steps, counts.num_drafts, counts.num_right) == (4, 27, 27)


def test_a_preempted_request_finds_the_draft_models_kv_again(milestone, tiny):
    """If it were not computed again with the target's, or for other places, its guesses would be wrong afterwards."""
    flags = {"num_blocks": 10, "block_size": 4, "enable_prefix_caching": False, "max_num_batched_tokens": 8}
    llm = milestone.LLM(**tiny.ready, **flags, **options("itself", tiny, 2))
    counts = Counts(llm.engine)
    outputs = llm.generate([[1, 2, 3, 4, 5], [9, 8, 7]], greedy(20), use_tqdm=False)
    assert tokens_of(outputs) == [[tiny.tokens([1, 2, 3, 4, 5], 20)], [tiny.tokens([9, 8, 7], 20)]]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert counts.num_right == counts.num_drafts > 10


# What belongs to a row: its history.

ROWS = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 1.5, "logit_bias": FEW},
    "bias": {"logit_bias": {7: 4.0, 9: -100.0, 250: 5.5}},
    "min_tokens": {"min_tokens": 7, "logit_bias": {EOS: 30.0}, "ignore_eos": False},
    "seeded": {"temperature": 0.9, "seed": 3, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("name", ROWS)
def test_each_row_has_its_own_history_and_log_probabilities(milestone, tiny, name, every):
    """Drafts are right but for each `every`-th one: `every` 1 has only wrong ones."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "logprobs": 3} | ROWS[name])
    llm = milestone.LLM(**tiny.ready, num_blocks=40)
    [plain] = llm.generate([HEAD], params, use_tqdm=False)
    [without] = llm.generate([HEAD], greedy(20), use_tqdm=False)
    assert plain.outputs[0].token_ids != without.outputs[0].token_ids
    answers = {tuple(HEAD): plain.outputs[0].token_ids}
    good, bad = right(answers), wrong(answers)
    speculate(llm.engine, lambda request, i: (bad if i % every == 0 else good)(request, i), 5)
    [output] = llm.generate([HEAD], params, use_tqdm=False)
    assert_same_choice(output.outputs[0], plain.outputs[0])
    if name == "min_tokens":
        assert (len(plain.outputs[0].token_ids), plain.outputs[0].token_ids[-1]) == (8, EOS)


def assert_same_choice(choice, expected):
    assert (choice.text, choice.token_ids) == (expected.text, expected.token_ids)
    assert (choice.finish_reason, choice.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert choice.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
    assert len(choice.logprobs) == len(expected.logprobs) == len(choice.token_ids)
    for entry, expected_entry in zip(choice.logprobs, expected.logprobs, strict=True):
        assert list(entry) == list(expected_entry)
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected_entry[token_id].logprob, abs=1e-4)
            assert logprob.rank == expected_entry[token_id].rank
            assert logprob.decoded_token == expected_entry[token_id].decoded_token


@pytest.mark.parametrize("method", SPECULATION)
def test_prompts_are_scored_as_without_drafts(milestone, tiny, method):
    params = [greedy(9, prompt_logprobs=2), greedy(9), greedy(9, prompt_logprobs=0, n=2)]
    prompts = [PROMPTS[2], PROMPTS[3], PROMPTS[4]]
    flags = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 16}
    plain = milestone.LLM(**tiny.ready, num_blocks=200).generate(prompts, params, use_tqdm=False)
    outputs = milestone.LLM(**tiny.ready, **flags, **options(method, tiny)).generate(prompts, params, use_tqdm=False)
    assert tokens_of(outputs) == tokens_of(plain)
    assert outputs[1].prompt_logprobs is None
    for output, expected in zip(outputs, plain, strict=True):
        for entry, expected_entry in zip(output.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True):
            assert (entry is None) == (expected_entry is None)
            for token_id, logprob in (entry or {}).items():
                assert logprob.logprob == pytest.approx(expected_entry[token_id].logprob, abs=1e-4)


# The distribution.

TOKENS = (3, 5, 9, 250)  # of `FEW`, which leaves their odds as they are


def joint_distribution(tiny, prompt, top_p):
    """`{(token, token, token): probability}` of the first three output tokens, by transformers, of these four alone."""

    def odds(context):
        with torch.inference_mode():
            logits = tiny.hf(torch.tensor([[*prompt, *context]])).logits[0, -1, list(TOKENS)].double()
        probs = sorted(zip(logits.softmax(dim=-1).tolist(), TOKENS, strict=True), reverse=True)
        kept, mass = [], 0.0
        for prob, token_id in probs:
            if mass < top_p:
                kept.append((token_id, prob))
            mass += prob
        total = sum(prob for _, prob in kept)
        return [(token_id, prob / total) for token_id, prob in kept]

    joint = {(): 1.0}
    for _ in range(3):
        joint = {(*context, t): p * prob for context, p in joint.items() for t, prob in odds(context)}
    return joint


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("method", ["early_exit", "always the likeliest"])
def test_over_many_seeds_the_tokens_are_distributed_as_the_model_says(milestone, tiny, method, top_p):
    """Pearson's chi-square test of three tokens at once, two of them drafted, against the exact distribution."""
    prompt, num = [10, 20, 30], 1024
    joint = joint_distribution(tiny, prompt, top_p)
    plain = milestone.LLM(**tiny.ready, num_blocks=300, max_num_batched_tokens=2048)
    if method == "always the likeliest":  # and so right much more often than a coin
        llm = milestone.LLM(**tiny.ready, num_blocks=300, max_num_batched_tokens=2048)
        likeliest = [max(joint, key=lambda tokens: joint[tokens])[i] for i in range(3)]
        speculate(llm.engine, lambda request, index: likeliest[index], 2)
    else:
        flags = options(method, tiny, 2)
        llm = milestone.LLM(**tiny.ready, num_blocks=300, max_num_batched_tokens=2048, **flags)
    counts = Counts(llm.engine)
    drawn = []
    params = {"temperature": 1.0, "top_p": top_p, "logit_bias": FEW, "max_tokens": 4, "ignore_eos": True}
    for start in range(0, num, 128):
        seeded = SamplingParams(n=128, seed=start, **params)
        [output] = llm.generate([prompt], seeded, use_tqdm=False)
        drawn += [tuple(choice.token_ids[:3]) for choice in output.outputs]
        if start == 0:  # and each seed has plain decoding's
            assert tokens_of([output]) == tokens_of(plain.generate([prompt], seeded, use_tqdm=False))
    assert counts.num_drafts > num
    if method == "always the likeliest":
        assert counts.num_right > num / 8
    # Tokens that are rarely expected are counted together: the test wants about five of each kind.
    expected = {tokens: num * prob for tokens, prob in joint.items()}
    rare = [tokens for tokens, count in expected.items() if count < 5]
    kinds = [([tokens], count) for tokens, count in expected.items() if count >= 5]
    if rare:
        kinds.append((rare, sum(expected[tokens] for tokens in rare)))
    assert set(drawn) <= set(joint)
    statistic = sum((sum(drawn.count(t) for t in tokens) - count) ** 2 / count for tokens, count in kinds)
    freedom = len(kinds) - 1
    assert freedom >= 3
    # The 99.9th percentile (Wilson and Hilferty, 1931).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


# What goes wrong on the way.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", ["forward", "draft", "sample"])
def test_a_step_with_drafts_that_fails_is_computed_again_and_loses_no_token(milestone, tiny, method, part, monkeypatch):
    llm = milestone.LLM(**tiny.ready, num_blocks=200, block_size=4, **options(method, tiny))
    engine, random_step, failures, failed = llm.engine, random.Random(5), [], []
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    owner, name = {
        "forward": (engine.model_runner.kv_cache, "begin_step"),
        "draft": (engine.model_runner.drafter, "draft"),
        "sample": (engine.model_runner, "_sample"),
    }[part]
    computed = getattr(owner, name)

    def sometimes(*args):
        result = computed(*args)
        # Only where more than one request is computed, so that a step fails but none of its parts.
        many = len(args[0].requests if part == "draft" else args[0]) > 5
        if many and random_step.random() < 0.3:
            failures.append(part)
            raise RuntimeError("the step failed")
        return result

    monkeypatch.setattr(owner, name, sometimes)
    assert tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain_tokens(milestone, tiny)
    assert len(failures) > 1
    assert failed == []
    assert_idle(engine)


def test_of_a_step_with_drafts_only_the_request_that_fails_ends(milestone):
    def run(poison):
        model = Successor(poison=poison)
        engine = milestone.LLMEngine(model, tokenizer=byte_tokenizer(), num_blocks=100, block_size=4)
        drafter = speculate(engine, lambda request, index: request.sampling.prompt_token_ids[-1] + 1 + index, 3)
        failed, texts = [], {}
        engine.on_failure = lambda request_id, error: failed.append(request_id)
        for prompt in ("a", "n"):
            engine.add_request(prompt, prompt, greedy(10))
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[output.request_id] = texts.get(output.request_id, "") + output.outputs[0].text
        assert_idle(engine)
        return texts, failed, max(sum(step.values()) for step in drafter.log)

    assert run(None) == ({"a": "bcdefghijk", "n": "opqrstuvwx"}, [], 6)
    # `t` is first read as a draft: of the step that has it, `n` has nothing, and `a` its whole part.
    assert run("t") == ({"a": "bcdefghijk", "n": "opqrs"}, ["n"], 6)


TEXTS = ["cdefgh", "qrst", "qrst", "cdefg", "uvw"]


def generate_repeats(llm):
    """Prompts that have their answers' beginnings in them, so that n-grams are found: right first, then wrong."""
    params = [greedy(6), greedy(4, n=2), greedy(9, stop="hi"), greedy(3, logprobs=1)]
    return [
        choice.text
        for output in llm.generate(["abcdeab", "opqrsp", "bcdefgxb", "stust"], params, use_tqdm=False)
        for choice in output.outputs
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "contract",
    [
        interrupts.test_unt_11_after_an_interrupt_at_any_line_of_generate_the_engine_is_as_before,
        interrupts.test_unt_11_an_interrupt_at_any_line_loses_no_other_stream_a_token,
    ],
    ids=["generate", "another stream"],
)
def test_unt_11_an_interrupt_at_any_line_of_a_step_with_drafts_leaves_the_engine_as_before(
    milestone, monkeypatch, contract
):
    num_right = [0]

    def new_llm(milestone):
        flags = {"num_blocks": 18, "block_size": 2, "speculative_method": "ngram", "ngram_min": 1}
        llm = milestone.LLM(Successor(), tokenizer=byte_tokenizer(), **flags)

        def on_step(scheduled):
            num_right[0] += sum(scheduled.num_accepted_tokens.values())

        llm.engine.on_step = on_step
        return llm

    monkeypatch.setattr(interrupts, "new_llm", new_llm)
    monkeypatch.setattr(interrupts, "generate", generate_repeats)
    monkeypatch.setattr(interrupts, "TEXTS", TEXTS)
    assert generate_repeats(new_llm(milestone)) == TEXTS
    assert num_right[0] > 0
    contract(milestone)
