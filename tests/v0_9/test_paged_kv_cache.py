"""The pool that is read in place: any tables, any mix of decodes and chunks, against SDPA on whole sequences."""

import random
from types import SimpleNamespace

import pytest
import torch

from common.attention import sdpa
from common.errors import ModelError
from v0_9_fast.paged_kv_cache import PagedKVCache

LAYER = 1


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pool_of(kernels, num_heads=4, num_kv_heads=2, head_dim=16, num_blocks=64, block_size=4):
    config = SimpleNamespace(num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    pool = PagedKVCache(config, num_blocks, block_size, sdpa, kernels)
    pool.kv.fill_(torch.nan)  # what former owners left, and what is read without having been written, shows
    return pool


class Requests:
    """Sequences that grow step by step, each in random blocks, and their attention at once."""

    def __init__(self, pool, num_heads, num_kv_heads, head_dim, lens, seed=0):
        self.pool, self.heads = pool, (num_heads, num_kv_heads, num_kv_heads)
        free = list(range(pool.kv.shape[2]))
        random.Random(seed).shuffle(free)
        self.tables = [[free.pop() for _ in range(-(-n // pool.block_size))] for n in lens]
        self.done = [0] * len(lens)
        self.keys = [torch.empty(0, num_kv_heads, head_dim) for _ in lens]
        self.values = [torch.empty(0, num_kv_heads, head_dim) for _ in lens]
        self.head_dim = head_dim

    def step(self, query_lens, order=None):
        """Compute so many tokens of each; returns ours and SDPA's output."""
        order = order or list(range(len(query_lens)))
        order = [i for i in order if query_lens[i]]
        ends = [self.done[i] + query_lens[i] for i in order]
        tables = [self.tables[i][: -(-end // self.pool.block_size)] for i, end in zip(order, ends, strict=True)]
        lens = [query_lens[i] for i in order]
        q, k, v = torch.randn(sum(lens), sum(self.heads), self.head_dim).split(self.heads, dim=1)
        self.pool.begin_step(tables, lens, ends)
        ours = self.pool.attend(LAYER, q, k, v)
        for i, own_k, own_v in zip(order, k.split(lens), v.split(lens), strict=True):
            self.keys[i], self.values[i] = torch.cat([self.keys[i], own_k]), torch.cat([self.values[i], own_v])
            self.done[i] += len(own_k)
        keys, values = torch.cat([self.keys[i] for i in order]), torch.cat([self.values[i] for i in order])
        return ours, sdpa(q, keys, values, lens, ends)


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 24, 32, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 2, 16), (8, 8, 128), (40, 1, 20)])
def test_decodes_beside_chunks_equal_attention_at_once(kernels, num_heads, num_kv_heads, head_dim, block_size):
    shape = (num_heads, num_kv_heads, head_dim)
    pool = pool_of(kernels, *shape, num_blocks=600 if block_size < 16 else 80, block_size=block_size)
    requests = Requests(pool, *shape, [150, 80, 33, 200])
    for query_lens in ([1, 17, 1, 140], [60, 1, 0, 1], [1, 30, 30, 1], [70, 1, 1, 57], [1, 1, 1, 1]):
        ours, theirs = requests.step(query_lens)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_the_order_of_the_requests_does_not_matter(kernels):
    pool = pool_of(kernels)
    requests = Requests(pool, 4, 2, 16, [40, 40, 40])
    for order in ([2, 0, 1], [1, 2, 0]):
        ours, theirs = requests.step([9, 1, 12], order)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_several_threads_give_what_one_gives(kernels):
    outputs = []
    for num_threads in (1, 3):
        torch.manual_seed(7)
        kernels.use_threads(num_threads)
        try:
            outputs.append(Requests(pool_of(kernels), 4, 2, 16, [60, 60, 60]).step([60, 1, 33])[0])
        finally:
            kernels.use_threads(1)
    assert torch.equal(*outputs)


def test_scores_beyond_what_exp_can_hold_are_no_fault(kernels):
    pool = pool_of(kernels)
    q, k, v = (torch.randn(30, heads, 16) * scale for heads, scale in ((4, 300.0), (2, 300.0), (2, 1.0)))
    pool.begin_step([list(range(8))], [30], [30])
    ours = pool.attend(LAYER, q, k, v)
    torch.testing.assert_close(ours, sdpa(q, k, v, [30], [30]), atol=1e-3, rtol=1e-3)


def test_a_step_writes_its_own_slots_and_no_others(kernels):
    pool = pool_of(kernels)
    before = pool.kv.clone()
    pool.begin_step([[5, 3]], [3], [6])  # positions 3, 4 and 5: the last of block 5, the first two of block 3
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    pool.attend(LAYER, torch.randn(3, 4, 16), k, v)
    keys, values = pool.read(LAYER, [5, 3])
    assert torch.equal(keys[3:6], k)
    assert torch.equal(values[3:6], v)
    assert keys[[0, 1, 2, 6, 7]].isnan().all()
    assert values[[0, 1, 2, 6, 7]].isnan().all()
    written = ~pool.kv.isnan()
    assert written.sum() == 2 * 3 * 2 * 16
    assert before.isnan().all()


def test_blocks_are_copied_whole_in_all_layers(kernels):
    pool = pool_of(kernels)
    pool.kv.normal_()
    before = pool.kv.clone()
    pool.copy_blocks([(3, 9), (4, 1)])
    assert torch.equal(pool.kv[:, :, [9, 1]], before[:, :, [3, 4]])
    others = [block for block in range(64) if block not in (9, 1)]
    assert torch.equal(pool.kv[:, :, others], before[:, :, others])


def test_a_pool_beyond_all_memory_is_refused_with_what_it_needs(kernels):
    with pytest.raises(ModelError, match=r"needs .* more than there is: lower kv_cache_memory"):
        pool_of(kernels, num_blocks=2**44)
