"""`python -m v0_5_bench crosscheck`: this load generator beside `vllm bench serve`, the one that people know.

Both load the same servers in turns, with as many requests of the same lengths under way: a mock server, whose timing is
known, so that it is plain who is right, and this milestone's own, where the two have to agree within what the same
client differs from itself. vLLM's is run from the environment that `--vllm-venv` names, by its command line; what it
reports is kept beside what we report.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ModelError
from common.measuring.recipe import recipe, spread
from common.units import check_count

from ..load import mock_server, online, runs
from ..load.workloads import BenchRequest, random_ids

if TYPE_CHECKING:
    from common.tokenizer import Tokenizer

FIGURES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
STATISTICS = ("mean", "median", "p99")
INPUT_LEN = 30
SECONDS_AT_MOST = 600  # for one load of the other client
# (requests, under way at once, tokens of each answer)
MOCK_LOAD, OWN_LOAD = (32, 8, 50), (32, 8, 48)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `crosscheck`."""
    parser.add_argument("--vllm-venv", type=Path, required=True, help="a virtual environment with the real vLLM")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="what --model of our server takes (default: the default model)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")


def run(args: argparse.Namespace) -> None:
    """Load, compare, write the file."""
    from common.weights import resolve

    check_count("repeats", args.repeats)
    runs.make_room(args.out)
    runs.need_aiohttp()
    vllm = args.vllm_venv.absolute() / "bin" / "vllm"
    if not vllm.exists():
        raise ModelError(f"--vllm-venv {args.vllm_venv} has no bin/vllm: make bench-vllm makes such an environment.")
    folder = resolve(args.model)
    results: dict[str, Any] = {
        "recipe": recipe(repeats=args.repeats, input_len=INPUT_LEN, mock_load=MOCK_LOAD, own_load=OWN_LOAD),
        "mock_timing": {"ttft_ms": mock_server.FIRST * 1e3, "tpot_ms": mock_server.STEP * 1e3},
    }
    with online.started(mock_server.__name__) as base_url:
        results["mock"] = compare(base_url, vllm, folder, MOCK_LOAD, args.repeats)
    with online.server(model=str(folder)) as base_url:
        results["ours"] = compare(base_url, vllm, folder, OWN_LOAD, args.repeats)
    print(json.dumps(results, indent=1))
    runs.write(args.out, results)


def compare(base_url: str, vllm: Path, folder: Path, load: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """Both clients in turns; each figure of each, and its ratio (theirs over ours) within a round.

    Both send text. Token ids would skip the server's tokenizer, and the requests that a closed loop sends at the same
    moment would reach the engine closer to each other: another arrival, and other gaps.
    """
    from common.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    samples: dict[str, list[dict[str, float]]] = {"harness": [], "vllm_bench_serve": []}
    model = online.first_model(base_url, None)
    for repeat in range(repeats + 1):
        order = list(samples) if repeat % 2 else list(reversed(samples))
        for name in order:
            print(f"{base_url}, round {repeat}, {name} ...", file=sys.stderr, flush=True)
            if name == "harness":
                figures = _harness(base_url, model, tokenizer, load, seed=repeat)
            else:
                figures = _vllm_bench(vllm, base_url, model, folder, load, seed=repeat)
            if repeat:  # the first round warms up
                samples[name].append(figures)
    ours, theirs = samples.values()
    return {
        "num_requests": load[0],
        "concurrency": load[1],
        "output_len": load[2],
        **{name: {key: spread([s[key] for s in found]) for key in found[0]} for name, found in samples.items()},
        "ratio": {key: spread([b[key] / a[key] for a, b in zip(ours, theirs, strict=True)]) for key in ours[0]},
    }


def _harness(
    base_url: str, model: str, tokenizer: "Tokenizer", load: tuple[int, int, int], seed: int
) -> dict[str, float]:
    from ..load.client import Load, run_load
    from ..load.summary import summarise

    num_requests, concurrency, output_len = load
    requests = [BenchRequest(output_len, prompt=text) for text in _texts(tokenizer, num_requests, seed)]
    summary = summarise(asyncio.run(run_load(Load(base_url=base_url, model=model, concurrency=concurrency), requests)))
    if summary["failed"]:
        raise ModelError(f"{base_url} failed: {summary['errors']}.")
    figures = {f"{s}_{figure}": summary[figure][s] for figure in FIGURES for s in STATISTICS}
    return figures | {name: summary[name] for name in ("prompt_tokens", "output_tokens_per_s")}


def _texts(tokenizer: "Tokenizer", num: int, seed: int) -> list[str]:
    """Random texts of `INPUT_LEN` tokens: those of random ids have more or fewer once they are encoded again."""
    texts = []
    for extra in range(100):
        for token_ids in random_ids(num, INPUT_LEN, seed=1000 * seed + extra):
            text = tokenizer.decode(tokenizer.encode(tokenizer.decode(token_ids))[:INPUT_LEN])
            if len(tokenizer.encode(text)) == INPUT_LEN:
                texts.append(text)
                if len(texts) == num:
                    return texts
    raise ModelError(f"No texts of {INPUT_LEN} tokens were found for this tokenizer.")


def _vllm_bench(
    vllm: Path, base_url: str, model: str, folder: Path, load: tuple[int, int, int], seed: int
) -> dict[str, float]:
    num_requests, concurrency, output_len = load
    with tempfile.TemporaryDirectory() as directory:
        flags = {
            "backend": "openai",
            "base-url": base_url,
            "endpoint": "/v1/completions",
            "model": model,
            "tokenizer": folder,
            "dataset-name": "random",
            "random-input-len": INPUT_LEN,
            "random-output-len": output_len,
            "num-prompts": num_requests,
            "max-concurrency": concurrency,
            "seed": seed,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "metric-percentiles": 99,
            "temperature": 0,
            "result-dir": directory,
            "result-filename": "result.json",
        }
        command = [str(vllm), "bench", "serve", "--ignore-eos", "--save-result"]
        command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, cwd=directory, timeout=SECONDS_AT_MOST
            )
        except subprocess.TimeoutExpired:
            raise ModelError(f"vllm bench serve has not ended within {SECONDS_AT_MOST} s.") from None
        file = Path(directory) / "result.json"
        if done.returncode or not file.exists():
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
            raise ModelError(f"vllm bench serve ended with exit code {done.returncode}:\n{last}")
        found = json.loads(file.read_text())
    if found["completed"] != num_requests:
        raise ModelError(f"vllm bench serve completed {found['completed']} of {num_requests} requests.")
    figures = {f"{s}_{figure}": found[f"{s}_{figure}"] for figure in FIGURES for s in STATISTICS}
    return figures | {"prompt_tokens": found["total_input_tokens"], "output_tokens_per_s": found["output_throughput"]}
