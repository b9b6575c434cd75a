"""The Llama forward pass on the kernels: what `common/llama.py` computes, in fewer passes over memory.

The maths and the order of the sums within a row are `Llama`'s, which is its control: tests compare the two layer by
layer. What differs is who computes. A product adds to the residual stream by itself, the rotation is in place, and
each of norm and gate is one call. Everything is float32 but the weights, which may be stored in 16 bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import ModelConfig
from common.llama import KVCacheLike, Llama, rope_cos_sin, rope_inv_freq

from .kernels.bindings import Kernels
from .matrices import Matrix


@dataclass(frozen=True, slots=True)
class FastLayer:
    """One decoder layer."""

    input_norm: Tensor
    qkv_proj: Matrix  # rows of Q, then K, then V
    o_proj: Matrix
    post_attention_norm: Tensor
    gate_up_proj: Matrix  # rows of gate, then up
    down_proj: Matrix


class FastLlama(Llama):
    """A Llama whose layers are computed by the kernels.

    Args:
        config: the model's.
        embed_tokens: `[vocab_size, hidden_size]`, looked up by row.
        layers: packed.
        norm: the last one.
        lm_head: packed; where it is tied to `embed_tokens`, a second copy of these.
        kernels: all of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        embed_tokens: Tensor,
        layers: list[FastLayer],
        norm: Tensor,
        lm_head: Matrix,
        kernels: Kernels,
    ) -> None:
        self.config, self.kernels = config, kernels
        self.embed_tokens, self.fast_layers, self.norm, self.head = embed_tokens, layers, norm, lm_head
        self.device, self.dtype = embed_tokens.device, embed_tokens.dtype
        self.inv_freq = rope_inv_freq(config.rope, config.head_dim)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCacheLike,
        *,
        rows: Tensor | None = None,
        num_layers: int | None = None,
    ) -> Tensor:
        """See `Llama.forward`."""
        kernels, eps = self.kernels, self.config.rms_norm_eps
        num_heads, num_kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        kernels.use_threads(torch.get_num_threads())
        hidden = self.embed_tokens[token_ids]
        cos, sin = (part[:, 0] for part in rope_cos_sin(positions, self.inv_freq))  # [T, head_dim / 2]
        layers = self.fast_layers[:num_layers]
        assert layers, "rows are picked within the last layer, so there must be one"
        for i, layer in enumerate(layers):
            x = kernels.rms_norm(hidden, layer.input_norm, eps)
            qkv = layer.qkv_proj.product(x).view(-1, num_heads + 2 * num_kv_heads, head_dim)
            kernels.rotate(qkv[:, : num_heads + num_kv_heads], cos, sin)
            q, k, v = torch.split_with_sizes(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
            attended = kv_cache.attend(i, q, k, v).flatten(1)
            if rows is not None and i == len(layers) - 1:
                hidden, attended = hidden[rows], attended[rows]
            layer.o_proj.product(attended, add_to=hidden)
            x = kernels.rms_norm(hidden, layer.post_attention_norm, eps)
            layer.down_proj.product(kernels.silu_mul(layer.gate_up_proj.product(x)), add_to=hidden)
        return kernels.rms_norm(hidden, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Llama.logits`."""
        self.kernels.use_threads(torch.get_num_threads())
        return self.head.product(hidden.contiguous())
