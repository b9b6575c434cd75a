"""The engines behind their one call, in processes of their own, and the comparison that asks them."""

import itertools
import json
import re

import pytest

from common.errors import ModelError
from v0_5_bench.harness import cli as harness
from v0_5_bench.harness.compare import compare, peers
from v0_5_bench.harness.compare.engines import OPERATOR_CLASSES, OUTSIDE, REST, operator_class
from v0_5_bench.harness.compare.peers import Places

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [40]]


@pytest.fixture(scope="module")
def places(tiny):
    return Places(tiny.folder, max_model_len=128)


@pytest.mark.parametrize("name", ["v0_1", "v0_5", "v0_6", "transformers", "transformers-continuous"])
def test_every_engine_here_gives_the_tokens_of_the_reference(places, tiny, name):
    lens = [6, 6, 6]
    with peers.Engine(name, peers.describe(name, places)) as engine:
        assert "torch" in engine.versions
        answer = engine.ask({"do": "generate", "prompts": PROMPTS, "output_lens": lens})
    assert answer["token_ids"] == [tiny.tokens(prompt, 6) for prompt in PROMPTS]
    assert answer["seconds"] > 0


def test_our_engines_say_when_each_answer_began_and_what_it_took(places, tiny):
    job = {"prompts": PROMPTS, "output_lens": [3, 4, 5]}
    with peers.Engine("v0_5", peers.describe("v0_5", places)) as engine:
        answer = engine.ask({"do": "generate", **job})
        streamed = engine.ask({"do": "stream", **job})["results"]
    assert answer["num_prompt_tokens"] == [3, 6, 1]
    assert all(0 < ttft <= answer["seconds"] for ttft in answer["ttfts"])
    assert [entry["num_output_tokens"] for entry in streamed] == [3, 4, 5]
    assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(streamed))


def test_a_profile_comes_with_the_answer_and_its_parts_are_those_of_the_steps(places, tiny):
    job = {"do": "generate", "prompts": PROMPTS, "output_lens": [6, 6, 6]}
    with peers.Engine("v0_5", peers.describe("v0_5", places)) as engine:
        answer = engine.ask({"do": "profile", "job": job, "profiler": "v0_5_bench.harness.explain.profiler"})
        again = engine.ask(job)
    assert answer["token_ids"] == again["token_ids"] == [tiny.tokens(prompt, 6) for prompt in PROMPTS]
    profile = answer["profile"]
    assert profile["num_steps"] == 6
    assert profile["outputs_per_step"] == 3
    assert profile["ms_per_step"] == pytest.approx(sum(profile["parts_ms"].values()))


def test_a_milestone_without_an_engine_cannot_be_profiled_and_says_so(places):
    job = {"do": "generate", "prompts": PROMPTS, "output_lens": [6, 6, 6]}
    with (
        peers.Engine("v0_1", peers.describe("v0_1", places)) as engine,
        pytest.raises(ModelError, match=r"v0_1_single_request has no LLMEngine: only v0.3 and later"),
    ):
        engine.ask({"do": "profile", "job": job, "profiler": "v0_5_bench.harness.explain.profiler"})


def test_operators_are_split_into_classes_that_add_up(places):
    with peers.Engine("v0_5", peers.describe("v0_5", places)) as engine:
        # Enough steps that what else the machine does meanwhile cannot outweigh them.
        answer = engine.ask({"do": "operators", "prompts": PROMPTS, "output_lens": [101, 101, 101]})
    assert answer["num_steps"] == 100
    classes = answer["classes_ms"]
    assert set(classes) == {*OPERATOR_CLASSES, REST, OUTSIDE}
    assert classes["linear layers"] > 0
    assert classes["attention and its memory"] > 0


@pytest.mark.usefixtures("kernels")
def test_kernels_in_c_are_operators_under_our_profiler(places):
    job = {"do": "operators", "prompts": PROMPTS, "output_lens": [11, 11, 11]}
    with peers.Engine("v0_9", peers.describe("v0_9", places, linear_backend="c")) as engine:
        unseen = engine.ask(job)
        seen = engine.ask(job | {"profiler": "v0_5_bench.harness.explain.profiler"})
        again = engine.ask(job)
    for answer in (unseen, again):  # the engine is as it was
        assert not any("kernels" in name for name in answer["largest"])
        assert answer["classes_ms"]["linear layers"] == 0
    assert {"kernels::product", "kernels::attention"} <= set(seen["largest"])
    assert seen["classes_ms"]["linear layers"] > 0
    assert seen["classes_ms"]["attention and its memory"] > 0


