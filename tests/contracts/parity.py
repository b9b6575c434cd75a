"""Greedy tokens are those of transformers, in every milestone."""

import pytest

from common.sampling_params import SamplingParams

SINCE = "v0_1"

GREEDY_16 = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
# Around the sizes of later blocks, where an off-by-one would show.
LENGTHS = [1, 2, 5, 15, 16, 17, 31, 32, 33, 100]


def prompt_of(length: int) -> list[int]:
    return [(7 * length + 31 * i + i * i) % 256 for i in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_equal_transformers_on_tiny(load, tiny, length):
    [output] = load(tiny).generate([prompt_of(length)], GREEDY_16)
    assert output.outputs[0].token_ids == tiny.tokens(prompt_of(length), 16)
    assert output.prompt_token_ids == prompt_of(length)


def test_sch_10_prompts_of_mixed_lengths_together_equal_each_alone(load, tiny):
    prompts = [prompt_of(length) for length in (1, 5, 6, 4, 17)]
    outputs = load(tiny).generate(prompts, GREEDY_16)
    assert [output.outputs[0].token_ids for output in outputs] == [tiny.tokens(prompt, 16) for prompt in prompts]


def test_a_request_fills_the_context_to_its_last_token_and_equals_transformers(milestone, tiny):
    llm = milestone.LLM(tiny.folder, max_model_len=48)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    [output] = llm.generate([prompt_of(17)], params)
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].token_ids == tiny.tokens(prompt_of(17), 48 - 17)


def test_a_single_token_is_generated_from_the_longest_prompt(milestone, tiny):
    llm = milestone.LLM(tiny.folder, max_model_len=48)
    [output] = llm.generate([prompt_of(47)], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    assert output.outputs[0].token_ids == tiny.tokens(prompt_of(47), 1)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "question",
    ["Why is the sky blue?", "Write a Python function that adds two numbers.", "Count from 1 to 20. 中文 🙂"],
)
def test_64_greedy_tokens_of_the_real_model_equal_transformers(load, real, question):
    llm = load(real)
    prompt = llm.tokenizer.chat_token_ids([{"role": "user", "content": question}])
    [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    assert output.outputs[0].token_ids == real.tokens(prompt, 64)
