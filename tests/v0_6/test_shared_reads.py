"""Decodes that begin with the same blocks read them once; what comes out is as if each had read its own."""

import pytest
import torch

from common.attention import sdpa
from tests.kit.models import SCRIPT_CONFIG
from v0_6_prefix_cache import LLM, SamplingParams, kv_cache
from v0_6_prefix_cache.kv_cache import KVCache, _num_shared

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 16


@pytest.fixture(autouse=True)
def any_saving_will_do(monkeypatch):
    monkeypatch.setattr(kv_cache, "LEAST_SAVED", 1)


def cache():
    fields = {name: getattr(SCRIPT_CONFIG, name) for name in SCRIPT_CONFIG.__slots__}
    config = type(SCRIPT_CONFIG)(**fields | {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM})
    return KVCache(config, 64, BLOCK, torch.device("cpu"), torch.float32, sdpa)


def test_the_outputs_are_those_of_separate_reads_and_the_own_blocks_alone_are_gathered(monkeypatch):
    torch.manual_seed(0)
    pool = cache()
    pool.kv.normal_()
    tables, lens = [[7, 3, 9, 1], [7, 3, 2], [7, 3, 5, 4]], [14, 10, 13]
    order = sorted(range(3), key=lambda i: len(tables[i]))
    tables, lens = [tables[i] for i in order], [lens[i] for i in order]
    q, k, v = torch.randn(3, HEADS, DIM), torch.randn(3, KV_HEADS, DIM), torch.randn(3, KV_HEADS, DIM)
    outputs = []
    for least in (1, 1000):
        monkeypatch.setattr(kv_cache, "LEAST_SAVED", least)
        before = pool.kv.clone()
        pool.begin_step(tables, [1, 1, 1], lens)
        outputs.append(pool.attend(0, q, k, v))
        assert [prefix.tolist() for prefix in pool.prefixes] == [[7, 3] if least == 1 else []]
        assert [tuple(own.shape) for _, own, _ in pool.decode_batches] == [(3, 2) if least == 1 else (3, 4)]
        pool.kv.copy_(before)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("tables", "num_shared"),
    [
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[1, 2, 3], [1, 2]], 1),  # the last block of a request is the one that it writes
        ([[1, 2, 3], [4, 2, 3]], 0),
        ([[1, 2, 3]], 0),  # alone there is nothing to save
        ([[1], [2]], 0),
    ],
)
def test_shared_blocks_are_those_that_all_begin_with_before_their_last(tables, num_shared):
    assert _num_shared(tables) == num_shared


def test_a_prefix_of_few_blocks_is_read_by_each_as_before(monkeypatch):
    monkeypatch.setattr(kv_cache, "LEAST_SAVED", 64)
    prefix = list(range(32))
    assert _num_shared([[*prefix, 40], [*prefix, 41]]) == 0
    assert _num_shared([[*prefix, 40], [*prefix, 41], [*prefix, 42]]) == 32


def test_the_tokens_are_those_of_the_reference_for_requests_behind_one_prefix_and_for_choices(tiny, monkeypatch):
    prefix = [(7 * i) % 60 + 5 for i in range(40)]
    prompts = [[*prefix, 20 + i, 30 + 2 * i] for i in range(4)]
    llm = LLM(tiny.folder, num_blocks=128)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    llm.generate(prompts[:1], params, use_tqdm=False)  # which leaves the prefix in the cache
    reads = []
    real = kv_cache.decode_behind_prefix
    monkeypatch.setattr(kv_cache, "decode_behind_prefix", lambda *args: reads.append(len(args[0])) or real(*args))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [tiny.tokens(prompt, 24) for prompt in prompts]
    assert set(reads) == {4}
    sampled = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=24, ignore_eos=True)
    together = llm.generate([prompts[0]], sampled, use_tqdm=False)[0].outputs
    monkeypatch.setattr(kv_cache, "LEAST_SAVED", 1000)
    apart = llm.generate([prompts[0]], sampled, use_tqdm=False)[0].outputs
    assert [choice.token_ids for choice in together] == [choice.token_ids for choice in apart]
