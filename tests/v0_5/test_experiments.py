"""Every experiment runs, and its two ways give the same tokens where only speed is to differ (on TINY)."""

import json

import pytest

from common.sampling_params import SamplingParams
from v0_5_bench import LLM
from v0_5_bench.harness import cli as harness
from v0_5_bench.harness.compare import peers
from v0_5_bench.harness.compare.compare import Workload
from v0_5_bench.harness.explain import attribute, experiments
from v0_5_bench.harness.explain.experiments import Experiments, interrupt, serve
from v0_5_bench.harness.load import workloads
from v0_5_bench.harness.report import tables


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Prompts of TINY's ids and length."""
    monkeypatch.setattr(workloads, "HIGHEST_ID", 200)
    real = experiments.random_ids
    monkeypatch.setattr(experiments, "random_ids", lambda num, length: real(num, min(length, 40)))


@pytest.fixture(scope="module")
def all_experiments(tiny):
    return Experiments(tiny.folder, repeats=1)


@pytest.mark.parametrize(
    "name", ["batching", "static_batching", "paging", "block_size", "token_budget", "mixed_step", "packed_matrices"]
)
def test_an_experiment_measures_each_of_its_ways(all_experiments, name):
    result = all_experiments.run(name)
    assert len(result["ways"]) >= 2
    keys = [set(measured) for measured in result["ways"].values()]
    assert all(key == keys[0] for key in keys)
    rates = [value["median"] for way in result["ways"].values() for key, value in way.items() if key != "mean_ttft_s"]
    assert min(rates) > 0


def test_separate_passes_give_the_tokens_of_one_mixed_pass(tiny):
    llm = LLM(tiny.folder, max_num_seqs=3, max_num_batched_tokens=9)
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    prompts = [[5 + i] * (2 + 3 * i) for i in range(6)]
    mixed = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    passes, run = [], llm.engine.model_runner.run
    llm.engine.model_runner.run = lambda scheduled: passes.append(len(scheduled.requests)) or run(scheduled)
    inner = llm.engine.model_runner.run
    llm.engine.model_runner.run = lambda scheduled: experiments._separately(inner, scheduled)
    separate = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert separate == mixed == [tiny.tokens(prompt, 7) for prompt in prompts]
    assert max(passes) > 1


def test_serve_says_how_many_ran_at_once_and_how_full_their_blocks_were(tiny):
    engine = LLM(tiny.folder, max_num_seqs=2, block_size=8).engine
    result = serve(engine, [[5] * 8, [6] * 8, [7] * 8], [1, 1, 1])
    assert result["most_at_once"] == 0.0  # all of them end in the step that computes them
    result = serve(engine, [[5] * 8, [6] * 8, [7] * 8], [3, 3, 3])
    assert result["most_at_once"] == 2.0
    assert 0.5 < result["tokens_of_blocks"] <= 1.0


def test_a_long_prompt_in_one_step_is_one_gap_and_in_chunks_several(tiny, monkeypatch):
    steps = []
    for budget in (16, 128):
        engine = LLM(tiny.folder, max_num_batched_tokens=budget).engine
        engine.on_step = lambda scheduled: steps.append(sum(scheduled.num_scheduled_tokens))
        steps.clear()
        interrupt(engine, [[5] * 4, [6] * 4], [7] * 60)
        largest = max(steps)
        assert largest <= budget
        assert (largest == 62) == (budget == 128)
        assert not engine.has_unfinished_requests()


def test_attribute_writes_parts_that_are_whole_and_keeps_the_others(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attribute, "DECODES", (1, 2))
    monkeypatch.setattr(attribute, "random_ids", lambda num, length: [[5 + i] * min(length, 40) for i in range(num)])
    monkeypatch.setattr(attribute, "MAX_TOKENS", 40)
    monkeypatch.setattr(attribute, "NUM_STEPS", 5)
    out = tmp_path / "attribution.json"
    flags = ["attribute", "--model", str(tiny.folder), "--repeats", "1", "--out", str(out)]
    assert harness.main([*flags, "--only", "steps"]) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())["steps"]["steps"]
    assert set(found) == {"1", "2", "prefill_2000"}
    assert all(step["linear layers"]["median"] > 0 for step in found.values())
    assert harness.main([*flags, "--only", "experiments", "--experiments", "batching"]) == 0
    assert set(json.loads(out.read_text())) == {"steps", "experiments"}
    assert harness.main([*flags, "--only", "experiments", "--experiments", "magic"]) == 1
    assert "There is no experiment magic" in capsys.readouterr().err


def test_parts_over_http_are_those_of_the_same_engine(tiny, monkeypatch):
    monkeypatch.setattr(attribute, "HTTP_STREAMS", 3)
    monkeypatch.setattr(attribute, "HTTP_OUTPUT", 4)
    found = attribute.measure_http(tiny.folder, 1)["steps"]
    assert set(found["http"]) - set(found["offline"]) == {"event_loop_cpu"}
    assert found["http"]["linear layers"]["median"] > 0


def test_prefix_caching_is_measured_on_prompts_that_begin_alike_without_it_and_with_it(tiny, monkeypatch):
    starts = []
    describe = peers.describe
    monkeypatch.setattr(attribute, "WORKLOADS", {"shared_prefix": Workload(3, 40, 2, shared_len=32, is_warm=True)})
    monkeypatch.setattr(peers, "describe", lambda *args: starts.append(describe(*args)) or starts[-1])
    found = attribute.measure_prefix_caching(tiny.folder, 1)
    assert found["what"] == "3 requests of 40 + 2 tokens, the first 32 the same (v0.6)"
    assert list(found["ways"]) == ["without", "with a warm cache"]
    assert [start.arguments["arguments"]["enable_prefix_caching"] for start in starts] == [False, True]
    assert all(way["tokens_per_s"]["min"] > 0 for way in found["ways"].values())
    assert all(0 < way["mean_ttft_s"]["median"] < 60 for way in found["ways"].values())


def test_operators_are_measured_by_load_and_class(tiny, monkeypatch):
    monkeypatch.setattr(attribute, "OPERATOR_DECODES", (2,))
    monkeypatch.setattr(attribute, "OPERATOR_PREFILL", 40)
    monkeypatch.setattr(attribute, "NUM_STEPS", 3)
    found = attribute.measure_operators(peers.Places(tiny.folder), 1)["engines"]["v0_5"]
    assert set(found) == {"2", "prefill_2000"}
    assert (found["2"]["num_steps"], found["prefill_2000"]["num_steps"]) == (3, 0)
    assert found["prefill_2000"]["ms"]["linear layers"]["median"] > 0


def test_operators_of_another_milestone_alone_are_a_table(tiny, monkeypatch):
    monkeypatch.setattr(attribute, "OPERATOR_PREFILL", 40)
    monkeypatch.setattr(attribute, "NUM_STEPS", 1)
    operators = attribute.measure_operators(peers.Places(tiny.folder), 1, "v0_9")
    assert list(operators["engines"]) == ["v0_9"]
    rows = tables.render("operators", {"attribution": {"operators": operators}}).split("\n")[2:]
    whose = [row.split("|")[1].strip() for row in rows]
    assert whose == ["1 request: ours", "8 requests: ours", "32 requests: ours", "prefill of 2,000: ours"]
