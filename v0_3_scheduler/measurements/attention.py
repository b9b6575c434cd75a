"""Ways to compute a later chunk's attention on a CPU: `python -m v0_3_scheduler.measurements.attention`.

One chunk of 512 queries in one layer's shapes; and whole prefills, in chunks of 512, in turns with transformers'
`generate` on the same weights. The figures go to `attention.json`, under the vector instructions that PyTorch
used. A processor with AVX-512 stands in for one without when these variables are set before the start:

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

Dropped in v0.4.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from common import attention
from common.measuring.recipe import recipe, spread
from common.sampling_params import SamplingParams
from common.weights import resolve

from ..llm import LLM

RESULTS = Path(__file__).with_suffix(".json")
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # SmolLM2-135M
Clock = Callable[[], float]
CHUNK, KEYS, PROMPTS = 512, (1024, 2048, 4096), (2000, 4000)


def main() -> None:
    """Run the measurements, print them and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--one-thread",
        action="store_true",
        help="and its CPU time instead of the clock's, where others use the machine",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    folder = resolve(None)
    clock = time.perf_counter
    if args.one_thread:
        torch.set_num_threads(1)
        clock = time.process_time
    made = recipe(
        model=folder.name.rpartition("-")[0],
        dtype="float32",
        threads=torch.get_num_threads(),
        repeats=args.repeats,
        clock=clock.__name__,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )
    found = {
        "recipe": made,
        "chunk": measure_chunk(args.repeats, clock),
        "prefill": measure_prefill(folder, args.repeats, clock),
    }
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    results[torch.backends.cpu.get_cpu_capability()] = found
    print(json.dumps(found, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def float_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One call with a mask that is added to the scores."""
    mask = torch.full((len(q), len(k)), -torch.inf).triu(len(k) - len(q) + 1)
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bool_mask": attention._attend_at_once,
    "float_mask": float_mask,
    "two_calls": attention._attend_in_two,
}


@torch.inference_mode()
def measure_chunk(repeats: int, clock: Clock) -> dict[str, Any]:
    """Milliseconds of a chunk's attention by its keys, the ways in turns; all agree."""
    table = {}
    for kv_len in KEYS:
        q = torch.randn(CHUNK, HEADS, HEAD_DIM)
        k, v = torch.randn(2, kv_len, KV_HEADS, HEAD_DIM)
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for repeat in range(5 * repeats + 1):
            outputs = []
            for name, way in WAYS.items():
                start = clock()
                outputs.append(way(q, k, v))
                if repeat:
                    times[name].append((clock() - start) * 1e3)
            assert all(torch.allclose(output, outputs[0], atol=1e-5) for output in outputs)
        table[str(kv_len)] = {name: spread(values) for name, values in times.items()}
    return {"what": f"ms for {CHUNK} queries, by keys; {HEADS} query and {KV_HEADS} KV heads of {HEAD_DIM}", **table}


def measure_prefill(folder: Path, repeats: int, clock: Clock) -> dict[str, Any]:
    """Seconds for a prompt and one token: with a mask, in two calls, and by transformers; and ratios over the last."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    llm = LLM(folder)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = GenerationConfig(max_new_tokens=1, do_sample=False, pad_token_id=0)

    def ours(prompt: list[int]) -> int:
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids[0]

    def masked(prompt: list[int]) -> int:
        with mock.patch.object(attention, "CPU_KERNEL", "no_such_operator"):
            return ours(prompt)

    def transformers(prompt: list[int]) -> int:
        token_ids = torch.tensor([prompt])
        return int(peer.generate(token_ids, attention_mask=torch.ones_like(token_ids), generation_config=config)[0, -1])

    engines = {"bool_mask": masked, "two_calls": ours, "transformers": transformers}
    rng, table = random.Random(0), {}
    for length in PROMPTS:
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            engine([rng.randrange(100, 40000) for _ in range(CHUNK)])
        for repeat in range(repeats):
            prompt = [rng.randrange(100, 40000) for _ in range(length)]
            tokens = set()
            for name in list(engines) if repeat % 2 else reversed(list(engines)):
                start = clock()
                tokens.add(engines[name](prompt))
                seconds[name].append(clock() - start)
            assert len(tokens) == 1, "one prompt, one greedy token"
        row = {name: spread(values) for name, values in seconds.items()}
        for name in ("bool_mask", "two_calls"):
            ratios = [b / a for a, b in zip(seconds[name], seconds["transformers"], strict=True)]
            row[f"transformers_over_{name}"] = spread(ratios)
        table[str(length)] = row
    return {"what": "seconds for a prompt of so many tokens and one token", **table}


if __name__ == "__main__":
    main()