def test_occupancy_is_sampled_while_requests_wait(places):
    with peers.Engine("v0_5", peers.describe("v0_5", places, num_blocks=4, block_size=4)) as engine:
        answer = engine.ask({"do": "occupancy", "prompts": PROMPTS * 3, "output_lens": [4] * 9})
    assert (answer["block_size"], answer["num_blocks"]) == (4, 4)
    assert answer["samples"]
    for tokens, used, slots in answer["samples"]:
        assert 0 <= tokens <= used <= slots == 16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v0_9_nothing", "There is no engine v0_9_nothing: choose from v0_1"),
        ("vllm", "vllm needs a virtual environment of its own: name it with --vllm-venv"),
        ("llama.cpp", "llama.cpp needs a virtual environment of its own: name it with --llama-venv"),
    ],
)
def test_an_engine_that_is_not_here_is_named_with_what_to_do(places, name, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        peers.describe(name, places)


def test_llama_cpp_is_compared_in_float32_alone(tiny, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with pytest.raises(ModelError, match=r"llama\.cpp is compared in float32, not in bfloat16"):
        peers.describe("llama.cpp", Places(tiny.folder, llama_venv=tmp_path, dtype="bfloat16"))


def test_vllm_is_asked_for_the_same_weights_without_its_prefix_cache(tiny, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    start = peers.describe("vllm", Places(tiny.folder, vllm_venv=tmp_path, max_model_len=64))
    assert start.python == str(tmp_path / "bin" / "python")
    assert start.arguments["arguments"] == {
        "model": str(tiny.folder),
        "dtype": "float32",
        "max_model_len": 64,
        "enable_prefix_caching": False,
    }
    assert start.environment["HF_HUB_OFFLINE"] == "1"
    caching = peers.describe("vllm", Places(tiny.folder, vllm_venv=tmp_path, prefix_caching=True))
    assert caching.arguments["arguments"]["enable_prefix_caching"] is True
    alone = peers.describe("vllm-in-process", Places(tiny.folder, vllm_venv=tmp_path))
    assert alone.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("name", ["v0_6", "v0_6_prefix_cache"])
def test_a_milestone_with_a_prefix_cache_is_compared_without_it_unless_prefixes_are_the_matter(tiny, name):
    assert peers.describe(name, Places(tiny.folder)).arguments["arguments"]["enable_prefix_caching"] is False
    caching = peers.describe(name, Places(tiny.folder, prefix_caching=True))
    assert caching.arguments["arguments"]["enable_prefix_caching"] is True
    older = peers.describe("v0_5", Places(tiny.folder, prefix_caching=True))
    assert "enable_prefix_caching" not in older.arguments["arguments"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mkldnn::_linear_pointwise", "linear layers"),
        ("_C::onednn_mm", "linear layers"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention and its memory"),
        ("_C::cpu_attention_with_kv_cache", "attention and its memory"),
        ("vllm::unified_attention_with_output", "attention and its memory"),
        ("vllm::unified_kv_cache_update", "attention and its memory"),
        ("aten::index_select", "attention and its memory"),
        ("kernels::product", "linear layers"),
        ("kernels::attention", "attention and its memory"),
        ("kernels::store", "attention and its memory"),
        ("kernels::rms_norm", REST),
        ("aten::mul", REST),
        ("## Call CompiledFxGraph None ##", REST),
        (OUTSIDE, OUTSIDE),
    ],
)
def test_an_operator_belongs_to_what_it_is_for_in_either_engine(name, expected):
    assert operator_class(name) == expected


def test_a_venv_without_python_is_no_venv(tiny, tmp_path):
    with pytest.raises(ModelError, match="has no bin/python"):
        peers.describe("vllm", Places(tiny.folder, vllm_venv=tmp_path))


def test_an_engine_that_does_not_start_says_what_it_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="v0_5 has ended with exit code 1"):
        peers.Engine("v0_5", peers.describe("v0_5", Places(tmp_path)))


class Scripted:
    """An engine whose answers and times are known."""

    def __init__(self, seconds, offset=0, extra=0):
        self.seconds, self.offset, self.extra, self.jobs = list(seconds), offset, extra, []
        self.versions = {}

    def ask(self, job):
        self.jobs.append(job)
        token_ids = [
            [sum(prompt) + i + self.offset for i in range(num + self.extra)]
            for prompt, num in zip(job["prompts"], job["output_lens"], strict=True)
        ]
        return {"seconds": self.seconds.pop(0), "token_ids": token_ids}


WORKLOAD = {"decode_8": compare.Workload(2, 5, 4)}


def test_ben_6_all_engines_get_the_same_new_prompts_and_the_first_round_is_left_out():
    a, b = Scripted([9.0, 2.0, 1.0]), Scripted([9.0, 2.0, 3.0])
    [(name, results)] = compare.measure({"a": a, "b": b}, WORKLOAD, 2, seed=0)
    assert name == "decode_8"
    assert [job["prompts"] for job in a.jobs] == [job["prompts"] for job in b.jobs]
    prompts = [tuple(prompt) for job in a.jobs for prompt in job["prompts"]]
    assert len(set(prompts)) == len(prompts) == 6  # nothing can come from a cache of prefixes
    assert results["samples_seconds"] == {"a": [2.0, 1.0], "b": [2.0, 3.0]}
    assert results["tokens_per_s"]["a"] == {"median": 6.0, "min": 4.0, "max": 8.0}
    assert results["ratio"]["b"] == {"median": 2.0, "min": 1.0, "max": 3.0}  # within each round
    assert results["same_answers"] == {"a": "4 of 4", "b": "4 of 4"}


@pytest.mark.parametrize(("is_warm", "num_prefixes"), [(True, 1), (False, 3)])
def test_a_warm_prefix_is_that_of_the_round_before_and_a_cold_one_is_new(is_warm, num_prefixes):
    engine = Scripted([9.0, 2.0, 1.0])
    workload = compare.Workload(2, 25, 4, shared_len=20, is_warm=is_warm)
    [(_, entry)] = compare.measure({"a": engine}, {"shared_prefix": workload}, 2, seed=0)
    assert [len({tuple(prompt[:20]) for prompt in job["prompts"]}) for job in engine.jobs] == [1, 1, 1]
    prompts = [tuple(prompt) for job in engine.jobs for prompt in job["prompts"]]
    assert len({prompt[:20] for prompt in prompts}) == num_prefixes
    assert len({prompt[20:] for prompt in prompts}) == 6
    assert (entry["input_len"], entry["shared_len"], entry["is_warm"]) == (25, 20, is_warm)


def test_the_cold_workload_never_has_the_prefix_of_the_warm_one():
    warm, cold = compare.WORKLOADS["shared_prefix"], compare.WORKLOADS["shared_prefix_cold"]
    known = {tuple(warm.requests(0, repeat)[0].prompt[:16]) for repeat in range(4)}
    assert len(known) == 1
    assert known.isdisjoint(tuple(cold.requests(0, repeat)[0].prompt[:16]) for repeat in range(4))


def test_ben_6_the_order_of_the_engines_alternates():
    order = []

    class Noting(Scripted):
        def ask(self, job):
            order.append(self.offset)
            return super().ask(job)

    list(compare.measure({"a": Noting([1.0] * 4, 0), "b": Noting([1.0] * 4, 1)}, WORKLOAD, 3, seed=0))
    assert order == [1, 0, 0, 1, 1, 0, 0, 1]


def test_the_machine_is_measured_in_every_round_that_counts():
    class Machine:
        def __init__(self):
            self.rates = [45.0, 75.0, 60.0]

        def ask(self, job):
            assert job == {"do": "measure", "num_bytes": 512 * 2**20, "size": 2048}
            return {"read_gb_s": {"median": self.rates.pop(0)}, "float32_tflop_s": {"median": 0.5}}

    [(_, entry)] = compare.measure({"a": Scripted([1.0] * 4)}, WORKLOAD, 3, 0, Machine())
    assert entry["machine"]["read_gb_s"] == {"median": 60.0, "min": 45.0, "max": 75.0}
    assert entry["machine"]["float32_tflop_s"] == {"median": 0.5, "min": 0.5, "max": 0.5}


def test_ben_6_a_shorter_answer_ends_the_comparison():
    engines = {"a": Scripted([1.0]), "b": Scripted([1.0], extra=-1)}
    with pytest.raises(ModelError, match=r"b answered \[3, 3\] tokens where \[4, 4\] were asked for"):
        list(compare.measure(engines, WORKLOAD, 1, seed=0))


def test_ben_6_an_engine_with_other_tokens_is_not_compared(tiny):
    engines = {"a": Scripted([0.0]), "b": Scripted([0.0], offset=1)}
    with pytest.raises(ModelError, match="b gives other greedy tokens than a"):
        compare.check_same(engines, Places(tiny.folder))


def test_compare_writes_every_sample_with_its_recipe_and_the_weights(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "WORKLOADS", {"decode_8": compare.Workload(3, 5, 4)})
    monkeypatch.setattr(compare, "POOL_REQUESTS", 12)
    monkeypatch.setattr(compare, "POOL_TOKENS", 64)
    monkeypatch.setattr(compare, "POOL_INPUT_LEN", (8, 20))
    monkeypatch.setattr(compare, "POOL_OUTPUT_LEN", (2, 5))
    monkeypatch.setattr(compare, "POOL_MODEL_LEN", 64)
    monkeypatch.setattr(compare.workloads, "HIGHEST_ID", 120)
    monkeypatch.setattr(compare, "RATES", {"num_bytes": 2**20, "size": 64})
    out = tmp_path / "comparison.json"
    flags = ["--engines", "v0_5", "transformers", "v0_1", "--model", tiny.folder, "--repeats", 2, "--out", out]
    code = harness.main(["compare", *map(str, flags), "--workloads", "decode_8"])
    assert code == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert found["recipe"]["settings"]["repeats"] == 2
    assert list(found["engines"]) == ["v0_5", "transformers", "v0_1"]
    assert len(found["check"]["token_ids"]) == len(compare.CHECK_TEXTS)  # looked at before anything was timed
    assert found["weights"]["model.safetensors"].startswith("sha256 ")
    assert {len(samples) for samples in found["workloads"]["decode_8"]["samples_seconds"].values()} == {2}
    assert found["workloads"]["decode_8"]["same_answers"] == dict.fromkeys(found["engines"], "6 of 6")
    assert found["workloads"]["decode_8"]["machine"]["read_gb_s"]["min"] > 0
    pool = found["occupancy"]["engines"]["v0_5"]
    assert 0 < pool["tokens_of_pool"] <= pool["blocks_of_pool"] <= 1
    assert pool["tokens_of_pool"] <= pool["tokens_of_blocks"] <= 1
    assert "decode_8" in capsys.readouterr().out


def test_prefix_caches_are_on_for_prompts_that_share_one_and_the_file_says_so(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        compare, "WORKLOADS", {"shared_prefix": compare.Workload(3, 40, 4, shared_len=32, is_warm=True)}
    )
    monkeypatch.setattr(compare.workloads, "HIGHEST_ID", 120)
    monkeypatch.setattr(compare, "RATES", {"num_bytes": 2**20, "size": 64})
    starts = {}
    describe = peers.describe
    monkeypatch.setattr(peers, "describe", lambda name, places: starts.setdefault(name, describe(name, places)))
    out = tmp_path / "shared_prefix.json"
    flags = ["--engines", "v0_6", "v0_5", "--model", tiny.folder, "--repeats", 1, "--out", out]
    code = harness.main(["compare", *map(str, flags), "--workloads", "shared_prefix"])
    assert code == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert starts["v0_6"].arguments["arguments"]["enable_prefix_caching"] is True
    assert found["recipe"]["settings"]["prefix_caching"] is True
    assert found["workloads"]["shared_prefix"]["same_answers"] == {"v0_6": "3 of 3", "v0_5": "3 of 3"}
    assert "occupancy" not in found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engines", "v0_5", "v0_5"], "the same one is named twice"),
        (["--engines", "nobody"], "There is no engine nobody"),
        (["--engines", "foo.bar"], "There is no engine foo.bar"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--out", "/proc/no/comparison.json"], "/proc/no/comparison.json cannot be written"),
        (["--vllm-venv", "/nowhere"], "has no bin/python"),
        (["--workloads", "decode_1", "shared_prefix"], "run them apart"),
    ],
)
def test_wrong_arguments_of_compare_are_told_before_anything_starts(tiny, tmp_path, capsys, flags, message):
    code = harness.main(["compare", "--model", str(tiny.folder), "--out", str(tmp_path / "x.json"), *flags])
    assert code == 1
    assert message in capsys.readouterr().err
