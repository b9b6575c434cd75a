"""From the flags to what computes, with and without a compiler."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.errors import ModelError
from v0_9_fast import LLM, loader
from v0_9_fast.engine_args import EngineArgs
from v0_9_fast.kernels import bindings, build
from v0_9_fast.kv_cache import KVCache
from v0_9_fast.model import FastLlama
from v0_9_fast.paged_kv_cache import PagedKVCache

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
GREEDY = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(bindings, "load", lambda: "there is no C compiler (cc, gcc, clang)")
    loader._warn_once.cache_clear()


@pytest.mark.parametrize(
    "flags",
    [
        {"kernels": "c", "linear_backend": "c"},
        {"kernels": "c", "linear_backend": "onednn"},
        {"kernels": "c", "linear_backend": "auto"},
        {"kernels": "torch"},
    ],
)
def test_the_tokens_are_transformers_whatever_computes_them(kernels, tiny, flags):
    from common.sampling_params import SamplingParams

    prompts = [[7, 8, 9, 10], list(range(60, 100)), [5]]
    llm = LLM(tiny.folder, num_blocks=40, max_num_batched_tokens=16, **flags)
    outputs = llm.generate(prompts, SamplingParams(**GREEDY, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [tiny.tokens(prompt, 24) for prompt in prompts]


def test_the_flags_choose_the_model_and_the_pool(kernels, tiny):
    kinds = {}
    for kernels in ("auto", "c", "torch"):
        engine = LLM(tiny.folder, num_blocks=8, kernels=kernels).engine
        kinds[kernels] = isinstance(engine.model, FastLlama), type(engine.model_runner.kv_cache)
    assert kinds == {"auto": (True, PagedKVCache), "c": (True, PagedKVCache), "torch": (False, KVCache)}


def test_a_ready_model_of_pytorch_attends_in_place(kernels, tiny):
    """Its keys and values are views with strides of their own."""
    from common import loading
    from common.sampling_params import SamplingParams

    model, tokenizer = loading.load(tiny.folder, None, device="cpu", dtype="float32")
    llm = LLM(model, tokenizer=tokenizer, num_blocks=40, max_num_batched_tokens=16)
    assert isinstance(llm.engine.model_runner.kv_cache, PagedKVCache)
    prompts = [[7, 8, 9, 10], list(range(60, 100))]
    outputs = llm.generate(prompts, SamplingParams(**GREEDY, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [tiny.tokens(prompt, 24) for prompt in prompts]


def test_other_defaults_of_pytorch_change_nothing(kernels, tiny):
    """What C writes into is float32 on the CPU, whatever a process has made its default."""
    from common.sampling_params import SamplingParams

    llm = LLM(tiny.folder, num_blocks=40, linear_backend="c")
    torch.set_default_dtype(torch.bfloat16)
    try:
        outputs = llm.generate([[7, 8, 9]], SamplingParams(**GREEDY, ignore_eos=True), use_tqdm=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert outputs[0].outputs[0].token_ids == tiny.tokens([7, 8, 9], 24)


def test_a_library_that_cannot_be_loaded_is_said(monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_text("no library")
    monkeypatch.setattr(bindings, "library", lambda _: tmp_path / "broken.so")
    bindings.load.cache_clear()
    try:
        assert "the compiled kernels cannot be loaded (" in bindings.load()
    finally:
        bindings.load.cache_clear()


def test_a_draft_model_is_computed_by_the_kernels_too(kernels, tiny):
    llm = LLM(tiny.folder, num_blocks=8, speculative_method="draft_model", draft_model=str(tiny.folder))
    drafter = llm.engine.model_runner.drafter
    assert isinstance(drafter.model, FastLlama)
    assert isinstance(drafter.kv_cache, PagedKVCache)


def test_what_computes_is_told_in_a_line(kernels, tiny):
    def explained(**flags):
        return loader.explain(LLM(tiny.folder, num_blocks=8, **flags).engine.model)

    assert explained(kernels="torch") == "Products and attention: PyTorch"
    assert explained(weights_dtype="float16") == (
        "Products: qkv_proj C (float16), o_proj C (float16), gate_up_proj C (float16), down_proj C (float16), "
        "lm_head C (float16); attention: kernels in C, on blocks in place"
    )
    assert "qkv_proj oneDNN, " in explained(linear_backend="onednn")


def test_without_a_compiler_it_runs_on_pytorch_and_says_so_once(no_compiler, tiny, caplog):
    with caplog.at_level(logging.WARNING):
        engines = [LLM(tiny.folder, num_blocks=8).engine for _ in range(2)]
    assert [isinstance(engine.model_runner.kv_cache, PagedKVCache) for engine in engines] == [False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "The engine runs on PyTorch alone, which is slower: there is no C compiler (cc, gcc, clang)."
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kernels": "c"}, r"kernels c needs the kernels in C, and there is no C compiler"),
        ({"weights_dtype": "float16"}, r"weights_dtype float16 needs the kernels in C, and there is no C compiler"),
        ({"linear_backend": "c"}, r"linear_backend c needs the kernels in C, and there is no C compiler"),
    ],
)
def test_what_needs_a_compiler_is_refused_without_one(no_compiler, tiny, flags, message):
    with pytest.raises(ModelError, match=message):
        LLM(tiny.folder, num_blocks=8, **flags)


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (torch.device("cuda"), torch.float32, "they run on a CPU, and the model is on cuda"),
        (CPU, torch.bfloat16, "they compute in float32, and dtype is bfloat16"),
    ],
)
def test_elsewhere_and_in_other_dtypes_it_is_pytorch(device, dtype, reason):
    assert loader.kernels_for(EngineArgs(), device, dtype) is None
    with pytest.raises(ModelError, match=reason):
        loader.kernels_for(EngineArgs(kernels="c"), device, dtype)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kernels": "cuda"}, "kernels must be one of auto, c, triton, torch, got 'cuda'"),
        ({"weights_dtype": "int8"}, "weights_dtype must be one of auto, float32, float16, bfloat16, got 'int8'"),
        ({"linear_backend": "mkl"}, "linear_backend must be one of auto, c, onednn, got 'mkl'"),
        (
            {"kernels": "torch", "weights_dtype": "float16"},
            "weights_dtype float16 needs the kernels in C: leave kernels torch",
        ),
        ({"kernels": "triton", "weights_dtype": "float16"}, "needs the kernels in C: leave kernels triton out"),
        ({"linear_backend": "onednn", "weights_dtype": "bfloat16"}, "linear_backend onednn cannot multiply"),
        (
            {"linear_backend": "c", "kernels": "torch"},
            "linear_backend c needs the kernels in C: leave kernels torch out",
        ),
    ],
)
def test_flags_that_cannot_be_are_refused_in_a_sentence(flags, message):
    with pytest.raises(ModelError, match=message):
        EngineArgs(**flags)


class TestBuild:
    def test_a_missing_compiler_is_said(self, monkeypatch):
        monkeypatch.setenv("CC", "no-such-compiler")
        with pytest.raises(build.BuildError, match=r"there is no C compiler \(no-such-compiler\)"):
            build.library(None)

    def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(self, monkeypatch, tmp_path):
        compiler = tmp_path / "cc"
        compiler.write_text("#!/bin/sh\necho 'tile.h:1: error: no such thing' >&2\n[ \"$1\" = --version ]\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path / "cache"))
        with pytest.raises(build.BuildError, match=r"the C compiler failed \(tile.h:1: error: no such thing\)"):
            build.library(None)
        assert list((tmp_path / "cache").glob("*.so")) == []

    def test_a_cache_that_cannot_be_written_is_said(self, kernels, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path / "file"))
        with pytest.raises(build.BuildError, match="cannot be built into the cache"):
            build.library(None)

    def test_another_source_compiler_flag_or_processor_makes_another_library(self, kernels, monkeypatch, tmp_path):
        def key(compiler="cc", flags=build.FLAGS, openmp=None):
            return build._key(build.shutil.which(compiler), flags, openmp)

        first = key()
        assert key() == first
        keys = {first, key(flags=(*build.FLAGS, "-g")), key(openmp="libgomp.so.1")}
        monkeypatch.setattr(build, "processor", lambda: "another")
        keys.add(key())
        monkeypatch.undo()
        for source in build.SOURCES.glob("*.[ch]"):
            (tmp_path / source.name).write_text(source.read_text())
        (tmp_path / "rows.c").write_text("/* changed */\n")
        monkeypatch.setattr(build, "SOURCES", tmp_path)
        keys.add(key())
        assert len(keys) == 5

    def test_two_processes_that_start_at_once_build_once_and_both_can_compute(self, kernels, tmp_path):
        code = (
            "import logging, sys, torch; logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
            "from v0_9_fast.kernels import bindings; kernels = bindings.load()\n"
            "print(kernels.product(torch.ones(1, 3), kernels.pack(torch.ones(2, 3), torch.float32), 2).tolist())"
        )
        environment = os.environ | {"MINI_VLLM_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
        outputs = [process.communicate()[0] for process in processes]
        assert [output.splitlines()[-1] for output in outputs] == ["[[3.0, 3.0]]"] * 2
        assert sum("Compiling the kernels" in output for output in outputs) == 1
        assert len(list(tmp_path.glob("*.so"))) == 1
