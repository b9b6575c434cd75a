"""The KV cache: a pool of blocks that all requests share, read and written through block tables.

    kv[layer, 0]   | block 0 | block 1 | block 2 | block 3 | ...      block_size tokens each
    block_table    [ 3, 0 ]                                           of the request that is being computed
    slot_mapping   where this step's tokens go: block * block_size + offset, one slot a token

Who owns a block is the block manager's affair; this file knows only what it is told for the step. Writing goes to the
slots, reading gathers the request's blocks into one contiguous piece: a copy that the slab of v0.1 did not need, and
that kernels which read the blocks in place avoid (v0.9). v0.3 makes a step serve many requests.
"""

import math

import torch
from torch import Tensor

from common.attention import AttentionBackend
from common.config import ModelConfig
from common.errors import ModelError
from common.units import format_bytes


class KVCache:
    """Keys and values of all requests, `[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]`."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionBackend,
    ) -> None:
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        try:
            self.kv = torch.empty(shape, device=device, dtype=dtype)
        except RuntimeError:
            needed = format_bytes(math.prod(shape) * dtype.itemsize)
            raise ModelError(
                f"The KV pool needs {needed}, more than there is: lower kv_cache_memory, num_blocks or block_size."
            ) from None
        self.block_size = block_size
        self.attention = attention
        self.query_len = self.context_len = 0
        self.block_table = self.slot_mapping = torch.empty(0, dtype=torch.long)

    def begin_step(self, block_table: list[int], query_len: int, context_len: int) -> None:
        """Say what this step reads and writes; every layer's `attend` then uses the same places.

        Args:
            block_table: the request's blocks, enough for `context_len` tokens.
            query_len: how many tokens this step computes.
            context_len: the request's tokens at the end of this step, these included.
        """
        self.query_len, self.context_len = query_len, context_len
        self.block_table = torch.tensor(block_table, device=self.kv.device)
        positions = torch.arange(context_len - query_len, context_len, device=self.kv.device)
        blocks = self.block_table[positions // self.block_size]
        self.slot_mapping = blocks * self.block_size + positions % self.block_size

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values in their slots, then attend to all of the request's.

        Args:
            layer: the layer whose pool is meant; a block has the same number in all layers.
            q: `[query_len, num_heads, head_dim]`.
            k: `[query_len, num_kv_heads, head_dim]`.
            v: like `k`.

        Returns:
            `[query_len, num_heads, head_dim]`.
        """
        keys, values = self.kv[layer].flatten(1, 2)  # [num_blocks * block_size, num_kv_heads, head_dim] each, no copy
        keys[self.slot_mapping], values[self.slot_mapping] = k, v
        gathered = self.kv[layer].index_select(1, self.block_table).flatten(1, 2)  # the last block may be partly filled
        keys, values = gathered[:, : self.context_len]
        return self.attention(q, keys, values, [self.query_len], [self.context_len])

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block, over all layers."""
        return self.kv[:, :, 0].nbytes
