"""What v0.1 costs beside transformers, on the same weights: `python -m v0_1_single_request.measurements.decode`.

Ratios are taken within one run, the engines alternating, since machines differ and are noisy. The figures go to
`decode.json` with their recipe; the pages quote that file. Dropped in v0.2, which measures something else.
"""

import argparse
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.config import ModelConfig
from common.llama import Llama, linear, pack
from common.measuring.recipe import recipe, spread
from common.sampling import sample
from common.sampling_params import SamplingParams, SamplingState
from common.weights import expected_shapes, load_weights, resolve

from ..kv_cache import KVCache
from ..llm import LLM

PROMPT = "Why is the sky blue?"
NUM_TOKENS = 64
MILESTONE = (__package__ or "").partition(".")[0]
RESULTS = Path(__file__).with_suffix(".json")


def main() -> None:
    """Run every measurement, print it and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    folder = resolve(None)
    results: dict[str, Any] = {
        "recipe": recipe(
            model=folder.name.rpartition("-")[0], dtype="float32", threads=torch.get_num_threads(), repeats=args.repeats
        )
    }
    measurements: dict[str, Callable[[], dict[str, Any]]] = {
        "start": lambda: measure_start(args.repeats),
        "load": lambda: measure_load(folder, args.repeats),
        "decode": lambda: measure_decode(folder, args.repeats),
        "parity": lambda: measure_parity(folder),
        "sampling": lambda: measure_sampling(folder, args.repeats),
        "linear": lambda: measure_linear(folder, args.repeats),
    }
    for name, measure in measurements.items():
        print(f"{name} ...", flush=True)
        results[name] = measure()
        print(json.dumps(results[name], indent=1), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.out}")
    if args.out == RESULTS:
        print("the documents quote this file: python -m tools.figures --write takes the new figures over")


def measure_decode(folder: Path, repeats: int) -> dict[str, Any]:
    """Decode tokens/s of one request, ours and transformers' `generate`, after one warm-up each; the same tokens."""
    from transformers import GenerationConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

    llm = LLM(folder)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = llm.tokenizer.chat_token_ids([{"role": "user", "content": PROMPT}])

    class Clock(StoppingCriteria):
        """Called after each token: reads the clock and never stops."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(1, dtype=torch.bool)

    def ours() -> tuple[float, list[int]]:
        [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
        seconds = output.metrics.finished_time - output.metrics.first_token_time
        return (NUM_TOKENS - 1) / seconds, output.outputs[0].token_ids

    def theirs() -> tuple[float, list[int]]:
        clock, ids = Clock(), torch.tensor([prompt])
        # An end token that never comes: `None` would be replaced by the model's own.
        no_end = reference.config.vocab_size
        config = GenerationConfig(do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=no_end, pad_token_id=0)
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return (NUM_TOKENS - 1) / (clock.times[-1] - clock.times[0]), out[0, len(prompt) :].tolist()

    rates: dict[str, list[float]] = {"ours": [], "transformers": []}
    for repeat in range(repeats + 1):
        order = [("ours", ours), ("transformers", theirs)]
        tokens = []
        for name, engine in order if repeat % 2 else reversed(order):
            rate, token_ids = engine()
            tokens.append(token_ids)
            if repeat:  # the first round is the warm-up
                rates[name].append(rate)
        assert tokens[0] == tokens[1], "both engines give the same greedy tokens"
    ratios = [a / b for a, b in zip(rates["ours"], rates["transformers"], strict=True)]
    return {
        "what": f"tokens/s of one request, {len(prompt)} prompt tokens, {NUM_TOKENS} greedy tokens, first one left out",
        **{name: spread(values) for name, values in rates.items()},
        "ratio": spread(ratios),
    }


@torch.inference_mode()
def measure_parity(folder: Path) -> dict[str, Any]:
    """The largest distance of any logit to transformers in float64: ours, and transformers' own in float32."""
    from transformers import LlamaForCausalLM

    llm = LLM(folder)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    exact = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    off = {"ours": 0.0, "transformers": 0.0}
    for text in (PROMPT, "def add(a, b):\n    return", "Das Wetter ist heute 中文 🙂 " * 4):
        ids = torch.tensor(llm.tokenizer.chat_token_ids([{"role": "user", "content": text}]))
        expected = exact(ids[None]).logits[0]
        off["ours"] = max(off["ours"], float((_logits(llm, ids) - expected).abs().max()))
        off["transformers"] = max(off["transformers"], float((reference(ids[None]).logits[0] - expected).abs().max()))
    return {"what": "largest distance of a logit to float64, over all positions of three prompts", **off}


