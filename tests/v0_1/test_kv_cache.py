"""The slab: what it reserves, what it holds, and that a step reads what was written before."""

import pytest
import torch

from common.attention import sdpa
from tests.conftest import ROOT
from tests.kit.models import SCRIPT_CONFIG, ScriptModel
from tests.kit.tokenizers import byte_tokenizer
from tools.citations import num_code_lines
from v0_1_single_request import LLM
from v0_1_single_request.kv_cache import KVCache

CPU = torch.device("cpu")


def cache(max_model_len=10):
    return KVCache(SCRIPT_CONFIG, max_model_len, CPU, torch.float32, sdpa)


def test_bytes_reserved_are_for_the_longest_sequence_and_bytes_used_for_the_tokens_stored():
    kv_cache = cache()
    per_token = SCRIPT_CONFIG.kv_elements_per_token * 4
    assert per_token == 2 * 1 * 1 * 8 * 4
    assert (kv_cache.reserved_bytes, kv_cache.used_bytes) == (10 * per_token, 0)
    kv_cache.begin_step(6)
    kv_cache.begin_step(1)
    assert (kv_cache.reserved_bytes, kv_cache.used_bytes) == (10 * per_token, 7 * per_token)


def test_attention_in_steps_equals_attention_at_once():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 7, 1, 8)
    expected = sdpa(q, k, v, [7], [7])
    kv_cache, start = cache(), 0
    for query_len in (4, 2, 1):
        step = slice(start, start + query_len)
        kv_cache.begin_step(query_len)
        torch.testing.assert_close(kv_cache.attend(0, q[step], k[step], v[step]), expected[step], atol=1e-6, rtol=0)
        start += query_len


def test_the_slab_can_be_filled_and_not_passed():
    kv_cache = cache(max_model_len=4)
    kv_cache.begin_step(4)
    with pytest.raises(AssertionError, match="longer than the slab"):
        kv_cache.begin_step(1)


def test_the_context_unset_ends_where_its_slab_would_pass_1_gib():
    # 2 * 30 * 3 * 64 elements of 4 bytes: 45 KiB a token, so 23,301 tokens in 1 GiB.
    shape = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64}
    for trained, length in ((8192, 8192), (131072, 23301)):
        model = ScriptModel([65], prompt_len=1, max_position_embeddings=trained, **shape)
        assert LLM(model, tokenizer=byte_tokenizer()).max_model_len == length


def test_the_engines_files_stay_under_200_lines_of_code():
    folder = ROOT / "v0_1_single_request"
    assert (
        sum(num_code_lines((folder / name).read_text()) for name in ("engine_args.py", "kv_cache.py", "llm.py")) < 200
    )
