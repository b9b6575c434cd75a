"""Attention over packed sequences, behind one small interface.

*Packed* means that the tokens of all sequences of a step lie one after the other in one tensor, without padding;
`query_lens` and `kv_lens` say where each sequence ends. Two back ends: PyTorch's `scaled_dot_product_attention` (SDPA)
everywhere, and FlashAttention's variable-length kernel on CUDA where it is installed. Where K and V come from, one slab
or scattered blocks, is the milestone's business.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ModelError

BACKENDS = ("auto", "sdpa", "flash-attn")
CPU_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"  # SDPA's own, which returns log-sum-exps as well
WHOLE_TRIANGLE = 256  # queries whose attention to themselves is one call, not halved again


class AttentionBackend(Protocol):
    """Causal attention of each sequence's new tokens over all of its tokens so far."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int]) -> Tensor:
        """Attend.

        Args:
            q: the new tokens' queries, `[sum(query_lens), num_heads, head_dim]`, rotary embedding applied.
            k: `[sum(kv_lens), num_kv_heads, head_dim]`, the new tokens' keys included, at each sequence's end.
            v: like `k`.
            query_lens: new tokens of each sequence.
            kv_lens: tokens of each sequence so far, never fewer than its new ones.

        Returns:
            `[sum(query_lens), num_heads, head_dim]`.
        """
        ...


def sdpa(q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int]) -> Tensor:
    """`AttentionBackend` on SDPA, one sequence after the other; grouped-query heads are shared without a copy."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    has_kernel = q.device.type == "cpu" and hasattr(torch.ops.aten, CPU_KERNEL)
    q_start = kv_start = 0
    for query_len, kv_len in zip(query_lens, kv_lens, strict=True):
        q_end, kv_end = q_start + query_len, kv_start + kv_len
        attend = _attend_in_two if has_kernel and 1 < query_len < kv_len else _attend_at_once
        out[q_start:q_end] = attend(q[q_start:q_end], k[kv_start:kv_end], v[kv_start:kv_end])
        q_start, kv_start = q_end, kv_end
    return out


def _attend_at_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence's attention in one call: `[query_len, num_heads, head_dim]`."""
    query_len, kv_len = len(q), len(k)
    # The mask is aligned to the lower right: the last query sees everything, the first one what came before it.
    # SDPA's `is_causal` aligns to the upper left. For a whole prompt both are the same (and `is_causal` is faster),
    # from the second chunk on it would hide the sequence's own past; one query alone sees everything anyway.
    is_causal = query_len == kv_len and query_len > 1
    mask = None
    if not is_causal and query_len > 1:
        mask = torch.ones(query_len, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - query_len)
    return F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],  # [1, num_heads, query_len, head_dim]
        k.transpose(0, 1)[None],  # [1, num_kv_heads, kv_len, head_dim]
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=True,
    )[0].transpose(0, 1)


