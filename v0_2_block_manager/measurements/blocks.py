"""What blocks save and what they cost: `python -m v0_2_block_manager.measurements.blocks`.

Memory: the same requests through the slab of v0.1 and through blocks of 8 to 64 tokens, each in a process of its own:
what each request had reserved and used at its end. Time: the attention of one decode step over all layers, on a slab
and on blocks. The figures go to `blocks.json` with their recipe; the pages quote that file. Dropped in v0.3, which
measures something else.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.attention import sdpa
from common.config import ModelConfig
from common.measuring.recipe import recipe, spread
from common.weights import resolve

from ..kv_cache import KVCache

BLOCK_SIZES = (8, 16, 32, 64)
CONTEXT_LENS = (256, 1024, 4096)
NUM_REQUESTS = 16
MILESTONE = (__package__ or "").partition(".")[0]
RESULTS = Path(__file__).with_suffix(".json")

# Runs in a process of its own, with whichever milestone it is told.
CHILD = """
import importlib, json, sys
package, arguments, requests = json.load(sys.stdin)
milestone = importlib.import_module(package)
llm = milestone.LLM(**arguments)
prompts = [[100 + i % 1000 for i in range(num_prompt)] for num_prompt, _ in requests]
params = [milestone.SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True) for _, num in requests]
metrics = [output.metrics for output in llm.generate(prompts, params)]
print(json.dumps([[m.kv_reserved_bytes, m.kv_used_bytes] for m in metrics]))
"""


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    folder = resolve(None)
    results = {
        "recipe": recipe(
            model=folder.name.rpartition("-")[0],
            dtype="float32",
            threads=torch.get_num_threads(),
            repeats=args.repeats,
            seed=args.seed,
        ),
        "memory": measure_memory(args.seed),
        "attention": measure_attention(ModelConfig.from_folder(folder), args.repeats),
    }
    print(json.dumps(results, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.out}")
    if args.out == RESULTS:
        print("the documents quote this file: python -m tools.figures --write takes the new figures over")


def measure_memory(seed: int) -> dict[str, Any]:
    """MiB reserved and used by all requests together, and the mean share of its own that a request wasted."""
    rng = random.Random(seed)
    requests = [(rng.randint(190, 900), rng.randint(10, 30)) for _ in range(NUM_REQUESTS)]
    lens = [num_prompt + num_new for num_prompt, num_new in requests]
    runs: dict[str, tuple[str, dict[str, Any]]] = {"slab": ("v0_1_single_request", {})}
    runs |= {str(size): (MILESTONE, {"block_size": size}) for size in BLOCK_SIZES}
    table = {}
    for name, (package, arguments) in runs.items():
        print(f"{package} {arguments} ...", flush=True)
        job = json.dumps([package, arguments, requests])
        child = subprocess.run([sys.executable, "-c", CHILD], input=job, capture_output=True, text=True, check=True)
        pairs = json.loads(child.stdout)
        table[name] = {
            "reserved_mib": round(sum(reserved for reserved, _ in pairs) / 2**20, 2),
            "used_mib": round(sum(used for _, used in pairs) / 2**20, 2),
            "mean_waste": round(statistics.mean(1 - used / reserved for reserved, used in pairs), 4),
            "worst_waste": round(max(1 - used / reserved for reserved, used in pairs), 4),
        }
    return {
        "what": f"{NUM_REQUESTS} requests of {min(lens)} to {max(lens)} tokens, KV at the end of each",
        "mean_tokens": round(statistics.mean(lens)),
        "runs": table,
    }


@torch.inference_mode()
def measure_attention(config: ModelConfig, repeats: int) -> dict[str, Any]:
    """Milliseconds of storing and attending in all layers for one decoded token, by context length."""
    q = torch.randn(1, config.num_heads, config.head_dim)
    k, v = torch.randn(2, 1, config.num_kv_heads, config.head_dim)
    times: dict[str, dict[str, dict[str, float]]] = {}
    for context_len in CONTEXT_LENS:
        steps = {"slab": _slab_step(config, context_len, q, k, v)}
        steps |= {str(size): _block_step(config, size, context_len, q, k, v) for size in BLOCK_SIZES}
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(repeats + 1):
            for name, step in steps.items():
                start = time.perf_counter()
                for _ in range(5):
                    step()
                if repeat:  # the first round is the warm-up
                    samples[name].append((time.perf_counter() - start) * 1e3 / 5)
        times[str(context_len)] = {name: spread(values) for name, values in samples.items()}
    return {"what": "ms of one decode step's attention over all layers, by context length", "context_lens": times}


def _slab_step(
    config: ModelConfig, context_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], None]:
    """What v0.1 does: the context is one contiguous piece."""
    kv = torch.randn(config.num_layers, 2, context_len, config.num_kv_heads, config.head_dim)

    def step() -> None:
        for keys, values in kv:
            keys[-1:], values[-1:] = k, v
            sdpa(q, keys, values, [1], [context_len])

    return step


def _block_step(
    config: ModelConfig, block_size: int, context_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], None]:
    """What v0.2 does: the context lies in blocks all over a pool twice its size."""
    num_blocks = -(-context_len // block_size)
    cache = KVCache(config, 2 * num_blocks, block_size, torch.device("cpu"), torch.float32, sdpa)
    cache.kv.normal_()
    table = random.Random(0).sample(range(2 * num_blocks), num_blocks)

    def step() -> None:
        cache.begin_step(table, query_len=1, context_len=context_len)
        for layer in range(config.num_layers):
            cache.attend(layer, q, k, v)

    return step


if __name__ == "__main__":
    main()