def _logits(llm: LLM, ids: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """What the model says at the `rows` of a sequence, `[len(rows), vocab_size]`."""
    cache = KVCache(llm.model.config, len(ids), llm.model.device, llm.model.dtype, llm.attention)
    cache.begin_step(len(ids))
    return llm.model.logits(llm.model.forward(ids, torch.arange(len(ids)), cache, rows=rows))


def measure_load(folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds to load the weights (files in the page cache), and the peak of anonymous memory over the weights."""
    runs = []
    for _ in range(repeats):
        code = f"from v0_1_single_request.measurements.decode import load_once; load_once({str(folder)!r})"
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(out))
    return {
        "what": "loading the weights into a fresh process, in seconds; peak RssAnon over the baseline, by weight bytes",
        "seconds": spread([run["seconds"] for run in runs]),
        "peak_over_weights": spread([run["peak_over_weights"] for run in runs]),
    }


def load_once(folder: str) -> None:
    """The child of `measure_load`: load, watch the memory, print both as JSON."""
    base = peak = _rss_anon()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _rss_anon())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    model = Llama.from_folder(Path(folder), torch.device("cpu"), torch.float32)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    weights = 4 * sum(math.prod(shape) for shape in expected_shapes(model.config).values())
    print(json.dumps({"seconds": seconds, "peak_over_weights": (max(peak, _rss_anon()) - base) / weights}))


def measure_start(repeats: int) -> dict[str, Any]:
    """Seconds from starting the command to its first character of text, the conversion done before."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        command = [sys.executable, "-m", MILESTONE, PROMPT, "--max-tokens", "2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            child.stdout.read(1)
            seconds.append(time.perf_counter() - start)
    return {"what": "seconds from the command line to the first character of the answer", "seconds": spread(seconds)}


@torch.inference_mode()
def measure_sampling(folder: Path, repeats: int) -> dict[str, Any]:
    """Milliseconds for 32 rows of real logits: ours, and what sorting the vocabulary alone would take."""
    llm = LLM(folder)
    logits = _real_logits(llm)
    assert isinstance(llm.model, Llama)

    def ours(**params: Any) -> Callable[[], Any]:
        states = [
            SamplingState.create(SamplingParams(**params), [0], llm.eos_token_ids, seed) for seed in range(len(logits))
        ]
        return lambda: sample(logits, states)

    times = _time_all(
        {
            "full_sort": lambda: logits.sort(dim=-1, descending=True),
            "top_p_0.95": ours(temperature=0.8, top_p=0.95),
            "top_k_50": ours(temperature=0.8, top_k=50),
            "unfiltered": ours(temperature=0.8),
            "greedy": ours(temperature=0.0),
        },
        repeats,
    )
    share = times["top_p_0.95"]["median"] / times["full_sort"]["median"]
    return {"what": f"ms for {list(logits.shape)} real logits", **times, "top_p_over_full_sort": round(share, 3)}


def _real_logits(llm: LLM) -> torch.Tensor:
    """`[32, vocab_size]`: what the model says at 32 positions of a text of its own."""
    prompt = llm.tokenizer.chat_token_ids([{"role": "user", "content": "Tell me a story about a lighthouse."}])
    [output] = llm.generate([prompt], SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True, seed=0))
    ids = torch.tensor([*prompt, *output.outputs[0].token_ids])
    # Contiguous, which is the form a sort takes best.
    return _logits(llm, ids, torch.arange(len(prompt), len(ids), 2)).contiguous()


@torch.inference_mode()
def measure_linear(folder: Path, repeats: int) -> dict[str, Any]:
    """Milliseconds for all matrix products of one step, by rows: with the matrices as they are, and packed."""
    config = ModelConfig.from_folder(folder)
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
    weights = load_weights(folder, config, torch.device("cpu"), torch.float32)
    plain = [tensor for name, tensor in weights.items() if name.endswith(names)]
    packed = [pack(matrix) for matrix in plain]

    def step(matrices: list[torch.Tensor], rows: int) -> Callable[[], Any]:
        inputs = {width: torch.randn(rows, width) for width in {matrix.shape[1] for matrix in matrices}}
        return lambda: [linear(inputs[matrix.shape[1]], matrix) for matrix in matrices]

    table = {}
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        times = _time_all({"plain": step(plain, rows), "packed": step(packed, rows)}, repeats, calls=3)
        table[str(rows)] = {name: spread["median"] for name, spread in times.items()}
    return {"what": "median ms for all linear layers of one step, by rows (tokens in the step)", "rows": table}


def _time_all(functions: dict[str, Callable[[], Any]], repeats: int, calls: int = 10) -> dict[str, dict[str, float]]:
    """Milliseconds of each function, the mean of `calls` calls; in turns, after a warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if repeat:
                times[name].append((time.perf_counter() - start) * 1e3 / calls)
    return {name: spread(values) for name, values in times.items()}


def _rss_anon() -> int:
    """Bytes of anonymous memory: what is not merely a mapped file (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
