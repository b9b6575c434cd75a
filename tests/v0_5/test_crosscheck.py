"""The server of known timing, and what the two load generators make of it (vLLM's is played by a script)."""

import asyncio
import json
import stat
import sys

import pytest

from v0_5_bench.harness import cli as harness
from v0_5_bench.harness.compare import crosscheck
from v0_5_bench.harness.load import online, workloads
from v0_5_bench.harness.load.client import Load, run_load
from v0_5_bench.harness.load.summary import summarise
from v0_5_bench.harness.load.workloads import random_prompts

# What `vllm bench serve` writes, from the flags that it was given.
FAKE_VLLM = """#!{python}
import json, sys
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
assert sys.argv[1:3] == ["bench", "serve"] and "--ignore-eos" in sys.argv
result = {{"completed": int(flags["--num-prompts"]) - {failed}, "output_throughput": 100.0, "total_input_tokens": 60}}
for figure in ("ttft", "tpot", "itl", "e2el"):
    for statistic in ("mean", "median", "p99"):
        result[f"{{statistic}}_{{figure}}_ms"] = 200.0
open(flags["--result-dir"] + "/" + flags["--result-filename"], "w").write(json.dumps(result))
"""


def test_the_mock_server_sends_what_it_plans_never_early():
    load = (6, 3, 5)
    with online.started("v0_5_bench.harness.load.mock_server") as url:
        assert online.first_model(url, None) == "mock"
        requests = random_prompts(load[0], (7, 7), (load[2],) * 2, seed=0)
        results = asyncio.run(run_load(Load(base_url=url, model="mock", concurrency=load[1]), requests))
    assert [(result.num_prompt_tokens, result.num_output_tokens) for result in results] == [(7, 5)] * 6
    for result in results:
        assert result.error is None
        assert result.ttft >= crosscheck.mock_server.FIRST
        assert result.e2el >= crosscheck.mock_server.FIRST + 4 * crosscheck.mock_server.STEP
        assert len(result.chunk_times) == 5
    assert summarise(results)["failed"] == 0


def fake_venv(folder, failed=0):
    (folder / "bin").mkdir()
    script = folder / "bin" / "vllm"
    script.write_text(FAKE_VLLM.format(python=sys.executable, failed=failed))
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return folder


def test_both_clients_load_both_servers_and_the_ratios_are_within_a_round(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crosscheck, "MOCK_LOAD", (2, 2, 3))
    monkeypatch.setattr(crosscheck, "OWN_LOAD", (2, 2, 3))
    out = tmp_path / "crosscheck.json"
    flags = ["--vllm-venv", fake_venv(tmp_path), "--model", tiny.folder, "--repeats", 2, "--out", out]
    monkeypatch.setattr(workloads, "HIGHEST_ID", 200)  # of TINY
    assert harness.main(["crosscheck", *map(str, flags)]) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert found["mock_timing"] == {"ttft_ms": 200.0, "tpot_ms": 10.0}
    assert found["ours"]["harness"]["prompt_tokens"]["median"] == 2 * crosscheck.INPUT_LEN
    for server in ("mock", "ours"):
        assert found[server]["vllm_bench_serve"]["mean_ttft_ms"]["median"] == 200.0
        ours, ratio = (found[server][key]["mean_ttft_ms"] for key in ("harness", "ratio"))
        assert ratio["max"] == pytest.approx(200.0 / ours["min"], rel=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, "has no bin/vllm: make bench-vllm makes such an environment"),
        (lambda folder: fake_venv(folder, failed=1), "vllm bench serve completed 1 of 2 requests"),
    ],
)
def test_what_is_wrong_with_the_other_client_is_said(tiny, tmp_path, monkeypatch, capsys, make, message):
    monkeypatch.setattr(crosscheck, "MOCK_LOAD", (2, 2, 3))
    flags = ["--vllm-venv", make(tmp_path), "--model", tiny.folder, "--repeats", 1, "--out", tmp_path / "x.json"]
    assert harness.main(["crosscheck", *map(str, flags)]) == 1
    assert message in capsys.readouterr().err
