"""Attention of decodes on a GPU, on blocks in place: what `attention.c` is on a CPU, in Triton.

Triton comes with PyTorch's builds for CUDA on Linux, and compiles this file at the first call. Nothing else imports it
before it is known that there is a GPU. Compiled for one, tested in Triton's interpreter, not yet run on a GPU.

    a request's context   | part 0        | part 1        | part 2      |      of whole tiles, one program each
    a tile                64 tokens, looked up in the block table one by one: a block may have any size

Each program attends to its part with an online softmax, and says with the log-sum-exp how much of the row's weight
lies there (FlashDecoding: Dao et al., 2023). The grid depends on the number of requests alone, never on their lengths,
so that it can be recorded: a part behind the end of a short context has nothing to do, and weighs nothing.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # tokens that a program looks at together
FEWEST_ROWS = 16  # of a tile's product on tensor cores: a group of fewer query heads is padded
MOST_PARTS = 32


def paged_decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, context_lens: Tensor) -> Tensor:
    """Attention of one new token of each of `R` requests.

    Args:
        q: `[R, num_heads, head_dim]`.
        keys: one layer's, `[num_blocks, block_size, num_kv_heads, head_dim]`, the new tokens' included.
        values: like `keys`.
        tables: int32, `[R, most blocks]`; what is behind a request's context is never read.
        context_lens: int32, `[R]`, at least 1.

    Returns:
        `[R, num_heads, head_dim]`.
    """
    num_requests, num_heads, head_dim = q.shape
    block_size, num_kv_heads = keys.shape[1:3]
    assert q.stride()[1:] == (head_dim, 1)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert tables.stride(1) == 1
    group = num_heads // num_kv_heads
    num_parts = _num_parts(num_requests * num_kv_heads, q.device)
    out = torch.empty(num_requests, num_heads, num_parts, head_dim, device=q.device)
    weights = torch.empty(num_requests, num_heads, num_parts, device=q.device)
    _attend[(num_requests, num_kv_heads, num_parts)](
        *(q, keys, values, tables, context_lens, out, weights, head_dim**-0.5),
        *(q.stride(0), tables.stride(0), context_lens.stride(0)),
        block_size=block_size,
        group=group,
        head_dim=head_dim,
        rows=max(FEWEST_ROWS, triton.next_power_of_2(group)),
        width=max(FEWEST_ROWS, triton.next_power_of_2(head_dim)),
        tile=TILE,
    )
    if num_parts == 1:
        return out[:, :, 0].to(q.dtype)
    return (weights.softmax(-1)[:, :, None] @ out)[:, :, 0].to(q.dtype)


@functools.cache
def _num_parts(num_programs: int, device: torch.device) -> int:
    """Into how many parts each context is cut: enough to give every processor of the card about two programs."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(MOST_PARTS, 2 * processors // num_programs))


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    tables,
    context_lens,
    out,
    weights,
    scale,
    q_stride,
    table_stride,
    lens_stride,
    block_size: tl.constexpr,
    group: tl.constexpr,  # query heads of a KV head
    head_dim: tl.constexpr,
    rows: tl.constexpr,  # `group`, and
    width: tl.constexpr,  # `head_dim`, padded to what a product on tensor cores takes
    tile: tl.constexpr,
):
    """One request's part of a context, for the query heads of one KV head."""
    request, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_parts = tl.num_programs(1), tl.num_programs(2)
    context_len = tl.load(context_lens + request * lens_stride)
    part_len = tl.cdiv(tl.cdiv(context_len, tile), num_parts) * tile
    begin = part * part_len
    end = tl.minimum(begin + part_len, context_len)

    row, dim = tl.arange(0, rows), tl.arange(0, width)
    is_query = (row < group)[:, None] & (dim < head_dim)[None, :]
    heads = kv_head * group + row
    queries = tl.load(q + request * q_stride + heads[:, None] * head_dim + dim[None, :], mask=is_query, other=0.0)

    best = tl.full([rows], float("-inf"), tl.float32)  # the highest score so far
    total = tl.zeros([rows], tl.float32)  # of the exponentials, relative to it
    acc = tl.zeros([rows, width], tl.float32)
    for first in tl.range(begin, end, tile):
        token = first + tl.arange(0, tile)
        is_known = token < end  # what lies behind may be NaN: it is not even read
        block = tl.load(tables + request * table_stride + token // block_size, mask=is_known, other=0)
        slot = block.to(tl.int64) * block_size + token % block_size
        at = (slot * num_kv_heads + kv_head)[:, None] * head_dim + dim[None, :]
        is_number = is_known[:, None] & (dim < head_dim)[None, :]
        k = tl.load(keys + at, mask=is_number, other=0.0)
        v = tl.load(values + at, mask=is_number, other=0.0)
        # "ieee": with float32, no TF32, which has 10 bits of mantissa
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_known[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink, exps = tl.exp(best - higher), tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(exps, 1)
        acc = acc * shrink[:, None] + tl.dot(exps.to(v.dtype), v, input_precision="ieee")
        best = higher

    # A part without tokens has the weight exp(-inf), 0, and must not be NaN.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = (request * num_kv_heads * group + heads) * num_parts + part
    tl.store(out + at[:, None] * head_dim + dim[None, :], acc, mask=is_query)
    tl.store(weights + at, best + tl.log(total), mask=row < group)
