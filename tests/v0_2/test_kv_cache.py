"""The pool: tokens go to their slots and to no others, and a scattered table reads like a contiguous cache."""

import pytest
import torch

from common.attention import sdpa
from tests.kit.models import SCRIPT_CONFIG
from v0_2_block_manager.kv_cache import KVCache


def pool(num_blocks=6, block_size=4):
    cache = KVCache(SCRIPT_CONFIG, num_blocks, block_size, torch.device("cpu"), torch.float32, sdpa)
    cache.kv.fill_(torch.nan)  # what is read without having been written shows
    return cache


def test_slots_are_block_times_size_plus_offset():
    cache = pool()
    cache.begin_step([5, 0, 2], query_len=7, context_len=10)
    assert cache.slot_mapping.tolist() == [23, 0, 1, 2, 3, 8, 9]
    cache.begin_step([5, 0, 2], query_len=1, context_len=11)
    assert cache.slot_mapping.tolist() == [10]


@pytest.mark.parametrize("table", [[0, 1, 2], [5, 0, 2], [3, 2, 1], [3, 4, 0]])
def test_attention_over_any_table_in_any_steps_equals_attention_at_once(table):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 11, 1, 8)
    expected = sdpa(q, k, v, [11], [11])
    cache, start = pool(), 0
    for query_len in (5, 3, 1, 1, 1):  # within a block, across a boundary, up to one
        step, end = slice(start, start + query_len), start + query_len
        cache.begin_step(table[: -(-end // 4)], query_len=query_len, context_len=end)
        out = cache.attend(0, q[step], k[step], v[step])
        torch.testing.assert_close(out, expected[step], atol=1e-6, rtol=0)
        start = end


def test_a_step_writes_its_own_slots_and_no_others():
    cache = pool()
    rows = torch.ones(2, 1, 8)
    cache.begin_step([4, 1], query_len=6, context_len=6)
    cache.attend(0, torch.ones(6, 1, 8), torch.ones(6, 1, 8), torch.ones(6, 1, 8))
    before = cache.kv.clone()
    cache.begin_step([4, 1], query_len=2, context_len=8)
    cache.attend(0, rows, rows * 2, rows * 3)
    changed = (cache.kv[0] != before[0]) & ~(cache.kv[0].isnan() & before[0].isnan())
    written = torch.zeros(6, 4, dtype=torch.bool)
    written[1, 2:] = True
    assert torch.equal(changed.flatten(3).any(dim=-1), written.expand(2, 6, 4))
    assert torch.equal(cache.kv[0, 0, 1, 2:], rows * 2)
    assert torch.equal(cache.kv[0, 1, 1, 2:], rows * 3)


def test_a_blocks_bytes_cover_all_layers():
    assert pool(block_size=16).bytes_per_block == SCRIPT_CONFIG.kv_elements_per_token * 4 * 16
