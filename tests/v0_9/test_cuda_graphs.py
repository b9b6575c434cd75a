"""The path of a GPU, without one: recordings that only compute again, and attention in PyTorch.

The kernel is run by Triton's interpreter, where Triton is installed. On a real card, all is compared with PyTorch.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.attention import sdpa, select_backend
from common.errors import ModelError
from common.llama import Llama
from common.sampling_params import SamplingParams
from v0_9_fast import LLM, cuda_graphs, loader
from v0_9_fast.cuda_graphs import RecordedLlama, Recordings, num_bytes, sizes_for
from v0_9_fast.cuda_kv_cache import CudaKVCache
from v0_9_fast.engine_args import EngineArgs
from v0_9_fast.kv_cache import KVCache

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYER = 1
PROMPTS = [[7, 8, 9, 10], list(range(60, 100)), [5], [30, 31, 32]]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def in_pytorch(q, keys, values, tables, context_lens):
    """What `kernels.decode.paged_decode` computes, a request at a time."""
    outputs = []
    for query, table, context_len in zip(q, tables, context_lens.tolist(), strict=True):
        blocks = table[: -(-context_len // keys.shape[1])].long()
        k, v = (part[blocks].flatten(0, 1)[:context_len] for part in (keys, values))
        outputs.append(sdpa(query[None], k, v, [1], [context_len]))
    return torch.cat(outputs)


class FakeGraphs:
    """In place of `cuda_graphs.record`: computes again, and puts the result where the first one was."""

    def __init__(self):
        self.sizes, self.replayed, self.memories = [], [], []

    def record(self, run, memory):
        hidden = run()
        self.sizes.append(len(hidden))
        self.memories.append(memory)

        def replay():
            self.replayed.append(len(hidden))
            hidden.copy_(run())

        return replay, hidden, "the memory"


@pytest.fixture
def graphs(monkeypatch):
    """Engines on a CPU take the path of a GPU, with recordings that are none."""
    fake = FakeGraphs()
    monkeypatch.setattr(cuda_graphs, "record", fake.record)
    monkeypatch.setattr(
        loader, "decode_attention_for", lambda args, device: None if args.kernels == "torch" else in_pytorch
    )
    return fake


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pool_of(num_blocks=40, block_size=4, max_num_seqs=12, sizes=(1, 2, 4, 8), decode=in_pytorch, device=CPU):
    config = SimpleNamespace(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=64)
    pool = CudaKVCache(
        config, num_blocks, block_size, device, torch.float32, sdpa, decode, max_num_seqs=max_num_seqs, sizes=sizes
    )
    pool.kv.fill_(torch.nan)  # what is read without having been written shows
    return pool


def qkv_of(num_tokens):
    return torch.randn(num_tokens, 8, 16).split([4, 2, 2], dim=1)


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({}, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]),
        ({"max_num_seqs": 1}, [1]),
        ({"max_num_seqs": 5}, [1, 2, 4, 5]),
        ({"max_num_batched_tokens": 20}, [1, 2, 4, 8, 16, 20]),
        ({"max_num_seqs": 1000, "max_num_batched_tokens": 2000}, list(cuda_graphs.SIZES)),
    ],
)
def test_sizes_are_far_apart_and_end_with_what_may_run(flags, sizes):
    assert sizes_for(EngineArgs(**flags)) == sizes


class TestPool:
    @pytest.mark.parametrize(("num", "size"), [(1, 1), (3, 4), (8, 8), (5, 8), (9, None)])
    def test_a_step_of_decodes_is_padded_to_the_next_size(self, num, size):
        pool = pool_of()
        pool.begin_step([[i, 20 + i] for i in range(num)], [1] * num, [4 + i % 4 + 1 for i in range(num)])
        assert pool.size == size
        rows = pool.inputs[: size or num, :4].tolist()
        assert rows[:num] == [[(20 + i) * 4 + i % 4, 5 + i % 4, i, 20 + i] for i in range(num)]
        assert rows[num:] == [[40 * 4, 1, 40, 0]] * ((size or num) - num)
        assert pool.slots[: len(rows)].tolist() == [row[0] for row in rows]

    def test_what_a_longer_step_left_in_the_rows_is_not_read(self):
        pool = pool_of()
        pool.begin_step([list(range(16))] * 4, [1] * 4, [64] * 4)
        pool.begin_step([[7], [8]], [1, 1], [1, 2])
        q, k, v = qkv_of(2)
        pool.kv[LAYER, :, 8, 0] = 1.0  # the token before the second one's
        ours = pool.attend(LAYER, q, k, v)
        keys, values = torch.cat([k[:1], torch.ones(1, 2, 16), k[1:]]), torch.cat([v[:1], torch.ones(1, 2, 16), v[1:]])
        torch.testing.assert_close(ours, sdpa(q, keys, values, [1, 1], [1, 2]))

    def test_rows_of_padding_write_to_the_spare_block_alone_and_are_finite(self):
        pool = pool_of()
        pool.begin_step([[3], [5], [9]], [1] * 3, [1] * 3)
        q, k, v = qkv_of(4)
        out = pool.attend(LAYER, q, k, v)
        assert out.isfinite().all()
        written = (~pool.kv[LAYER, 0].isnan()).any(-1).any(-1).nonzero().tolist()
        assert written == [[3, 0], [5, 0], [9, 0], [40, 0]]
        assert pool.kv.shape[2] == 41

    def test_decodes_beside_chunks_equal_attention_at_once(self):
        pool = pool_of()
        tables = [[11, 2], [30, 31, 32, 33, 34], [4, 17, 1]]
        lens, keys, values = [0, 0, 0], [torch.empty(0, 2, 16)] * 3, [torch.empty(0, 2, 16)] * 3
        for query_lens in ([5, 12, 0], [1, 3, 7], [1, 1, 1], [0, 0, 3], [1, 1, 1]):
            order = sorted((i for i in range(3) if query_lens[i]), key=lambda i: query_lens[i] > 1)
            own = [query_lens[i] for i in order]
            q, k, v = qkv_of(sum(own))
            for i, own_k, own_v in zip(order, k.split(own), v.split(own), strict=True):
                keys[i], values[i] = torch.cat([keys[i], own_k]), torch.cat([values[i], own_v])
                lens[i] += len(own_k)
            pool.begin_step([tables[i] for i in order], own, [lens[i] for i in order])
            assert (pool.size is None) == any(n > 1 for n in own)
            ours = pool.attend(LAYER, q, k, v)
            theirs = sdpa(
                q,
                torch.cat([keys[i] for i in order]),
                torch.cat([values[i] for i in order]),
                own,
                [lens[i] for i in order],
            )
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


class TestDispatch:
    @pytest.fixture
    def recorded(self, graphs, tiny):
        """A model, its pool and its recordings."""
        config, weights = tiny_weights(tiny)
        model = RecordedLlama(config, weights)
        pool = CudaKVCache(config, 20, 4, CPU, torch.float32, sdpa, in_pytorch, max_num_seqs=6, sizes=(1, 2, 4))
        pool.recordings = Recordings(model, pool)
        return model, pool

    def test_the_largest_size_is_recorded_first_and_all_share_its_memory(self, recorded, graphs):
        assert graphs.sizes == [4, 2, 1]
        assert graphs.memories == [None, "the memory", "the memory"]
        assert graphs.replayed == []

    def test_recording_leaves_the_blocks_alone(self, recorded):
        _, pool = recorded
        assert pool.kv[:, :, :20].count_nonzero() == 0
        assert pool.kv[:, :, 20].count_nonzero() > 0

    def test_decodes_are_replayed_and_everything_else_is_computed(self, recorded, graphs):
        model, pool = recorded

        def step(query_lens, ends, **arguments):
            pool.begin_step([[i, 8 + i] for i in range(len(ends))], query_lens, ends)
            positions = torch.tensor([end - n + j for n, end in zip(query_lens, ends, strict=True) for j in range(n)])
            return model.forward(positions + 5, positions, pool, **arguments)

        with torch.inference_mode():
            step([1, 5], [1, 5])  # with a chunk
            step([1] * 5, [1] * 5)  # larger than any
            step([1, 1], [2, 6], num_layers=1)  # some layers
            assert graphs.replayed == []
            assert step([1], [2]).shape == (1, 64)
            assert step([1, 1, 1], [2, 7, 3], rows=torch.tensor([2, 0])).shape == (2, 64)
            assert graphs.replayed == [1, 4]

    def test_a_replay_gives_what_computing_gives_and_is_not_overwritten_by_the_next(self, recorded, tiny):
        model, pool = recorded
        plain = Llama(*tiny_weights(tiny))
        control = KVCache(plain.config, 20, 4, CPU, torch.float32, sdpa)
        ours, theirs = [], []
        for position, rows in ((0, None), (1, torch.tensor([1])), (2, None)):
            for llama, cache, outputs in ((model, pool, ours), (plain, control, theirs)):
                cache.begin_step([[3], [6], [2]], [1] * 3, [position + 1] * 3)
                with torch.inference_mode():
                    ids = torch.tensor([9, 60, 33]) + position
                    outputs.append(llama.forward(ids, torch.full((3,), position), cache, rows=rows))
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


def tiny_weights(tiny):
    from common.config import ModelConfig
    from common.weights import load_weights

    config = ModelConfig.from_folder(tiny.folder)
    return config, load_weights(tiny.folder, config, CPU, torch.float32)


def answers(llm, num_tokens=24, prompts=PROMPTS):
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


class TestEngine:
    @pytest.mark.parametrize(
        "flags",
        [
            {"num_blocks": 40},
            {"num_blocks": 40, "max_num_seqs": 2},
            {"num_blocks": 7, "max_num_batched_tokens": 16},  # preempted
            {"num_blocks": 40, "speculative_method": "early_exit"},
            {"num_blocks": 40, "speculative_method": "ngram"},
        ],
    )
    def test_the_tokens_are_transformers(self, graphs, tiny, flags):
        llm = LLM(tiny.folder, **flags)
        assert isinstance(llm.engine.model, RecordedLlama)
        assert answers(llm) == [tiny.tokens(prompt, 24) for prompt in PROMPTS]
        assert "early_exit" in flags.values() or graphs.replayed

    def test_a_draft_model_has_recordings_of_its_own(self, graphs, tiny):
        llm = LLM(tiny.folder, num_blocks=40, speculative_method="draft_model", draft_model=str(tiny.folder))
        pools = llm.engine.model_runner.kv_cache, llm.engine.model_runner.drafter.kv_cache
        assert pools[0].recordings is not pools[1].recordings
        assert answers(llm) == [tiny.tokens(prompt, 24) for prompt in PROMPTS]
        assert graphs.replayed

    def test_a_ready_model_attends_in_place_without_recordings(self, graphs, tiny):
        llm = LLM(**tiny.ready, num_blocks=40)
        assert answers(llm) == [tiny.tokens(prompt, 24) for prompt in PROMPTS]
        assert isinstance(llm.engine.model_runner.kv_cache, CudaKVCache)
        assert graphs.sizes == []

    def test_kernels_torch_is_the_plain_path(self, graphs, tiny):
        engine = LLM(tiny.folder, num_blocks=8, kernels="torch").engine
        assert type(engine.model) is Llama
        assert type(engine.model_runner.kv_cache) is KVCache
        assert graphs.sizes == []

    def test_it_is_told_in_a_line(self, graphs, tiny):
        assert loader.explain(LLM(tiny.folder, num_blocks=8).engine.model) == (
            "Products: PyTorch; attention of decodes: Triton, on blocks in place; steps of decodes: CUDA graphs"
        )

    def test_room_is_left_for_the_recordings_of_both_models(self, graphs, tiny):
        recorded, plain = LLM(tiny.folder, num_blocks=8).engine.model, Llama(*tiny_weights(tiny))
        args = EngineArgs(max_num_seqs=4)
        assert num_bytes(args, recorded, None) == 3 * cuda_graphs.BYTES_PER_SIZE
        assert num_bytes(args, recorded, recorded) == 6 * cuda_graphs.BYTES_PER_SIZE
        assert num_bytes(args, plain, None) == 0


class TestFallbacks:
    def test_without_triton_it_is_pytorch_and_says_so_once(self, monkeypatch, caplog):
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "v0_9_fast.kernels.decode", raising=False)
        loader._warn_once.cache_clear()
        with caplog.at_level(logging.WARNING):
            assert [loader.decode_attention_for(EngineArgs(), CUDA) for _ in range(2)] == [None, None]
        [record] = caplog.records
        assert record.getMessage().startswith(
            "The engine runs on PyTorch alone, which is slower: Triton, which comes with PyTorch's builds for CUDA on "
            "Linux, cannot be imported ("
        )
        with pytest.raises(ModelError, match=r"kernels triton cannot run here: Triton, which comes with"):
            loader.decode_attention_for(EngineArgs(kernels="triton"), CUDA)

    def test_on_a_cpu_it_is_nobodys_default_and_refused_where_it_is_asked_for(self, tiny):
        assert loader.decode_attention_for(EngineArgs(), CPU) is None
        with pytest.raises(ModelError, match=r"kernels triton cannot run here: it runs on a GPU, and .* on the cpu"):
            LLM(tiny.folder, num_blocks=8, kernels="triton", device="cpu")

    @pytest.mark.parametrize("flags", [{"kernels": "c"}, {"kernels": "torch"}, {"weights_dtype": "float16"}])
    def test_what_asks_for_something_else_does_not_get_it(self, flags):
        assert loader.decode_attention_for(EngineArgs(**flags), CUDA) is None

    def test_what_cannot_be_recorded_runs_on_pytorch_and_is_said(self, graphs, monkeypatch, tiny, caplog):
        def fail(run, memory):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(cuda_graphs, "record", fail)
        with caplog.at_level(logging.WARNING):
            llm = LLM(tiny.folder, num_blocks=40)
        assert [record.getMessage() for record in caplog.records] == [
            "Decodes run on PyTorch alone, since they cannot be recorded as CUDA graphs: CUDA out of memory"
        ]
        assert answers(llm) == [tiny.tokens(prompt, 24) for prompt in PROMPTS]
        with pytest.raises(ModelError, match=r"kernels triton cannot record decodes as CUDA graphs: CUDA out of"):
            LLM(tiny.folder, num_blocks=8, kernels="triton")


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="TestKernel runs in this process")
def test_the_kernel_in_tritons_interpreter():
    pytest.importorskip("triton")
    # A process of its own: Triton has to be told before it is imported, and PyTorch may have done that here.
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "TestKernel"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device")
class TestKernel:
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "head_dim", "block_size", "lens"),
        [
            (4, 2, 16, 4, [1, 7]),
            (4, 2, 64, 16, [300]),  # in parts
            (9, 3, 64, 16, [5, 130, 64]),
            (8, 8, 80, 8, [1, 2, 64, 65, 63]),
            (8, 1, 128, 32, [200, 33]),
            (40, 2, 32, 24, [90]),  # a group of 20 heads
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_it_equals_attention_at_once(self, dtype, num_heads, num_kv_heads, head_dim, block_size, lens):
        from v0_9_fast.kernels.decode import paged_decode

        device = CUDA if torch.cuda.is_available() else CPU
        if device == CPU and dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter takes the bits of bfloat16 for integers")
        nums = [-(-n // block_size) for n in lens]
        free = torch.randperm(sum(nums) + 3).tolist()
        tables = [[free.pop() for _ in range(n)] for n in nums]
        pool = torch.full((2, sum(nums) + 3, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
        keys, values = torch.randn(2, sum(lens), num_kv_heads, head_dim).to(dtype)
        for table, k, v in zip(tables, keys.split(lens), values.split(lens), strict=True):
            slots = (torch.tensor(table)[:, None] * block_size + torch.arange(block_size)).flatten()[: len(k)]
            pool.flatten(1, 2)[:, slots] = torch.stack([k, v])
        # What lies behind a table is the number of no block.
        rows = torch.tensor([[0, n, *t, *[10**6] * (99 - len(t))] for n, t in zip(lens, tables, strict=True)])
        rows = rows.to(device, torch.int32)
        q = torch.randn(len(lens), num_heads + num_kv_heads, head_dim).to(dtype)[:, :num_heads]
        ours = paged_decode(q.to(device), *pool.to(device), rows[:, 2:], rows[:, 1])
        theirs = sdpa(q.float(), keys.float(), values.float(), [1] * len(lens), lens)
        assert ours.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(ours.cpu().float(), theirs, atol=tolerance, rtol=tolerance)


@needs_cuda
class TestOnACard:
    @pytest.mark.parametrize("kernels", ["triton", "torch"])
    def test_the_tokens_are_transformers(self, tiny, kernels):
        llm = LLM(tiny.folder, device="cuda", dtype="float32", num_blocks=40, kernels=kernels)
        assert answers(llm) == [tiny.tokens(prompt, 24) for prompt in PROMPTS]

    def test_a_replay_gives_what_launching_gives(self, tiny):
        llm = LLM(tiny.folder, device="cuda", dtype="float32", num_blocks=40, max_num_seqs=8, kernels="triton")
        model, pool = llm.engine.model, llm.engine.model_runner.kv_cache
        plain = KVCache(model.config, 40, 16, model.device, model.dtype, select_backend("sdpa", CUDA, model.dtype))
        for position in range(40):
            ids, positions = torch.arange(5, device=CUDA) + position, torch.full((5,), position, device=CUDA)
            outputs = []
            for cache in (pool, plain):
                cache.begin_step([[i, 10 + i, 20 + i] for i in range(5)], [1] * 5, [position + 1] * 5)
                with torch.inference_mode():
                    outputs.append(model.forward(ids, positions, cache))
            torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
