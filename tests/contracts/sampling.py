"""Sampling is repeatable, and a request's tokens hang on its own seed alone."""

import math

import pytest
import torch

from common.sampling_params import SamplingParams

SINCE = "v0_1"
PROMPT = [10, 20, 30, 40]


def sampled(llm, prompts=(PROMPT,), **params):
    """The token ids of every choice of every prompt."""
    params = SamplingParams(**{"temperature": 0.9, "max_tokens": 12, "ignore_eos": True} | params)
    outputs = llm.generate(list(prompts), params)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_smp_5_a_seeded_request_gives_the_same_tokens_alone_and_among_others(load, tiny):
    llm = load(tiny)
    alone = sampled(llm, seed=42, temperature=0.8)[0]
    assert sampled(llm, seed=42, temperature=0.8)[0] == alone
    seeded = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=42)
    unseeded = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)
    params = [unseeded, unseeded, seeded, unseeded, seeded]
    outputs = llm.generate([[5], [6, 7], PROMPT, [8] * 20, PROMPT], params)
    assert [outputs[i].outputs[0].token_ids for i in (2, 4)] == [alone[0], alone[0]]


def test_different_seeds_and_unseeded_requests_give_different_tokens(load, tiny):
    llm = load(tiny)
    seeded = [tuple(sampled(llm, seed=seed)[0][0]) for seed in range(8)]
    assert len(set(seeded)) == 8
    assert len({tuple(sampled(llm)[0][0]) for _ in range(8)}) == 8


def test_an_engine_of_the_same_seed_repeats_unseeded_requests(milestone, tiny):
    first, second, other = (sampled(milestone.LLM(tiny.folder, seed=seed)) for seed in (3, 3, 4))
    assert first == second != other


def test_choice_i_of_n_is_the_request_with_seed_plus_i(load, tiny):
    llm = load(tiny)
    assert sampled(llm, seed=100, n=3)[0] == [sampled(llm, seed=100 + i)[0][0] for i in range(3)]


def test_api_7_choices_keep_their_indices_and_each_its_own_end(load, tiny):
    llm = load(tiny)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=5, ignore_eos=True, seed=1)
    [output] = llm.generate([PROMPT], params)
    assert [(choice.index, choice.finish_reason) for choice in output.outputs] == [(i, "length") for i in range(3)]
    assert len(output.prompt_token_ids) == 4
    streamed = {0: [], 1: [], 2: []}
    finished = []
    for output_delta in llm.stream(PROMPT, params):
        finished.append(output_delta.finished)
        for delta in output_delta.outputs:
            streamed[delta.index] += delta.token_ids
    assert [streamed[i] for i in range(3)] == [choice.token_ids for choice in output.outputs]
    assert finished == [False] * (len(finished) - 1) + [True]


def test_n_greedy_choices_are_identical(load, tiny):
    choices = sampled(load(tiny), temperature=0.0, n=2)[0]
    assert choices[0] == choices[1] == tiny.tokens(PROMPT, 12)


def test_smp_1_temperature_0_and_top_k_1_are_greedy_whatever_the_filters_say(load, tiny):
    llm = load(tiny)
    for params in ({"temperature": 0.0, "top_p": 0.1, "min_p": 0.9}, {"top_k": 1}, {"temperature": 1e-12}):
        assert sampled(llm, **params)[0][0] == tiny.tokens(PROMPT, 12)


def test_logprobs_are_the_log_softmax_of_the_models_own_logits(load, tiny):
    llm = load(tiny)
    params = SamplingParams(temperature=0.7, max_tokens=4, ignore_eos=True, seed=5, logprobs=3, presence_penalty=1.0)
    [output] = llm.generate([PROMPT], params)
    choice = output.outputs[0]
    with torch.inference_mode():
        logits = tiny.hf(torch.tensor([PROMPT + choice.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    # The rows past the tokenizer's last token belong to none, and are no part of the distribution.
    expected = logits[:, : llm.tokenizer.vocab_size].log_softmax(dim=-1)
    assert len(choice.logprobs) == 4
    for step, (token_id, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
        assert next(iter(entry)) == token_id
        assert {*expected[step].topk(3).indices.tolist(), token_id} == set(entry)
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[step, candidate]), abs=1e-4)
            assert logprob.rank == int((expected[step] > expected[step, candidate]).sum()) + 1
            assert logprob.decoded_token == llm.tokenizer.token_text(candidate)
    chosen = [entry[token_id].logprob for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(math.fsum(chosen))


def test_logit_bias_and_penalties_reach_the_sampler(load, tiny):
    llm = load(tiny)
    assert sampled(llm, temperature=0.0, logit_bias={77: 100.0})[0][0] == [77] * 12
    plain = sampled(llm, temperature=0.0, max_tokens=40)[0][0]
    penalised = sampled(llm, temperature=0.0, max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0)[0][0]
    assert len(set(penalised)) > len(set(plain))
