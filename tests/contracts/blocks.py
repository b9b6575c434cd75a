"""Blocks: they change nothing in the tokens, are taken one at a time, and all come back."""

import pytest

from common.errors import ModelError, RequestError
from common.sampling_params import SamplingParams
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import EOS, byte_tokenizer

SINCE = "v0_2"


def block_manager(llm):
    """Where the milestone keeps it: with the engine, once there is one."""
    return llm.engine.scheduler.block_manager if hasattr(llm, "engine") else llm.block_manager


def assert_all_free(llm):
    manager = block_manager(llm)
    manager.check_integrity()
    assert manager.num_free_blocks == manager.num_blocks


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True} | params)


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
@pytest.mark.parametrize("length", [1, 7, 8, 15, 16, 17, 31, 32, 33])
def test_greedy_tokens_equal_transformers_for_any_block_size(milestone, tiny, block_size, length):
    llm = milestone.LLM(tiny.folder, block_size=block_size, num_blocks=64)
    prompt = [(11 * i + length) % 256 for i in range(length)]
    [output] = llm.generate([prompt], greedy(36))
    assert output.outputs[0].token_ids == tiny.tokens(prompt, 36)
    assert_all_free(llm)


def test_requests_on_blocks_that_others_have_used_equal_transformers(milestone, tiny):
    llm = milestone.LLM(tiny.folder, block_size=8, num_blocks=9)  # so few that every block is used again
    for length in (20, 3, 41, 8, 30):
        prompt = [(5 * i + length) % 256 for i in range(length)]
        [output] = llm.generate([prompt], greedy(30))
        assert output.outputs[0].token_ids == tiny.tokens(prompt, 30)
        assert_all_free(llm)


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_blk_1_a_block_is_taken_neither_early_nor_late(milestone, tiny, prompt_len, num_tokens):
    llm = milestone.LLM(tiny.folder, block_size=4, num_blocks=20)
    prompt = list(range(10, 10 + prompt_len))
    manager, used = block_manager(llm), []
    free = manager.free

    def free_and_count(request_id):
        used.append(20 - manager.num_free_blocks)  # an engine that frees within the step of the last token
        free(request_id)

    manager.free = free_and_count
    for output in llm.stream(prompt, greedy(num_tokens)):
        if not output.finished:
            used.append(20 - manager.num_free_blocks)
    # Seen right after a step: the token just sampled has no KV yet, and the last one never will.
    assert used == [-(-end // 4) for end in range(prompt_len, prompt_len + num_tokens)]
    assert_all_free(llm)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"max_tokens": 20, "ignore_eos": False}, "stop"),
        ({"max_tokens": 5}, "length"),
        ({"max_tokens": 20, "stop": "CD"}, "stop"),
        ({"max_tokens": 20, "stop_token_ids": [66]}, "stop"),
        ({"max_tokens": 3, "n": 3}, "length"),
    ],
)
def test_blk_2_all_blocks_come_back_whatever_ends_a_request(script_llm, params, reason):
    llm = script_llm([65, 66, 67, 68, 69, 70, EOS], num_blocks=10, block_size=4)
    [output] = llm.generate(["Hi"], greedy(**params))
    assert output.outputs[0].finish_reason == reason
    assert_all_free(llm)


def test_blk_2_all_blocks_come_back_from_a_stream_that_is_left(script_llm):
    llm = script_llm([65] * 20, num_blocks=10, block_size=4)
    stream = llm.stream("Hi", greedy(20))
    for _ in range(9):
        next(stream)
    assert block_manager(llm).num_free_blocks < 10
    stream.close()
    assert_all_free(llm)


def test_blk_2_all_blocks_come_back_when_the_model_fails(milestone):
    class Failing(ScriptModel):
        def logits(self, hidden):
            if self.num_forwards == 3:
                raise RuntimeError("the model failed")
            return super().logits(hidden)

    llm = milestone.LLM(Failing([65] * 20, prompt_len=2), tokenizer=byte_tokenizer(), num_blocks=10, block_size=4)
    with pytest.raises(RuntimeError, match="the model failed"):
        llm.generate(["Hi"], greedy(20))
    assert_all_free(llm)


