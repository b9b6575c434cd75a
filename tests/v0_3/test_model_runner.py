"""A step computed without an engine: the scheduler decides, the runner computes, and the test takes the tokens in."""

import pytest

from common.sampling_params import SamplingParams
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import byte_tokenizer
from v0_3_scheduler import LLMEngine

PROMPTS = [[(7 * length + 31 * i + i * i) % 256 for i in range(length)] for length in (3, 17, 8)]


def drive(engine, prompts, num_tokens):
    """Step by hand until every prompt has so many tokens; the tokens, and how many requests each step gave one to."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    requests, nums_sampled = list(engine.scheduler.waiting), []
    while engine.scheduler.has_unfinished_requests():
        scheduled = engine.scheduler.schedule()
        sampled = engine.model_runner.run(scheduled)
        nums_sampled.append(len(sampled))
        engine.scheduler.update(scheduled, {request_id: token_id for request_id, (token_id, _) in sampled.items()})
    return [request.sampling.output_token_ids for request in requests], nums_sampled


@pytest.mark.parametrize("budget", [64, 8])
def test_prompts_in_one_pass_or_in_chunks_give_the_tokens_that_transformers_gives(tiny, budget):
    engine = LLMEngine(**tiny.ready, num_blocks=50, block_size=4, max_num_batched_tokens=budget)
    token_ids, _ = drive(engine, PROMPTS, 6)
    assert token_ids == [tiny.tokens(prompt, 6) for prompt in PROMPTS]


def test_a_prompt_that_is_not_complete_gets_no_token():
    engine = LLMEngine(
        ScriptModel([65], 10), tokenizer=byte_tokenizer(), num_blocks=50, block_size=4, max_num_batched_tokens=4
    )
    _, nums_sampled = drive(engine, [[1] * 10], 2)
    assert nums_sampled == [0, 0, 1, 1]


def test_all_tokens_of_a_step_are_computed_in_one_pass_and_no_step_is_none():
    model = ScriptModel([65], 3)
    engine = LLMEngine(model, tokenizer=byte_tokenizer(), num_blocks=50, block_size=4)
    assert engine.model_runner.run(engine.scheduler.schedule()) == {}
    assert model.num_forwards == 0
    _, nums_sampled = drive(engine, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 4)
    assert (nums_sampled, model.num_forwards) == ([3, 3, 3, 3], 4)
