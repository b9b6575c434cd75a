"""The GPU's checks, on a CPU: they pass there, need little, and what breaks or hangs spoils nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from v0_5_bench.harness.gpu import checks

ROOT = Path(__file__).parents[2]
OTHERS = ("-v0_9", "-v0_9-torch")  # engines whose parts have their names
# What the GPU machine may lack; our own package is not installed there either.
ABSENT = (
    "gguf",
    "fastapi",
    "rich",
    "pydantic",
    "prometheus_client",
    "aiohttp",
    "uvicorn",
    "sse_starlette",
    "flash_attn",
)
WITHOUT = f"""
import importlib.machinery, importlib.metadata
find, version = importlib.machinery.PathFinder.find_spec, importlib.metadata.version
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {ABSENT!r} else find(name, path, target)
def installed_version(name):
    if name == "mini-vllm":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.machinery.PathFinder.find_spec, importlib.metadata.version = find_spec, installed_version
"""


def check(out, *arguments, path=ROOT):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "v0_5_bench.harness.gpu", "--out", out, "--repeats", 1, *arguments]
    done = subprocess.run(
        [str(argument) for argument in command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done, json.loads(out.read_text())["parts"] if out.exists() else None


def failures(parts):
    return {
        (name, item): entry["traceback"]
        for name, part in parts.items()
        for item, entry in part["items"].items()
        if "traceback" in entry
    }


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory):
    """One run of everything, without the packages that the GPU machine may lack."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "sitecustomize.py").write_text(WITHOUT)
    return check(folder / "gpu.json", "--device", "cpu", path=os.pathsep.join([str(folder), str(ROOT)]))


def test_it_needs_torch_transformers_and_numpy_alone(on_a_cpu, tmp_path):
    done, parts = on_a_cpu
    assert failures(parts) == {}
    assert done.returncode == 0, done.stderr
    # And they were really absent: another program does not find them either.
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    for name in ABSENT:
        command = [sys.executable, "-c", f"import {name}"]
        found = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
        assert f"No module named '{name}'" in found.stderr


def test_on_a_cpu_all_parts_pass_and_leave_their_numbers(on_a_cpu):
    done, parts = on_a_cpu
    engines = [f"{part}{engine}" for engine in ("", *OTHERS) for part in ("correctness", "serving", "expected")]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(
        ["machine", *engines, "transformers"], "passed"
    )
    items = {name: part["items"] for name, part in parts.items()}
    machine = {item: entry["result"] for item, entry in items["machine"].items()}
    assert machine["versions"]["device"] == "cpu"
    for rate in ("copy_gb_s", "read_gb_s", "bfloat16_tflop_s", "float32_tflop_s"):
        assert 0 < machine[rate]["min"] <= machine[rate]["median"] <= machine[rate]["max"]

    for engine in ("", *OTHERS):
        correctness = items[f"correctness{engine}"]
        assert correctness["logits_float32"]["result"]["max_abs_difference"] < 1e-3
        for item in ("tokens_alone", "tokens_batched", "tokens_preempted"):
            assert correctness[item]["result"]["tokens"] == 12 * 24
        assert correctness["tokens_preempted"]["result"]["num_preemptions"] > 0
        assert items[f"expected{engine}"].keys() == items["expected"].keys()

    plain = items["serving-v0_9-torch"]["load"]["result"]
    assert (plain["kv_cache"], plain["cuda_graphs"]) == ("KVCache", False)
    load = items["serving"]["load"]["result"]
    assert load["pool"].startswith("KV pool")
    assert (load["layer_elements"], load["head_elements"]) == (2 * (64 * 64 * 3 + 3 * 64 * 128 + 2 * 64), 512 * 64)
    decode = items["serving"]["decode_4"]["result"]
    assert decode["output_tokens_per_s"]["median"] > 0
    assert decode["kv"]["peak_blocks"] == 4 * 3  # of 16 tokens, for 30 and 7 more
    assert 0.6 < decode["kv"]["share_of_slots_filled"] <= 1.0
    assert items["serving"]["prefill_128_by_512"]["result"]["ttft_ms"]["median"] > 0
    assert items["transformers"]["generate_4"]["result"]["output_tokens_per_s"]["median"] > 0
    assert items["expected"].keys() == {"basis", "decode_1", "decode_4", "prefill_64_by_512", "prefill_128_by_512"}
    assert done.stdout.count("at best") == 3 * 4
    assert "ms of a step: scheduling" in done.stdout  # where the time went, by part


