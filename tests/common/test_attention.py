"""The SDPA back end against attention written out in float64, and the choice of a back end."""

import itertools
import math
import sys
import types

import pytest
import torch
from torch import Tensor

from common import attention
from common.attention import sdpa, select_backend
from common.errors import ModelError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)]  # multi-head, grouped-query, multi-query


def reference(q: Tensor, k: Tensor, v: Tensor, query_lens: list[int], kv_lens: list[int]) -> Tensor:
    """One query, one head at a time: softmax over the keys up to the query's own place."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    query_start = kv_start = 0
    for query_len, kv_len in zip(query_lens, kv_lens, strict=True):
        for i, head in itertools.product(range(query_len), range(q.shape[1])):
            end = kv_start + kv_len - query_len + i + 1
            keys, values = k[kv_start:end, head // group], v[kv_start:end, head // group]
            scores = keys @ q[query_start + i, head] / math.sqrt(q.shape[2])
            out[query_start + i, head] = scores.softmax(0) @ values
        query_start, kv_start = query_start + query_len, kv_start + kv_len
    return out


def inputs(
    query_lens: list[int], kv_lens: list[int], heads: tuple[int, int] = (4, 2), head_dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(kv_lens) * 100 + heads[0] * 10 + heads[1])

    def make(num_tokens: int, num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, head_dim, generator=generator) * 2

    return make(sum(query_lens), heads[0]), make(sum(kv_lens), heads[1]), make(sum(kv_lens), heads[1])


def assert_right(
    query_lens: list[int], kv_lens: list[int], heads: tuple[int, int] = (4, 2), head_dim: int = 16
) -> None:
    q, k, v = inputs(query_lens, kv_lens, heads, head_dim)
    found = sdpa(q, k, v, query_lens, kv_lens)
    assert (found.shape, found.dtype) == (q.shape, q.dtype)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), reference(q, k, v, query_lens, kv_lens), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_a_whole_prompt_is_causal(length: int, heads: tuple[int, int]) -> None:
    assert_right([length], [length], heads)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("query_len", "kv_len"), [(2, 3), (4, 9), (5, 32), (16, 17)])
def test_a_later_chunk_sees_its_past_and_its_own_up_to_each_token(
    query_len: int, kv_len: int, heads: tuple[int, int]
) -> None:
    assert_right([query_len], [kv_len], heads)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_len", [1, 2, 31])
def test_a_decoded_token_sees_everything(kv_len: int, heads: tuple[int, int]) -> None:
    assert_right([1], [kv_len], heads)


@pytest.mark.parametrize("heads", HEADS)
def test_packed_sequences_of_all_kinds_see_only_themselves(heads: tuple[int, int]) -> None:
    assert_right([5, 1, 3, 1, 8], [5, 12, 9, 1, 8], heads)


@pytest.mark.parametrize(("query_len", "kv_len"), [(257, 700), (300, 301), (512, 1000), (1023, 1040)])
def test_a_chunk_in_parts_agrees_with_one_call_and_its_mask(query_len: int, kv_len: int) -> None:
    q, k, v = inputs([query_len], [kv_len], (6, 2), 64)
    found = attention._attend_in_two(q, k, v)
    torch.testing.assert_close(found, attention._attend_at_once(q, k, v), rtol=1e-5, atol=1e-5)


def test_scores_too_large_for_exp_are_weighed_right_between_past_and_chunk() -> None:
    q, k, v = inputs([4], [12])
    q = q * 50  # scores in the hundreds: exp would overflow, and a row's weight lies almost all on one side
    torch.testing.assert_close(sdpa(q, k, v, [4], [12]).double(), reference(q, k, v, [4], [12]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_requests", [1, 5])
def test_decodes_behind_a_prefix_of_all_equal_decodes_that_each_hold_it(
    num_requests: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_requests)
    num_heads, num_kv_heads = heads
    q = torch.randn(num_requests, num_heads, 16, generator=generator).to(dtype)
    prefix = torch.randn(2, 48, num_kv_heads, 16, generator=generator).to(dtype)
    own = torch.randn(2, num_requests, 32, num_kv_heads, 16, generator=generator).to(dtype)
    lens = torch.randint(1, 33, (num_requests,), generator=generator)
    mask = torch.zeros(num_requests, 32, dtype=dtype).masked_fill_(torch.arange(32) >= lens[:, None], -torch.inf)
    k, v = torch.cat([prefix[:, None].expand(-1, num_requests, -1, -1, -1), own], dim=2)
    whole = torch.cat([torch.zeros(num_requests, 48, dtype=dtype), mask], dim=1)
    expected = attention.decode_attention(q, k, v, whole[:, None, None])
    out = attention.decode_behind_prefix(q, (prefix[0], prefix[1]), own[0], own[1], mask[:, None, None])
    assert out.dtype is dtype
    torch.testing.assert_close(out, expected, atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=0)


@pytest.mark.parametrize("heads", HEADS)
def test_without_the_kernel_a_mask_hides_what_comes_later(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CPU_KERNEL", "no_such_operator")
    assert_right([5, 1, 3, 1, 8], [5, 12, 9, 1, 8], heads)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 128])
def test_scores_are_scaled_by_the_root_of_the_head_dim(head_dim: int) -> None:
    assert_right([3, 1], [6, 4], head_dim=head_dim)


def test_a_sequence_gives_the_same_alone_and_packed() -> None:
    query_lens, kv_lens = [5, 1, 3], [5, 12, 9]
    q, k, v = inputs(query_lens, kv_lens)
    packed = sdpa(q, k, v, query_lens, kv_lens).split(query_lens)
    parts = zip(q.split(query_lens), k.split(kv_lens), v.split(kv_lens), packed, strict=True)
    for one_q, one_k, one_v, expected in parts:
        assert torch.equal(sdpa(one_q, one_k, one_v, [len(one_q)], [len(one_k)]), expected)


def test_chunks_of_a_prompt_add_up_to_the_whole() -> None:
    q, k, v = inputs([10], [10])
    whole = sdpa(q, k, v, [10], [10])
    chunks = [sdpa(q[start:end], k[:end], v[:end], [end - start], [end]) for start, end in [(0, 4), (4, 8), (8, 10)]]
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=1e-5, atol=2e-6)


def test_views_into_a_larger_slab_are_read_in_place() -> None:
    q, k, v = inputs([3], [8])
    qkv = torch.cat([q, q, q], dim=1)  # queries as a slice of a projection: not contiguous
    slab = torch.full((2, 20, 2, 16), math.nan)
    slab[0, :8], slab[1, :8] = k, v
    found = sdpa(qkv[:, 4:8], slab[0, :8], slab[1, :8], [3], [8])
    assert torch.equal(found, sdpa(q, k, v, [3], [8]))


def test_the_inputs_are_left_as_they_were() -> None:
    tensors = inputs([4, 1], [6, 3])
    before = [tensor.clone() for tensor in tensors]
    sdpa(*tensors, [4, 1], [6, 3])
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_lengths_that_do_not_pair_up_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        sdpa(*inputs([2, 2], [2, 2]), [2, 2], [4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_so(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in inputs([5, 1], [7, 9]))
    found = sdpa(q, k, v, [5, 1], [7, 9])
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), reference(q, k, v, [5, 1], [7, 9]), rtol=0.02, atol=0.02)


# The choice


def test_an_unknown_back_end_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'xformers': choose one of auto, sdpa, flash-attn\."):
        select_backend("xformers", CPU, torch.float32)


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_a_cpu_takes_sdpa(name: str) -> None:
    assert select_backend(name, CPU, torch.bfloat16) is sdpa


def install(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    """Make `import flash_attn` work, or fail."""
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn") if installed else None)


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "reason"),
    [
        (CPU, torch.bfloat16, True, "it needs a CUDA device, and this run is on cpu"),
        (CUDA, torch.float32, True, "it computes float16 and bfloat16 only"),
        (CUDA, torch.bfloat16, False, r"the package is not installed \(pip install 'mini-vllm\[gpu\]'\)"),
    ],
)
def test_flash_attention_where_it_cannot_run_is_refused_with_the_reason_and_passed_over_by_auto(
    device: torch.device, dtype: torch.dtype, installed: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, installed=installed)
    with pytest.raises(ModelError, match=f"flash-attn cannot run here: {reason}. Choose sdpa."):
        select_backend("flash-attn", device, dtype)
    assert select_backend("auto", device, dtype) is sdpa
    assert select_backend("sdpa", device, dtype) is sdpa


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_is_taken_where_it_can_run(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, installed=True)
    assert select_backend("auto", CUDA, dtype) is attention.flash_attn
    assert select_backend("flash-attn", CUDA, dtype) is attention.flash_attn
    assert select_backend("sdpa", CUDA, dtype) is sdpa


def test_flash_attention_is_told_where_each_sequence_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = lambda *args, **kwargs: calls.append((args, kwargs)) or args[0]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    q, k, v = inputs([5, 1, 3], [5, 12, 9])
    attention.flash_attn(q, k, v, [5, 1, 3], [5, 12, 9])
    ((args, kwargs),) = calls
    assert all(given is tensor for given, tensor in zip(args, (q, k, v), strict=True))
    starts = kwargs.pop("cu_seqlens_q"), kwargs.pop("cu_seqlens_k")
    assert [tensor.tolist() for tensor in starts] == [[0, 5, 6, 9], [0, 5, 17, 26]]
    assert {tensor.dtype for tensor in starts} == {torch.int32}
    assert kwargs == {"max_seqlen_q": 5, "max_seqlen_k": 12, "causal": True}
