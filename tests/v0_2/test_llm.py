"""What v0.2's own engine does with its pool: streams that share it, and the bytes it reports."""

from collections import deque

import pytest

from common.errors import RequestError
from common.sampling_params import SamplingParams
from tests.kit.models import SCRIPT_CONFIG, ScriptModel
from tests.kit.tokenizers import byte_tokenizer
from v0_2_block_manager import LLM


def llm(**options):
    return LLM(ScriptModel([65] * 50, prompt_len=4), tokenizer=byte_tokenizer(), block_size=4, **options)


def greedy(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_a_stream_without_a_free_block_is_refused_and_the_other_goes_on():
    engine = llm(num_blocks=4)
    first = engine.stream("aaaa", greedy(12))
    for _ in range(10):
        next(first)
    assert engine.block_manager.num_free_blocks == 0
    with pytest.raises(RequestError, match="no free block left: other streams are still open"):
        next(engine.stream("bbbb", greedy(2)))
    assert sum(len(output.outputs[0].token_ids) for output in first) == 2
    assert engine.block_manager.num_free_blocks == 4
    assert engine.generate("bbbb", greedy(2))[0].outputs[0].text == "AA"


def test_a_stream_that_finds_no_block_in_its_middle_gives_its_own_back():
    engine = llm(num_blocks=4)
    first, second = engine.stream("aaaa", greedy(9)), engine.stream("bbbb", greedy(9))
    turns = [first, second] * 9
    with pytest.raises(RequestError, match="no free block left"):
        deque(map(next, turns))
    engine.block_manager.check_integrity()
    for stream in (first, second):
        list(stream)
    assert engine.block_manager.num_free_blocks == 4


@pytest.mark.parametrize(("prompt_len", "num_tokens", "num_blocks"), [(4, 1, 1), (4, 2, 2), (4, 5, 2), (4, 6, 3)])
def test_bytes_reserved_are_whole_blocks_and_bytes_used_the_tokens_with_kv(prompt_len, num_tokens, num_blocks):
    per_token = SCRIPT_CONFIG.kv_elements_per_token * 4
    [output] = llm(num_blocks=10).generate("a" * prompt_len, greedy(num_tokens))
    assert output.metrics.kv_reserved_bytes == num_blocks * 4 * per_token
    assert output.metrics.kv_used_bytes == (prompt_len + num_tokens - 1) * per_token
