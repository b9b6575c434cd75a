"""The profiler: parts that add up to the whole, the same tokens, and an engine that is afterwards as it was."""

import asyncio
import json

import httpx
import pytest

from common import llama
from common.errors import ModelError
from common.sampling_params import SamplingParams
from tests.kit.memory import Watched, without_garbage_collector
from tests.kit.server import running
from tests.kit.tokenizers import byte_tokenizer
from v0_5_bench import LLM, LLMEngine, model_runner
from v0_5_bench.harness import cli as harness
from v0_5_bench.harness.explain import profile_routes, profiler
from v0_5_bench.harness.explain.profiler import PARTS, Profiler
from v0_5_bench.harness.load import online
from v0_5_bench.server import app as server

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [40, 41]]


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(tiny.folder)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_every_part_of_a_step_has_its_time_and_together_they_are_all_of_it(llm, monkeypatch):
    clock = iter(range(1_000_000))
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: float(next(clock)))
    with Profiler(llm.engine) as profile:
        for number, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(number), prompt, GREEDY)
        begin = next(clock)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        end = next(clock)
    # Each look at this clock lets a second pass, so that what is in no part would be seen: two looks a step are.
    assert end - begin - 1 - 2 * 6 <= sum(profile.parts.values()) <= end - begin
    assert all(profile.parts[part] > 0 for part in PARTS)
    assert (profile.num_steps, profile.num_outputs) == (6, 18)


def test_a_part_does_not_count_what_it_calls(llm, monkeypatch):
    """`forward` calls the products and the attention: their seconds are theirs alone."""
    now = [0.0]
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: now[0])

    def slow_linear(*args, linear=llama.linear):
        now[0] += 1.0
        return linear(*args)

    monkeypatch.setattr(llama, "linear", slow_linear)
    num_products = 4 * llm.engine.model.config.num_layers + 1
    with Profiler(llm.engine) as profile:
        tokens(llm)
    assert profile.parts["linear layers"] == 6 * num_products
    assert sum(profile.parts.values()) == profile.parts["linear layers"]


def test_switched_off_the_engine_is_as_it_was_and_its_tokens_are_the_same(llm):
    owners = (llm.engine, llm.engine.scheduler, llm.engine.model_runner, llm.engine.model_runner.kv_cache)
    before = [dict(vars(owner)) for owner in owners], llama.linear, model_runner.sample
    expected = tokens(llm)
    with Profiler(llm.engine):
        assert llama.linear is not before[1]
        assert tokens(llm) == expected
    assert llama.linear is before[1]
    assert model_runner.sample is before[2]
    assert [set(vars(owner)) for owner in owners] == [set(attributes) for attributes in before[0]]
    assert tokens(llm) == expected


def test_a_step_that_fails_leaves_the_profiler_in_order(llm, monkeypatch):
    def broken(*_):
        raise RuntimeError("no")

    with Profiler(llm.engine) as profile:
        with monkeypatch.context() as patch:
            patch.setattr(llama, "rms_norm", broken)
            with pytest.raises(RuntimeError, match="no"):
                tokens(llm)
        assert profile._inner == []
        assert profile._left is None  # its seconds are in its parts, and not between two steps as well
        assert len(tokens(llm)) == 3


def test_the_time_after_the_last_request_was_aborted_is_nobodys(llm, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: now[0])
    with Profiler(llm.engine) as profile:
        llm.engine.add_request("0", [5, 6], GREEDY)
        llm.engine.step()
        llm.engine.abort_request("0")
        now[0] += 100.0
        tokens(llm)
    assert sum(profile.parts.values()) == 0.0


def test_a_trace_needs_a_folder(llm, tmp_path):
    with pytest.raises(ModelError, match="There is no folder for the trace"):
        Profiler(llm.engine, trace_file=str(tmp_path / "nowhere" / "trace.json"))


def test_a_profiler_that_cannot_be_entered_leaves_nothing_behind(llm, monkeypatch):
    monkeypatch.delattr(type(llm.engine.output_processor), "process")
    with pytest.raises(AttributeError):
        Profiler(llm.engine).__enter__()
    assert "step" not in vars(llm.engine)
    assert llama.linear.__name__ == "linear"


def test_a_trace_names_the_parts_of_some_steps(llm, tmp_path):
    file = tmp_path / "trace.json"
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with Profiler(llm.engine, trace_file=str(file)) as profile:
        llm.generate(PROMPTS, params, use_tqdm=False)
    names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
    assert profile.num_steps == 12
    assert names.count("scheduling") == 2 * (12 - profiler.TRACE_FROM)  # schedule and update
    assert {"attention", "linear layers", "sampling", "detokenising"} <= set(names)


def test_a_server_profiles_between_two_requests_and_refuses_what_makes_no_sense(milestone, tiny, monkeypatch):
    with running(milestone, tiny.folder) as server:
        profile_routes.install(server.app)
        assert server.http.post("/stop_profile").status_code == 400
        online.start_profile(server.url, None)
        again = server.http.post("/start_profile")
        assert again.status_code == 400
        assert "running already" in again.json()["error"]["message"]
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        profile = online.stop_profile(server.url, None)
        with monkeypatch.context() as patch:
            patch.setattr(Profiler, "__enter__", lambda _: 1 / 0)
            assert server.http.post("/start_profile").status_code == 500
        assert server.http.post("/v1/completions", json=body).status_code == 200  # the engine goes on
    assert profile["num_steps"] == 4
    assert set(profile["parts_ms"]) == set(PARTS)
    assert profile["event_loop_cpu_ms"] > 0


def test_an_engine_that_was_profiled_is_freed_at_once():
    watched = []
    with without_garbage_collector():
        llm = LLM(Watched(watched), tokenizer=byte_tokenizer())
        with Profiler(llm.engine) as profile:
            tokens(llm)
        assert profile.num_steps == 6
        del llm, profile
        assert [what for what, is_there in watched if is_there() is not None] == []


def test_a_server_that_ends_within_a_profile_ends_it_and_frees_its_memory():
    watched = []

    async def profiled(app):
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                assert (await client.post("/start_profile")).status_code == 200
                assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})).status_code == 200

    with without_garbage_collector():
        engine = LLMEngine(Watched(watched), tokenizer=byte_tokenizer(), num_blocks=20)
        app = server.build_app(engine, server.ServerArgs())
        profile_routes.install(app)
        del engine
        asyncio.run(profiled(app))
        assert [what for what, is_there in watched if is_there() is not None] == []
    assert "kv_cache" in dict(watched)
    assert llama.linear.__name__ == "linear"


def test_throughput_prints_where_the_time_went(tiny, tmp_path, capsys):
    (tmp_path / "requests.jsonl").write_text('{"prompt": [1, 2, 3], "max_tokens": 12}\n')
    trace, out = tmp_path / "trace.json", tmp_path / "out.json"
    flags = ["--workload", "file", "--file", tmp_path / "requests.jsonl", "--num-requests", 1, "--warmup", 0]
    flags += ["--model", tiny.folder, "--profile", "--trace-file", trace, "--out", out]
    assert harness.main(["throughput", *map(str, flags)]) == 0
    text = capsys.readouterr().out
    assert "12 steps of 1.0 outputs" in text
    assert "linear layers" in text
    assert json.loads(out.read_text())["profile"]["num_steps"] == 12
    assert trace.exists()
