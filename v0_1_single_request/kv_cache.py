"""The KV cache of one request: one contiguous slab, reserved for the longest sequence there may be.

    kv[layer, 0]   | k0 | k1 | ... | k(context_len - 1) | this step's | free, and reserved all the same |
                                                          query_len                        max_model_len

Simple, and wasteful: a request that ends after 100 of 8,192 tokens has used 1.2 % of what it took. v0.2 replaces the
slab by blocks; `begin_step` and `attend` stay.
"""

import torch
from torch import Tensor

from common.attention import AttentionBackend
from common.config import ModelConfig


class KVCache:
    """Keys and values of one request, `[num_layers, 2, max_model_len, num_kv_heads, head_dim]`."""

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionBackend,
    ) -> None:
        shape = (config.num_layers, 2, max_model_len, config.num_kv_heads, config.head_dim)
        self.kv = torch.empty(shape, device=device, dtype=dtype)
        self.attention = attention
        self.context_len = 0  # tokens whose K and V the current step will have stored
        self.query_len = 0  # how many of them are this step's

    def begin_step(self, query_len: int) -> None:
        """Say how many tokens this step appends; every layer's `attend` then reads and writes the same positions."""
        self.query_len = query_len
        self.context_len += query_len
        assert self.context_len <= self.kv.shape[2], "the engine refuses requests longer than the slab"

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append this step's keys and values, then attend to all of them.

        Args:
            layer: the layer whose slab is meant; all layers store the same positions.
            q: `[query_len, num_heads, head_dim]`.
            k: `[query_len, num_kv_heads, head_dim]`.
            v: like `k`.

        Returns:
            `[query_len, num_heads, head_dim]`.
        """
        keys, values = self.kv[layer, :, : self.context_len]
        keys[-self.query_len :], values[-self.query_len :] = k, v
        return self.attention(q, keys, values, [self.query_len], [self.context_len])

    @property
    def reserved_bytes(self) -> int:
        """Memory reserved for this request, whether used or not."""
        return self.kv.nbytes

    @property
    def used_bytes(self) -> int:
        """Memory that holds the K and V of a token."""
        return self.kv[:, :, : self.context_len].nbytes