def test_without_a_gpu_each_part_says_so(tmp_path):
    done, parts = check(tmp_path / "gpu.json", "--only", "machine")
    assert done.returncode == 1
    assert parts["machine"]["status"] == "failed"
    assert "finds no CUDA device" in parts["machine"]["items"]["whole"]["error"]
    assert "ModelError" in parts["machine"]["items"]["whole"]["traceback"]
    assert "finds no CUDA device" in done.stdout


@pytest.fixture
def run_part(monkeypatch):
    """`run_part(code, limit)`: what becomes of a part that does this in its process, and how often it was written."""

    def run(code, limit):
        command = subprocess.Popen
        monkeypatch.setattr(checks, "LEAST", 0)
        monkeypatch.setattr(
            checks.subprocess, "Popen", lambda _, **options: command([sys.executable, "-c", code], **options)
        )
        args = type("Args", (), {"device": "cpu", "shape": "tiny", "model": None, "repeats": 1})
        part, written = {"status": "running", "items": {}}, []
        checks._run_part(args, "machine", limit, part, lambda: written.append(json.dumps(part)))
        return part, written

    return run


ITEM = """print('noise'); print('{"item": "first", "result": 1, "seconds": 0.1}', flush=True)\n"""


def test_what_was_measured_before_the_limit_stays(run_part):
    part, written = run_part(ITEM + "import time; time.sleep(60)", 2)
    assert part["status"] == "timed out"
    assert part["items"] == {"first": {"result": 1, "seconds": 0.1}}
    assert part["seconds"] < 30
    assert len(written) == 1


def test_a_process_that_dies_leaves_its_last_words(run_part):
    part, _ = run_part(ITEM + "import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()", 30)
    assert part["status"] == "failed"
    assert part["stderr"].startswith("last words")
    assert part["items"].keys() == {"first"}


def test_an_item_that_failed_fails_its_part(run_part):
    part, _ = run_part("""print('{"item": "a", "error": "E: no", "traceback": "..."}')""", 30)
    assert part["status"] == "failed"


def test_without_time_a_part_is_skipped():
    part = {"status": "running", "items": {}}
    checks._run_part(None, "machine", checks.LEAST - 1, part, lambda: None)
    assert part == {"status": "skipped", "items": {}}


def result(**values):
    return {"result": values, "seconds": 0.0}


MACHINE = {
    "copy_gb_s": result(median=3000.0),
    "read_gb_s": result(median=4000.0),
    "bfloat16_tflop_s": result(median=800.0),
}
LOAD = result(
    dtype="bfloat16", bytes_per_element=2, layer_elements=7 * 10**9, head_elements=10**9, kv_elements_per_token=65536
)


def test_what_to_expect_of_a_card():
    decode = result(decode_tokens_per_s={"median": 125.0}, prompt_len=30, num_new_tokens=64)
    serving = {
        "load": LOAD,
        "decode_1": decode,
        "decode_128": {"error": "out of memory"},
        "prefill_4000_by_512": result(ttft_ms={"median": 140.0}),
        "split_1": result(note="none"),
    }
    items = checks.expectations(MACHINE, serving)
    assert items.keys() == {"basis", "decode_1", "prefill_4000_by_512"}
    # 16 GB of weights and 8 MB of KV at 4 TB/s; 5.6e13 FLOP at 800 TFLOP/s.
    assert items["decode_1"]["best_tokens_per_s"] == pytest.approx(4e12 / (16e9 + 131072 * 62.5))
    assert items["decode_1"]["share"] == pytest.approx(0.5, rel=0.01)
    assert items["prefill_4000_by_512"]["best_ttft_ms"] == pytest.approx(70.0)
    assert items["prefill_4000_by_512"]["share"] == pytest.approx(0.5)


def test_many_decodes_are_bound_by_the_matrix_rate():
    serving = {"load": LOAD, "decode_900": result(decode_tokens_per_s={"median": 1.0}, prompt_len=1, num_new_tokens=1)}
    best = checks.expectations(MACHINE, serving)["decode_900"]["best_tokens_per_s"]
    assert best == pytest.approx(800e12 / 16e9)


def test_what_was_not_measured_is_not_expected():
    assert checks._expected({"machine": {"items": {}}}, "serving")["status"] == "skipped"
