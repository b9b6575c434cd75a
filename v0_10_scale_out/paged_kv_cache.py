"""The KV cache of the kernels in C, which read blocks where they lie: nothing is gathered.

    kv[layer, 0]   keys, transposed within a block    | head 0: [head_dim, block_size] | head 1 ... |
    kv[layer, 1]   values                             | head 0: [block_size, head_dim] | head 1 ... |
    tables         [ 3, 0, 1, 5, 2 ]                  the blocks of all requests of the step, one table after the other
    items          [ 0, 0, 1, 17 ], [ 2, 1, 8, 32 ]   what a thread attends to at once, see `kernels/attention.c`

It is a `KVCache` in another layout. What a former owner left in a block needs no clearing: what is behind a request's
last token has a score that is thrown away, and a value that is never read.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.attention import AttentionBackend
from common.config import ModelConfig

from .kernels.bindings import Kernels
from .kv_cache import KVCache

ROWS = 24  # of queries times heads that an item should have: 4 tiles of AVX2, 2 of AVX-512


class PagedKVCache(KVCache):
    """Keys and values of all requests, `[num_layers, 2, num_blocks, num_kv_heads, block_size * head_dim]`, float32."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, attention: AttentionBackend, kernels: Kernels
    ) -> None:
        super().__init__(config, num_blocks, block_size, torch.device("cpu"), torch.float32, attention)
        # The same memory, in another order: nothing has been written yet.
        self.kv = self.kv.view(*self.kv.shape[:3], config.num_kv_heads, block_size * config.head_dim)
        self.kernels = kernels
        self._layers = [(layer[0], layer[1]) for layer in self.kv]
        self._num_kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._most_queries = max(1, ROWS * config.num_kv_heads // config.num_heads)

    def begin_step(
        self, block_tables: Sequence[list[int]], query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> None:
        """Say what this step reads and writes; every layer's `attend` then uses the same places.

        Args:
            block_tables: each request's blocks, enough for its `context_lens` tokens.
            query_lens: how many tokens of each request this step computes.
            context_lens: each request's tokens at the end of this step, these included. Long ones are best at the end.
        """
        flat = array("i")
        begins = []  # where each request's table begins
        for table in block_tables:
            begins.append(len(flat))
            flat.extend(table)
        items = _items(np.array([begins, query_lens, context_lens], dtype=np.int32), self._most_queries)
        self.tables, self.items = torch.from_numpy(np.frombuffer(flat, dtype=np.int32)), torch.from_numpy(items)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values in their slots, then attend, each request to all of its own.

        Args:
            layer: the layer whose pool is meant; a block has the same number in all layers.
            q: `[T, num_heads, head_dim]`, the requests one after the other.
            k: `[T, num_kv_heads, head_dim]`.
            v: like `k`.

        Returns:
            `[T, num_heads, head_dim]`.
        """
        keys, values = self._layers[layer]
        tables, items = self.tables, self.items
        self.kernels.store(k, v, keys, values, tables, items, self.block_size)
        return self.kernels.attention(
            q, keys, values, tables, items, self._most_queries, self._num_kv_heads, self.block_size
        )

    def read(self, layer: int, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of these blocks as `KVCache` has them, `[tokens, num_kv_heads, head_dim]` each."""
        keys, values = self.kv[layer][:, list(blocks)]
        keys = keys.unflatten(-1, (self._head_dim, -1)).permute(0, 3, 1, 2)  # [blocks, block_size, heads, head_dim]
        values = values.unflatten(-1, (-1, self._head_dim)).permute(0, 2, 1, 3)
        return keys.flatten(0, 1), values.flatten(0, 1)


def _items(of_request: np.ndarray, most: int) -> np.ndarray:
    """Cut each request's new tokens into runs of at most `most`.

    Args:
        of_request: `[3, R]`: where its table begins, how many tokens it computes, how many it has then.
        most: tokens of a run.

    Returns:
        `[I, 4]`, as `Kernels.attention` wants them.
    """
    begins, query_lens, context_lens = of_request
    num_runs = -(-query_lens // most)
    owner = np.repeat(np.arange(len(num_runs)), num_runs)
    first = (np.arange(len(owner)) - (num_runs.cumsum() - num_runs)[owner]) * most  # within the request's new tokens
    lens = query_lens[owner]
    items = np.empty((len(owner), 4), dtype=np.int32)
    items[:, 0] = begins[owner]
    items[:, 1] = (query_lens.cumsum() - query_lens)[owner] + first
    items[:, 2] = np.minimum(lens - first, most)
    items[:, 3] = context_lens[owner] - lens + first
    return items
