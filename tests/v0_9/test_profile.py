"""v0.5's profiler on this engine: whoever computes, a step has the same parts."""

import pytest

from common import llama
from common.sampling_params import SamplingParams
from v0_5_bench.harness.explain import profiler
from v0_5_bench.harness.explain.profiler import Profiler
from v0_9_fast import LLM
from v0_9_fast.kernels.bindings import Kernels
from v0_9_fast.kv_cache import KVCache
from v0_9_fast.paged_kv_cache import PagedKVCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [40, 41]]


@pytest.fixture(params=["c", "onednn", "torch"])
def llm(request, kernels, tiny):
    """An engine whose products are those of the kernels, of oneDNN beside the kernels, or of PyTorch alone."""
    flags = {"kernels": "torch"} if request.param == "torch" else {"linear_backend": request.param}
    return LLM(tiny.folder, num_blocks=8, **flags)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_products_and_attention_are_found_whoever_computes_them(llm, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: now[0])

    def slow(seconds, function):
        def call(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        return call

    for owner, name, seconds in (
        (Kernels, "product", 1.0),
        (llama, "linear", 1.0),
        (Kernels, "rms_norm", 100.0),
        (llama, "rms_norm", 100.0),
        (KVCache, "attend", 10_000.0),
        (PagedKVCache, "attend", 10_000.0),
    ):
        monkeypatch.setattr(owner, name, slow(seconds, getattr(owner, name)))
    num_layers = llm.engine.model.config.num_layers
    with Profiler(llm.engine) as profile:
        tokens(llm)
    found = {part: seconds / profile.num_steps for part, seconds in profile.parts.items() if seconds}
    assert found == {
        "linear layers": 4 * num_layers + 1,
        "norms, rotary, activations": 100 * (2 * num_layers + 1),
        "attention": 10_000 * num_layers,
    }


def test_the_engine_is_afterwards_as_it_was_and_its_tokens_are_the_same(llm, kernels):
    expected, linear = tokens(llm), llama.linear
    before = [set(vars(each)) for each in (kernels, llm.engine.model, llm.engine.model_runner.kv_cache)]
    with Profiler(llm.engine) as profile:
        assert tokens(llm) == expected
    assert profile.num_steps == 6
    assert [set(vars(each)) for each in (kernels, llm.engine.model, llm.engine.model_runner.kv_cache)] == before
    assert llama.linear is linear
    assert tokens(llm) == expected
