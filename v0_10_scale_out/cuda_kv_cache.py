"""The KV cache on a GPU: decodes read their blocks in place, and find what a step is about in one place.

    inputs     | slot | tokens | block 0 | block 1 | ...      a row for each decode of a step
    kv         | block 0 | block 1 | ... | last block | spare |

A CUDA graph (`cuda_graphs.py`) has recorded addresses and sizes. So all decodes of a step are described in one tensor,
`inputs`, which stays where it is and is filled by one copy; and a step of 9 decodes, recorded for 16, has 7 rows of
padding. These write to a block that is no request's, the spare one, and attend to a single token there.

Chunks of prompts are gathered as `KVCache` does it: their attention is bound by arithmetic, and a copy costs little.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.attention import AttentionBackend
from common.config import ModelConfig

from .kv_cache import KVCache

if TYPE_CHECKING:
    from .cuda_graphs import Recordings

DecodeAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # see `kernels.decode.paged_decode`


class CudaKVCache(KVCache):
    """`KVCache` with a spare block at its end.

    Args:
        config: the model's.
        num_blocks: of the block manager, the spare one not counted.
        block_size: tokens in a block.
        device: of the model.
        dtype: of the model.
        attention: of chunks of prompts.
        decode_attention: of decodes.
        max_num_seqs: the most decodes of a step.
        sizes: to which numbers of decodes a step without prompts is padded, rising; a larger one isn't.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionBackend,
        decode_attention: DecodeAttention,
        max_num_seqs: int,
        sizes: Sequence[int],
    ) -> None:
        super().__init__(config, num_blocks + 1, block_size, device, dtype, attention)
        self.decode_attention, self.sizes, self.spare = decode_attention, sizes, num_blocks
        longest_table = min(num_blocks, -(-config.max_position_embeddings // block_size))
        self.inputs = torch.zeros(max_num_seqs, 2 + longest_table, dtype=torch.int32, device=device)
        self.slots = torch.zeros(max_num_seqs, dtype=torch.long, device=device)  # an index has to be int64
        self.size: int | None = None  # to which this step is padded, if it is
        self.recordings: Recordings | None = None  # of a model on this pool, if there are any

    def begin_step(
        self, block_tables: Sequence[list[int]], query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> None:
        """See `KVCache.begin_step`."""
        num = next((i for i, query_len in enumerate(query_lens) if query_len > 1), len(query_lens))  # of decodes
        self.num_prompt_tokens = sum(query_lens[num:])
        if self.num_prompt_tokens:
            super().begin_step(block_tables[num:], query_lens[num:], context_lens[num:])
            self.size = None
        else:
            self.size = next((size for size in self.sizes if size >= num), None)
        rows = [
            [self._slot(table, context_len - 1), context_len, *table]
            for table, context_len in zip(block_tables[:num], context_lens[:num], strict=True)
        ]
        rows += [[self.spare * self.block_size, 1, self.spare]] * ((self.size or num) - num)
        if rows:
            longest = max(map(len, rows))
            padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int32)
            self.inputs[: len(rows), :longest] = padded.to(self.inputs.device)
            self.slots[: len(rows)] = self.inputs[: len(rows), 0]

    @property
    def replay(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What replays this step, given its ids and positions, where it is one that is recorded."""
        if self.recordings is None or self.size is None:
            return None
        return functools.partial(self.recordings.replay, self.size)

    def begin_padding(self, size: int) -> None:
        """Begin a step of so many rows of padding: it computes as much as any of this size, and harms nobody."""
        self.begin_step([[self.spare]] * size, [1] * size, [1] * size)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `KVCache.attend`; of a padded step, the first rows alone may be given as well."""
        num = len(q) - self.num_prompt_tokens
        outputs = []
        if num:
            rows = self.inputs[:num]
            slots, (keys, values) = self.slots[:num], self.kv[layer]
            keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k[:num], v[:num]
            outputs.append(self.decode_attention(q[:num], keys, values, rows[:, 2:], rows[:, 1]))
        if self.num_prompt_tokens:
            outputs.append(super().attend(layer, q[num:], k[num:], v[num:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size