def _attend_in_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A later chunk's attention on a CPU, to its past and to itself, without a mask.

        keys       0 ........ past | past ... end
        a chunk    sees all        | sees itself, causally

    A mask costs time, and so do the scores that it hides. These two are softmaxes over two parts of a row of scores;
    the log-sum-exp of each part says how much of the row's weight it has, as in FlashAttention (Dao et al., 2022).
    Only the kernel behind SDPA returns these, and it is not public: without it, there is `_attend_at_once`. A chunk's
    own part is halved in the same way, since the kernel computes much of what is hidden in a small triangle.
    """
    # What the kernel takes for a batch are our KV heads: each has its group of queries, and its keys without a copy.
    keys, values = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]  # [num_kv_heads, 1, kv_len, head_dim]
    queries = q.transpose(0, 1).unflatten(0, (len(keys), -1))  # [num_kv_heads, group, query_len, head_dim]
    return _past_and_own(queries, keys, values)[0].flatten(0, 1).transpose(0, 1)


def _past_and_own(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs, shaped like `queries`, and their log-sum-exps."""
    kernel = getattr(torch.ops.aten, CPU_KERNEL)
    query_len = queries.shape[2]
    past = keys.shape[2] - query_len
    if past == 0 and query_len <= WHOLE_TRIANGLE:
        return kernel(queries, keys.expand_as(queries), values.expand_as(queries), is_causal=True)
    if past == 0:  # the second half has a past: the first
        half = query_len // 2
        first = _past_and_own(queries[:, :, :half], keys[:, :, :half], values[:, :, :half])
        second = _past_and_own(queries[:, :, half:], keys, values)
        return torch.cat((first[0], second[0]), dim=2), torch.cat((first[1], second[1]), dim=2)
    own, own_lse = _past_and_own(queries, keys[:, :, past:], values[:, :, past:])
    # With nothing to hide, the queries of a group can stand one after the other, as one longer sequence.
    grouped = queries.flatten(1, 2)[:, None]
    before, before_lse = kernel(grouped, keys[:, :, :past], values[:, :, :past])
    before, before_lse = before.reshape(own.shape), before_lse.reshape(own_lse.shape)
    share = torch.sigmoid(before_lse - own_lse)[..., None]
    return own.lerp(before, share.to(own.dtype)), torch.logaddexp(before_lse, own_lse)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of one new token of each of `R` requests, all in one call of SDPA.

    The queries of a group share their KV head's keys: they are put where SDPA expects a sequence of queries, so that
    nothing is copied per query head.

    Args:
        q: `[R, num_heads, head_dim]`.
        k: `[R, S, num_kv_heads, head_dim]`, each request's keys, padded to the longest.
        v: like `k`.
        mask: `[R, 1, 1, S]`, added to the scores: 0 for a request's own tokens, `-inf` for padding.

    Returns:
        `[R, num_heads, head_dim]`.
    """
    grouped = q.view(q.shape[0], k.shape[2], -1, q.shape[2])  # [R, num_kv_heads, queries of a group, head_dim]
    return F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask).reshape(
        q.shape
    )


def shares_prefixes(device: torch.device) -> bool:
    """Whether `decode_behind_prefix` can run: it needs the kernel behind SDPA on a CPU, which is not public."""
    return device.type == "cpu" and hasattr(torch.ops.aten, CPU_KERNEL)


def decode_behind_prefix(q: Tensor, prefix: tuple[Tensor, Tensor], k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`decode_attention` of requests whose first tokens are the same: these are read once for all of them.

        keys        the prefix of all | own of request 0
                                      | own of request 1

    Two softmaxes over two parts of a row, as in `_attend_in_two`. To the prefix, the queries of all requests are one
    sequence. (Cascade attention, as others call it.)

    Args:
        q: `[R, num_heads, head_dim]`.
        prefix: keys and values, `[P, num_kv_heads, head_dim]` each.
        k: `[R, S, num_kv_heads, head_dim]`, each request's keys behind the prefix, padded to the longest.
        v: like `k`.
        mask: `[R, 1, 1, S]`, as there.

    Returns:
        `[R, num_heads, head_dim]`.
    """
    kernel = getattr(torch.ops.aten, CPU_KERNEL)
    grouped = q.view(q.shape[0], k.shape[2], -1, q.shape[2])  # [R, num_kv_heads, queries of a group, head_dim]
    own, own_lse = kernel(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    # What the kernel takes for a batch are our KV heads.
    keys, values = (part.transpose(0, 1)[:, None] for part in prefix)  # [num_kv_heads, 1, P, head_dim]
    queries = grouped.transpose(0, 1)  # [num_kv_heads, R, queries of a group, head_dim]
    before, before_lse = kernel(queries.flatten(1, 2)[:, None], keys, values)
    before = before.view(queries.shape).transpose(0, 1)
    before_lse = before_lse.view(queries.shape[:3]).transpose(0, 1)
    share = torch.sigmoid(before_lse - own_lse)[..., None]
    return own.lerp(before, share.to(own.dtype)).reshape(q.shape)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int]) -> Tensor:
    """`AttentionBackend` on FlashAttention 2, all sequences in one call; CUDA, float16 or bfloat16 only.

    Its causal mask is aligned to the lower right since version 2.1.
    """
    from flash_attn import flash_attn_varlen_func  # an optional package that needs a CUDA device

    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=_cumulative(query_lens, q.device),
        cu_seqlens_k=_cumulative(kv_lens, q.device),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(kv_lens),
        causal=True,
    )


def select_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The back end of that name; `auto` takes FlashAttention where it can run, and SDPA elsewhere.

    Raises:
        ModelError: the name is unknown, or FlashAttention was asked for where it cannot run.
    """
    if name not in BACKENDS:
        raise ModelError(f"There is no attention back end {name!r}: choose one of {', '.join(BACKENDS)}.")
    if name == "sdpa":
        return sdpa
    obstacle = _flash_attn_obstacle(device, dtype)
    if obstacle is None:
        return flash_attn
    if name == "flash-attn":
        raise ModelError(f"The attention back end flash-attn cannot run here: {obstacle}. Choose sdpa.")
    return sdpa


def _flash_attn_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this run is on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "it computes float16 and bfloat16 only"
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "the package is not installed (pip install 'mini-vllm[gpu]')"
    return None


def _cumulative(lens: Sequence[int], device: torch.device) -> Tensor:
    return F.pad(torch.tensor(lens, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)
