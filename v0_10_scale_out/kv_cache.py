"""The KV cache: a pool of blocks that all requests share, read and written through block tables.

    kv[layer, 0]   | block 0 | block 1 | block 2 | block 3 | ...      block_size tokens each
    block_tables   [ 3, 0 ], [ 1, 5, 2 ]                              one of each request of the step
    slot_mapping   where this step's tokens go: block * block_size + offset, one slot a token

A step has two kinds of requests, and attends to each kind at once: *decodes*, one new token each, whose blocks are
gathered into padded batches; and chunks of prompts, packed one after the other. Decodes come first, short ones before
long ones: each batch is padded to its longest, so that a long request must not share one with short requests. Where all
tables of a batch begin with the same blocks, these are gathered once, and attended to by all queries together.

Who owns a block is the block manager's affair; this file knows only what it is told for the step. Gathering is a copy
that kernels which read the blocks in place avoid (v0.9).
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common.attention import AttentionBackend, decode_attention, decode_behind_prefix, shares_prefixes
from common.config import ModelConfig
from common.errors import ModelError
from common.units import format_bytes

MOST_PADDING = 8  # blocks, where twice a request's own would be fewer
LEAST_SAVED = 64  # blocks that are not gathered again: below, a second pass over the rest costs more than it saves


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
        # Zeros, not whatever memory holds: a decode reads the padding of its batch, with weight 0, and 0 x NaN is NaN.
        try:
            self.kv = torch.zeros(shape, device=device, dtype=dtype)
        except RuntimeError:
            needed = format_bytes(math.prod(shape) * dtype.itemsize)
            raise ModelError(
                f"The KV pool needs {needed}, more than there is: lower kv_cache_memory, num_blocks or block_size."
            ) from None
        self.block_size = block_size
        self.attention = attention

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in all layers, before a step writes: from the first of each pair to the second."""
        source, target = torch.tensor(pairs, device=self.kv.device).T
        self.kv[:, :, target] = self.kv[:, :, source]

    def begin_step(
        self, block_tables: Sequence[list[int]], query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> None:
        """Say what this step reads and writes; every layer's `attend` then uses the same places.

        Args:
            block_tables: each request's blocks, enough for its `context_lens` tokens; decodes first.
            query_lens: how many tokens of each request this step computes.
            context_lens: each request's tokens at the end of this step, these included.
        """
        device, block_size = self.kv.device, self.block_size
        tables = _padded(block_tables).to(device)  # [R, longest table]
        queries, contexts = torch.tensor(query_lens, device=device), torch.tensor(context_lens, device=device)
        # Each token's request, and its position there: the request's last `query_len` positions.
        owner = torch.repeat_interleave(queries)  # [T]
        positions = torch.arange(len(owner), device=device) + (contexts - queries.cumsum(0))[owner]
        self.slot_mapping = tables[owner, positions // block_size] * block_size + positions % block_size

        # A block that is written from its start on is new to its owner: what a former one left may be NaN. Blocks that
        # are shared are never written, and a copy of one brings along what was zeroed behind its tokens.
        new = self.slot_mapping[self.slot_mapping % block_size == 0] // block_size
        self.kv[:, :, new] = 0

        num_decodes = next((i for i, query_len in enumerate(query_lens) if query_len > 1), len(query_lens))
        self.num_decodes = num_decodes
        self.decode_batches = []  # (which decodes, their tables [R, blocks], what is added to their scores)
        self.prefixes = []  # of each batch: the blocks that all its tables begin with, and which these then leave out
        for batch in _batches([len(table) for table in block_tables[:num_decodes]]):
            num_blocks = max(map(len, block_tables[batch]))
            padding = torch.arange(num_blocks * block_size, device=device) >= contexts[batch, None]
            mask = torch.zeros(padding.shape, device=device, dtype=self.kv.dtype).masked_fill_(padding, -torch.inf)
            num_shared = _num_shared(block_tables[batch]) if shares_prefixes(device) else 0
            self.prefixes.append(tables[batch.start, :num_shared])
            own, mask = tables[batch, num_shared:num_blocks], mask[:, None, None, num_shared * block_size :]
            self.decode_batches.append((batch, own.contiguous(), mask))
        self.prefill_tables = [torch.tensor(table, device=device) for table in block_tables[num_decodes:]]
        self.prefill_query_lens, self.prefill_context_lens = query_lens[num_decodes:], context_lens[num_decodes:]

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
        pool = self.kv[layer]
        keys, values = pool.flatten(1, 2)  # [num_blocks * block_size, num_kv_heads, head_dim] each, no copy
        keys[self.slot_mapping], values[self.slot_mapping] = k, v
        outputs = []
        for (batch, tables, mask), prefix in zip(self.decode_batches, self.prefixes, strict=True):
            gathered = pool.index_select(1, tables.flatten())
            keys, values = gathered.view(2, len(tables), -1, *k.shape[1:])  # [R, S, num_kv_heads, head_dim] each
            if len(prefix):
                shared_keys, shared_values = pool.index_select(1, prefix).flatten(1, 2)
                outputs.append(decode_behind_prefix(q[batch], (shared_keys, shared_values), keys, values, mask))
            else:
                outputs.append(decode_attention(q[batch], keys, values, mask))
        if self.prefill_tables:
            pieces = [
                pool.index_select(1, table).flatten(1, 2)[:, :context_len]
                for table, context_len in zip(self.prefill_tables, self.prefill_context_lens, strict=True)
            ]
            keys, values = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
            prefill_q = q[self.num_decodes :]
            outputs.append(self.attention(prefill_q, keys, values, self.prefill_query_lens, self.prefill_context_lens))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _padded(block_tables: Sequence[list[int]]) -> Tensor:
    """The tables as one `[R, longest]` tensor, each padded with a block of its own: others' may hold NaN."""
    longest = max(map(len, block_tables))
    return torch.tensor([table + table[-1:] * (longest - len(table)) for table in block_tables])


def _num_shared(block_tables: Sequence[list[int]]) -> int:
    """How many blocks all of these begin with, or 0 where reading them once for all would save too little.

    A request writes into its last block, which is its own; a shared one lies before it, and is full.
    """
    num_shared = 0
    for blocks in zip(*(table[:-1] for table in block_tables), strict=False):
        if len(set(blocks)) > 1:
            break
        num_shared += 1
    return num_shared if num_shared * (len(block_tables) - 1) >= LEAST_SAVED else 0


def _batches(num_blocks: Sequence[int]) -> list[slice]:
    """Which decodes are gathered together, given how many blocks each has, rising: none is padded to over twice that.

    A few blocks of padding cost less than another batch.
    """
    starts = [0] if num_blocks else []
    for i, num in enumerate(num_blocks):
        if num > max(2 * num_blocks[starts[-1]], num_blocks[starts[-1]] + MOST_PADDING):
            starts.append(i)
    return [slice(start, end) for start, end in itertools.pairwise([*starts, len(num_blocks)])]
