"""The command line of the harness, on TINY."""

import json

import pytest

from tests.kit.server import running
from v0_5_bench.harness import cli as harness
from v0_5_bench.harness.load import runs


@pytest.fixture
def call(capsys):
    def run_here(*args):
        code = harness.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_here


SMALL = ["--num-requests", 6, "--input-len", "5-9", "--output-len", 4, "--warmup", 1]


def test_serve_loads_a_server_and_writes_every_sample_with_its_recipe(call, milestone, tiny, tmp_path):
    (tmp_path / "requests.jsonl").write_text('{"prompt": [1, 2, 3], "max_tokens": 3}\n{"prompt": [4, 5]}\n')
    out = tmp_path / "serve.json"
    workload = ["--workload", "file", "--file", tmp_path / "requests.jsonl", "--num-requests", 2, "--output-len", 5]
    with running(milestone, tiny.folder) as server:
        code, text, err = call("serve", "--base-url", server.url, "--concurrency", 2, *workload, "--out", out)
    assert code == 0, err
    for word in ("requests", "output tok/s", "time to first token", "inter-token latency", "sent later than planned"):
        assert word in text
    assert max(map(len, text.split("\n"))) <= 80
    written = json.loads(out.read_text())
    assert written["recipe"]["settings"]["concurrency"] == 2
    assert [sample["num_output_tokens"] for sample in written["samples"]] == [3, 5]
    assert [sample["num_prompt_tokens"] for sample in written["samples"]] == [3, 2]
    assert written["summary"]["output_tokens"] == 8
    assert written["summary"]["failed"] == 0


def test_serve_counts_what_a_server_refuses_and_goes_on(call, milestone, tiny, tmp_path):
    (tmp_path / "requests.jsonl").write_text('{"prompt": [1], "max_tokens": 3}\n{"prompt": [999999]}\n')
    workload = ["--workload", "file", "--file", tmp_path / "requests.jsonl", "--num-requests", 2, "--warmup", 0]
    with running(milestone, tiny.folder) as server:
        code, _, err = call("serve", "--base-url", server.url, "--model", "tiny", *workload)
    assert code == 0
    assert "1 x HTTP 400" in err


@pytest.mark.parametrize("engine", ["v0_1_single_request", "v0_5_bench"])
@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_offline_runs_load_a_milestone_by_its_name(call, tiny, tmp_path, command, engine):
    (tmp_path / "requests.jsonl").write_text('{"prompt": [1, 2, 3], "max_tokens": 3}\n{"prompt": [4, 5]}\n')
    workload = ["--workload", "file", "--file", tmp_path / "requests.jsonl", "--num-requests", 2, "--output-len", 5]
    out = tmp_path / "offline.json"
    code, text, err = call(command, "--engine", engine, "--model", tiny.folder, *workload, "--out", out)
    assert code == 0, err
    assert f"{engine}, {command}" in text
    samples = json.loads(out.read_text())["samples"]
    assert [sample["num_output_tokens"] for sample in samples] == [3, 5]
    assert [sample["num_prompt_tokens"] for sample in samples] == [3, 2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["serve", "--base-url", "http://127.0.0.1:9"], "does not list its models"),
        (["serve", "--concurrency", 0], "concurrency must be at least 1"),
        (["serve", "--concurrency", 1, "--request-rate", 1], "exclude each other"),
        (["serve", "--request-rate", 0], "request_rate must be above 0"),
        (["serve", "--num-requests", 0], "num_requests must be at least 1"),
        (["serve", "--input-len", "x"], "input_len must be a number of tokens"),
        (["serve", "--workload", "file"], "needs --file"),
        (["throughput", "--engine", "foo.bar", "--num-requests", 1], "There is no engine foo.bar"),
        (["throughput", "--engine", "v0_9_nothing", "--num-requests", 1], "There is no engine v0_9_nothing"),
    ],
)
def test_wrong_arguments_are_one_sentence(call, wrong, message):
    code, out, err = call(*wrong)
    assert (code, out) == (1, "")
    assert message in err.split("\n")[-2]


def test_without_its_http_library_the_harness_says_what_to_install(call, monkeypatch):
    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: None)
    code, out, err = call("latency", "--num-requests", 1)
    assert (code, out, err) == (1, "", "error: The harness needs aiohttp: run `pip install -e '.[bench]'`.\n")
