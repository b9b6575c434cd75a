"""The Llama forward pass over packed tokens, written to be read.

*Packed* means that the tokens of all requests of a step lie one after the other in `[T, ...]` tensors: no batch
dimension, no padding. Everything but attention treats a token alone, so only attention needs to know which token
belongs to whom, and that is asked of the milestone: `kv_cache.attend(layer, q, k, v)` stores the new keys and values
and returns the attention output. The maths is Llama's as in Hugging Face's `modeling_llama.py` (transformers 5.24),
against which every piece is tested.
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import ModelConfig, RopeConfig
from common.weights import load_weights


class KVCacheLike(Protocol):
    """All that the model asks of a milestone."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store `k` and `v` `[T, num_kv_heads, head_dim]`; return the attention of `q` `[T, num_heads, head_dim]`."""
        ...


class Model(Protocol):
    """What an engine needs of a model; tests pass scripted ones."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: KVCacheLike, *, rows: Tensor | None = None
    ) -> Tensor:
        """See `Llama.forward`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Llama.logits`."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's tensors; a projection is `[out_features, in_features]`, a bias that is not there `None`."""

    input_norm: Tensor
    qkv_proj: Tensor  # rows of Q, then K, then V
    o_proj: Tensor
    post_attention_norm: Tensor
    gate_up_proj: Tensor  # rows of gate, then up
    down_proj: Tensor
    qkv_proj_bias: Tensor | None = None
    o_proj_bias: Tensor | None = None
    gate_up_proj_bias: Tensor | None = None
    down_proj_bias: Tensor | None = None


class Llama:
    """A Llama model: its weights, and the maths that turns token ids into logits."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        """Take the tensors that `load_weights` returns; nothing is copied."""
        self.config = config
        self.embed_tokens = weights["embed_tokens"]
        self.norm = weights["norm"]
        self.lm_head = weights["lm_head"]
        names = [field.name for field in fields(LayerWeights)]
        self.layers = [
            LayerWeights(**{name: weights[f"layers.{i}.{name}"] for name in names if f"layers.{i}.{name}" in weights})
            for i in range(config.num_layers)
        ]
        self.device, self.dtype = self.embed_tokens.device, self.embed_tokens.dtype
        self.inv_freq = rope_inv_freq(config.rope, config.head_dim).to(self.device)

    @classmethod
    def from_folder(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> "Llama":
        """Load a checkpoint in Hugging Face layout; raises `ModelError` where it is not a whole Llama."""
        config = ModelConfig.from_folder(folder)
        return cls.packed(config, load_weights(folder, config, device, dtype))

    @classmethod
    def packed(cls, config: ModelConfig, weights: dict[str, Tensor]) -> "Llama":
        """A model of plain weights: each matrix is packed first, and takes the plain one's place in `weights`."""
        for name, tensor in weights.items():
            if tensor.ndim == 2 and name != "embed_tokens":  # which is looked up by row, also where it is the head
                weights[name] = pack(tensor)
        return cls(config, weights)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCacheLike,
        *,
        rows: Tensor | None = None,
        num_layers: int | None = None,
    ) -> Tensor:
        """Run the decoder layers and the final norm.

        Args:
            token_ids: `[T]`, packed.
            positions: `[T]`, each token's place in its own sequence.
            kv_cache: stores this step's keys and values, and attends.
            rows: which of the `T` tokens are wanted, `[R]`; `None` wants all. The last layer's MLP is computed for
                these alone: a prompt of 2,000 tokens needs one row of logits.
            num_layers: stop after so many layers, at least one; `None` runs all.

        Returns:
            Hidden states, `[R, hidden_size]` (`[T, hidden_size]` without `rows`).
        """
        hidden = self.embed_tokens[token_ids]  # [T, hidden_size], a copy: the layers add to it in place
        cos, sin = rope_cos_sin(positions, self.inv_freq)
        layers = self.layers[:num_layers]
        assert layers, "rows are picked within the last layer, so there must be one"
        for i, layer in enumerate(layers):
            x = rms_norm(hidden, layer.input_norm, self.config.rms_norm_eps)
            attended = self._attention(i, layer, x, cos, sin, kv_cache)
            if rows is not None and i == len(layers) - 1:
                hidden, attended = hidden[rows], attended[rows]
            hidden += linear(attended, layer.o_proj, layer.o_proj_bias)
            x = rms_norm(hidden, layer.post_attention_norm, self.config.rms_norm_eps)
            hidden += mlp(x, layer)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary in float32: `[R, hidden_size] -> [R, vocab_size]`."""
        return linear(hidden, self.lm_head).float()

    def _attention(
        self, i: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: KVCacheLike
    ) -> Tensor:
        """Project, rotate, attend: `[T, hidden_size] -> [T, num_heads * head_dim]`."""
        num_heads, num_kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = linear(x, layer.qkv_proj, layer.qkv_proj_bias).view(-1, num_heads + 2 * num_kv_heads, head_dim)
        qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        q, k = apply_rope(qk, cos, sin).split([num_heads, num_kv_heads], dim=1)
        return kv_cache.attend(i, q, k, v).flatten(1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: `[T, in_features] -> [T, out_features]`; `weight` plain, or as `pack` returns it."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def pack(weight: Tensor) -> Tensor:
    """A matrix in the order in which oneDNN's product reads it, where there is one: float32 on a CPU.

    The plain product brings the matrix into such an order in every step, or does without. Done once, it saves more than
    half of the products' time on some processors, and little on others (design.md, "The matrix product on a CPU"). The
    two operators are those that `torch.compile` uses for frozen weights. They are not public: without them, as in
    builds of PyTorch without oneDNN, a matrix stays as it is.
    """
    operators = ("_linear_pointwise", "_reorder_linear_weight")
    usable = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)
    if not usable or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # None: for any number of rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square layer norm over the last dimension (Zhang and Sennrich, 2019), computed in float32.

    In bfloat16 the mean of squares would lose most of its digits.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rope_inv_freq(rope: RopeConfig, head_dim: int) -> Tensor:
    """Rotary frequencies in radians per position, float32, `[head_dim / 2]`.

    `default` is `theta ** (-2i / head_dim)` (Su et al., 2021). `linear` divides all by `factor`. `llama3` leaves
    short waves as they are, divides long ones by `factor`, and blends between (Llama 3.1; the formula is that of
    transformers 5.24, `modeling_rope_utils._compute_llama3_parameters`).
    """
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "default":
        return inv_freq
    # How many whole turns a pair makes within the original context decides: at least `high_freq_factor` turns keep it,
    # at most `low_freq_factor` turns stretch it in full.
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return keep * inv_freq + (1 - keep) * inv_freq / rope.factor


def rope_cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` of each position's angles, float32, `[T, 1, head_dim / 2]` (one for all heads)."""
    angles = positions[:, None, None].float() * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair `(x[i], x[i + head_dim / 2])` by its angle, in float32: `[T, heads, head_dim]` in and out."""
    pairs = x.float().unflatten(-1, (2, -1))  # [T, heads, 2, head_dim / 2]
    first, second = pairs.unbind(-2)
    rotated = pairs * cos[..., None, :]  # in three passes over memory; the formula as it is written takes seven
    rotated[..., 0, :].addcmul_(second, sin, value=-1)
    rotated[..., 1, :].addcmul_(first, sin)
    return rotated.flatten(-2).to(x.dtype)


def mlp(x: Tensor, layer: LayerWeights) -> Tensor:
    """SwiGLU (Shazeer, 2020): `down(silu(gate(x)) * up(x))`, `[T, hidden_size]` in and out."""
    gate, up = linear(x, layer.gate_up_proj, layer.gate_up_proj_bias).chunk(2, dim=-1)
    return linear(F.silu(gate, inplace=True).mul_(up), layer.down_proj, layer.down_proj_bias)
