"""The KV cache of many requests: what a step reads and writes, decodes of any lengths beside chunks of prompts."""

import pytest
import torch

from common.attention import sdpa
from tests.kit.models import SCRIPT_CONFIG
from v0_3_scheduler.kv_cache import MOST_PADDING, KVCache, _batches

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 16


def config():
    fields = {name: getattr(SCRIPT_CONFIG, name) for name in SCRIPT_CONFIG.__slots__}
    return type(SCRIPT_CONFIG)(**fields | {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM})


def cache(num_blocks=64):
    cache = KVCache(config(), num_blocks, BLOCK, torch.device("cpu"), torch.float32, sdpa)
    cache.kv.fill_(torch.nan)  # what is read without having been written shows
    return cache


class Requests:
    """Some requests with random keys and values, whose attention is known from all tokens at once."""

    def __init__(self, lens):
        torch.manual_seed(0)
        self.q = [torch.randn(length, HEADS, DIM) for length in lens]
        self.k = [torch.randn(length, KV_HEADS, DIM) for length in lens]
        self.v = [torch.randn(length, KV_HEADS, DIM) for length in lens]
        blocks = torch.randperm(64).tolist()
        self.tables = [[blocks.pop() for _ in range(-(-length // BLOCK))] for length in lens]

    def step(self, cache, rows):
        """Compute tokens `start` to `end` of each `(request, start, end)`; the outputs of each."""
        tables = [self.tables[i][: -(-end // BLOCK)] for i, _, end in rows]
        cache.begin_step(tables, [end - start for _, start, end in rows], [end for _, _, end in rows])
        q, k, v = (torch.cat([x[i][start:end] for i, start, end in rows]) for x in (self.q, self.k, self.v))
        return cache.attend(0, q, k, v).split([end - start for _, start, end in rows])

    def expected(self, i, start, end):
        return sdpa(self.q[i][:end], self.k[i][:end], self.v[i][:end], [end], [end])[start:end]

    def check(self, cache, rows):
        for (i, start, end), out in zip(rows, self.step(cache, rows), strict=True):
            torch.testing.assert_close(out, self.expected(i, start, end), atol=1e-5, rtol=0)


def test_decodes_of_any_lengths_beside_chunks_equal_attention_at_once():
    requests, pool = Requests([3, 9, 60, 20, 13]), cache()
    requests.check(pool, [(0, 0, 2), (1, 0, 8), (2, 0, 59), (3, 0, 7)])
    requests.check(pool, [(0, 2, 3), (1, 8, 9), (2, 59, 60), (3, 7, 16), (4, 0, 13)])
    requests.check(pool, [(3, 16, 20)])


def test_a_step_knows_its_tokens_slots_and_tells_decodes_from_chunks():
    pool = cache()
    pool.begin_step([[9], [3, 7], [5, 2, 8]], query_lens=[1, 1, 6], context_lens=[3, 5, 11])
    # Token 2 of the first, token 4 of the second, tokens 5 to 10 of the third.
    assert pool.slot_mapping.tolist() == [9 * BLOCK + 2, 7 * BLOCK, *(2 * BLOCK + i for i in (1, 2, 3)), 32, 33, 34]
    assert pool.num_decodes == 2
    [(batch, tables, mask)] = pool.decode_batches
    assert (batch, tables.tolist()) == (slice(0, 2), [[9, 9], [3, 7]])  # the shorter table is padded with its own block
    assert mask.isinf().flatten(1).tolist() == [[False] * 3 + [True] * 5, [False] * 5 + [True] * 3]
    assert [table.tolist() for table in pool.prefill_tables] == [[5, 2, 8]]
    assert (list(pool.prefill_query_lens), list(pool.prefill_context_lens)) == ([6], [11])


def test_a_block_that_is_begun_is_cleared_and_one_that_goes_on_is_not():
    pool = cache()
    pool.begin_step([[3, 7], [5, 2]], query_lens=[1, 4], context_lens=[5, 6])
    assert not pool.kv[:, :, [7, 2]].isnan().any()
    assert pool.kv[:, :, [3, 5, 0]].isnan().all()


def test_a_step_writes_its_own_slots_and_clears_the_blocks_it_begins():
    requests, pool = Requests([6, 5]), cache()
    requests.step(pool, [(0, 0, 6), (1, 0, 5)])
    mine = {block for table in requests.tables for block in table}
    untouched = [block for block in range(64) if block not in mine]
    assert pool.kv[0][:, untouched].isnan().all()
    assert not pool.kv[0][:, sorted(mine)].isnan().any()
    keys = pool.kv[0, 0].flatten(0, 1)
    for table, k in zip(requests.tables, requests.k, strict=True):
        slots = [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(len(k))]
        assert torch.equal(keys[slots], k)


def test_nan_that_a_former_owner_or_block_0_holds_reaches_nobody():
    """A decode reads the rest of its last block, and padding, with weight 0; and 0 x NaN is NaN."""
    requests, pool = Requests([5, 21]), cache()
    requests.step(pool, [(0, 0, 4), (1, 0, 20)])
    pool.kv[:, :, [block for block in range(64) if block not in requests.tables[0] + requests.tables[1]]] = torch.nan
    pool.kv[:, :, requests.tables[0][1]] = torch.nan  # its second block, which it is about to begin
    requests.check(pool, [(0, 4, 5), (1, 20, 21)])


@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([1, 1 + MOST_PADDING], [(0, 2)]),
        ([1, 2 + MOST_PADDING], [(0, 1), (1, 2)]),
        ([10, 20, 21, 42, 43], [(0, 2), (2, 4), (4, 5)]),
        ([2] * 15 + [188], [(0, 15), (15, 16)]),
    ],
)
def test_no_decode_is_padded_to_much_more_than_twice_its_blocks(num_blocks, expected):
    assert [(batch.start, batch.stop) for batch in _batches(num_blocks)] == expected


def test_a_long_request_does_not_widen_the_batch_of_short_ones():
    requests, pool = Requests([3] * 5 + [61]), cache()
    rows = [(i, 0, 2) for i in range(5)] + [(5, 0, 60)]
    requests.step(pool, rows)
    requests.check(pool, [(i, 2, 3) for i in range(5)] + [(5, 60, 61)])
    assert [tuple(tables.shape) for _, tables, _ in pool.decode_batches] == [(5, 1), (1, 16)]
    requests.check(pool, [(0, 2, 3), (5, 0, 61)])  # a chunk has no part in the decodes' width
    assert [tuple(tables.shape) for _, tables, _ in pool.decode_batches] == [(1, 1)]