def test_sch_2_a_request_that_the_whole_pool_cannot_hold_is_refused_with_both_numbers(script_llm):
    llm = script_llm([65] * 20, num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(RequestError, match=r"needs KV for 23 tokens \(14 .* and 10 .*holds 16") as error:
        llm.generate([[65] * 14], greedy(10))
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="needs KV for 20 tokens"):
        llm.generate([[65] * 20], greedy(1))
    assert_all_free(llm)


def test_the_last_token_of_a_request_needs_no_slot(script_llm):
    # 14 + 3 - 1 = 16 tokens with KV: the pool to the last slot.
    llm = script_llm([65] * 20, prompt=[65] * 14, num_blocks=4, block_size=4, max_model_len=64)
    [output] = llm.generate([[65] * 14], greedy(3))
    assert len(output.outputs[0].token_ids) == 3
    # Without max_tokens a request goes on until the pool is full, and ends by its length.
    [output] = llm.generate([[65] * 14], greedy(None))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (3, "length")
    assert_all_free(llm)


def test_max_model_len_unset_is_what_the_pool_holds(milestone, tiny):
    assert milestone.LLM(tiny.folder, num_blocks=4, block_size=16).max_model_len == 64
    assert milestone.LLM(tiny.folder, num_blocks=400, block_size=16).max_model_len == 512  # the model's own


def test_max_model_len_within_the_pool_is_no_warning(milestone, tiny, caplog):
    milestone.LLM(tiny.folder, num_blocks=4, block_size=16, max_model_len=64)
    assert caplog.text == ""


def test_min_tokens_beyond_the_pool_is_refused(script_llm):
    llm = script_llm([65] * 20, num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(RequestError, match="needs KV for 53 tokens"):
        llm.generate([[65] * 14], greedy(None, min_tokens=40))


def test_max_model_len_above_the_pool_is_a_warning(milestone, tiny, caplog):
    llm = milestone.LLM(tiny.folder, num_blocks=4, block_size=16, max_model_len=100)
    assert llm.max_model_len == 100
    assert "max_model_len is 100, but the KV pool holds 64 tokens" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"num_blocks": 4, "kv_cache_memory": "1GiB"}, "give one of them"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory must be an amount such as 1GiB"),
        ({"kv_cache_memory": "1KiB"}, "less than one block"),
        ({"kv_cache_memory": "999999999999GiB"}, "within what a computer can address"),
        ({"kv_cache_memory": "9" * 400}, "within what a computer can address"),
        ({"kv_cache_memory": "100000TiB"}, "The KV pool needs .* more than there is"),
        ({"num_blocks": 10**13}, "The KV pool needs .* more than there is"),
        ({"num_blocks": "4"}, "num_blocks must be at least 1, got '4'"),
        ({"num_blocks": 2.0}, "num_blocks must be at least 1"),
        ({"block_size": True}, "block_size must be at least 1"),
        ({"gpu_memory_utilization": 7}, "gpu_memory_utilization must be above 0"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(milestone, tiny, arguments, message):
    with pytest.raises(ModelError, match=message):
        milestone.LLM(tiny.folder, **arguments)


@pytest.mark.real_model
def test_real_tokens_equal_transformers_across_the_boundaries_of_blocks(load, real):
    llm = load(real)
    text = llm.tokenizer.encode("The history of computing begins long before the first machine was built. " * 4)
    prompts = [text[:length] for length in (15, 16, 17, 31, 32, 33)]
    outputs = llm.generate(prompts, greedy(20))
    assert [output.outputs[0].token_ids for output in outputs] == [real.tokens(prompt, 20) for prompt in prompts]
    assert_all_free(llm)
