"""How large the pool is, and how it is told."""

import pytest
import torch

from common.attention import sdpa
from common.errors import ModelError
from common.units import format_bytes, parse_bytes
from tests.kit.models import ScriptModel
from v0_2_block_manager import memory
from v0_2_block_manager.engine_args import EngineArgs
from v0_2_block_manager.memory import bytes_per_block, pool_size, profiled_tokens


def smol():
    """A model of SmolLM2's shape, without its weights."""
    return ScriptModel(
        [65], prompt_len=1, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, max_position_embeddings=8192
    )


@pytest.fixture
def default_pool(monkeypatch, default_pool_bytes):
    """The default that users have, which the tests otherwise replace; here no pool is made."""
    monkeypatch.setattr(memory, "CPU_POOL_BYTES", default_pool_bytes)


@pytest.mark.usefixtures("default_pool")
def test_the_default_on_a_cpu_is_1_gib_as_design_md_works_it_out_by_hand():
    pool = pool_size(EngineArgs(), smol(), sdpa)
    assert bytes_per_block(EngineArgs(), smol()) == 720 * 1024
    assert (pool.num_blocks, pool.num_tokens) == (1456, 23296)
    assert pool.explanation == (
        "KV pool (1.00 GiB, the default on a CPU): 1456 blocks of 2 x 30 layers x 3 KV heads x 64 x 4 bytes x 16 "
        "tokens = 720.00 KiB, together 1023.75 MiB for 23296 tokens"
    )


def test_num_blocks_and_kv_cache_memory_are_taken_as_asked():
    assert pool_size(EngineArgs(num_blocks=7), smol(), sdpa).num_blocks == 7
    assert pool_size(EngineArgs(kv_cache_memory="720KiB"), smol(), sdpa).num_blocks == 1
    assert pool_size(EngineArgs(kv_cache_memory="512MiB", block_size=32), smol(), sdpa).num_blocks == 364


@pytest.mark.usefixtures("default_pool")
def test_bfloat16_holds_twice_as_many_tokens():
    model = smol()
    model.dtype = torch.bfloat16
    assert pool_size(EngineArgs(), model, sdpa).num_tokens == 2 * 23296


def test_on_a_gpu_the_profiled_step_is_what_is_asked_or_8192():
    model = smol()
    assert profiled_tokens(EngineArgs(max_model_len=512), model) == 512
    assert profiled_tokens(EngineArgs(), model) == 8192
    model.config = ScriptModel([65], 1, max_position_embeddings=131072).config
    assert profiled_tokens(EngineArgs(), model) == 8192


@pytest.mark.parametrize(
    ("amount", "num_bytes"),
    [("1GiB", 2**30), ("1.5 GiB", 3 * 2**29), ("512mib", 2**29), ("2GB", 2 * 10**9), ("4096", 4096), (4096, 4096)],
)
def test_amounts_of_memory_are_read(amount, num_bytes):
    assert parse_bytes(amount, "x") == num_bytes


@pytest.mark.parametrize("amount", ["", "GiB", "1 GiBs", "-1GiB", "1e9", "0", "0GiB", "1,5GiB", None, True])
def test_amounts_that_are_none_are_refused(amount):
    with pytest.raises(ModelError, match="kv_cache_memory must be"):
        parse_bytes(amount, "kv_cache_memory")


def test_amounts_are_written_in_the_largest_unit_that_fits():
    assert [format_bytes(n) for n in (5, 1024, 1536, 2**20, 2**30, 3 * 2**30)] == [
        "5 bytes",
        "1.00 KiB",
        "1.50 KiB",
        "1.00 MiB",
        "1.00 GiB",
        "3.00 GiB",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_pool_is_what_the_largest_step_leaves(tiny):
    from common.llama import Llama

    model = Llama.from_folder(tiny.folder, torch.device("cuda"), torch.bfloat16)
    pool = pool_size(EngineArgs(gpu_memory_utilization=0.1), model, sdpa)
    total = torch.cuda.mem_get_info()[1]
    assert 0 < pool.num_blocks * bytes_per_block(EngineArgs(), model) < 0.1 * total
    assert "for a step of 512 tokens" in pool.explanation
