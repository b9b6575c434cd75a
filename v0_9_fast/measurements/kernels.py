"""What each kernel gains: `python -m v0_9_fast.measurements.kernels`.

    product      all products of twelve layers once, by rows: ours in three ways of storing weights, and oneDNN's
    attention    all layers: blocks in place, and gathered for SDPA, for decodes and for chunks of prompts
    rows         norms, rotation and gate of all layers, by rows: ours, and PyTorch's
    step         a whole step of decodes: without kernels, with one kind after the other, with 16-bit weights
    threads      a whole step by the number of threads
    reading      a step of one request, and a sum over as many bytes as it has weights: how fast memory can be read
    around       the parts of a step with the kernels: what is not the model, too
    choosing     how long it takes to find out which product is the faster one

Each pair is timed in turns within a round, and a ratio is taken within a round: above 1, the kernel is faster. The
figures go to `kernels.json` with their recipe; the pages quote that file. It takes some minutes, and wants a machine
that does nothing else.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common import llama
from common.attention import sdpa
from common.config import ModelConfig
from common.measuring.recipe import recipe, spread
from common.sampling_params import SamplingParams
from common.weights import resolve

from .. import choosing, model_runner
from ..engine import LLMEngine
from ..kernels import bindings
from ..kernels.bindings import Kernels
from ..kv_cache import KVCache
from ..paged_kv_cache import PagedKVCache

RESULTS = Path(__file__).with_suffix(".json")
SEED = 0
NUM_LAYERS = 12  # of products that are timed one after the other: more than the caches hold
PRODUCT_ROWS = (1, 4, 8, 16, 32, 64, 256)
NORM_ROWS = (1, 8, 32, 256)
# Requests, tokens of each before the step, and new ones.
ATTENTION = {
    "1 decode of 100": (1, 100, 1),
    "1 decode of 2,000": (1, 2000, 1),
    "32 decodes of 100": (32, 100, 1),
    "16 decodes of 1,000": (16, 1000, 1),
    "a prompt of 512": (1, 0, 512),
    "512 behind 512": (1, 512, 512),
    "512 behind 3,488": (1, 3488, 512),
}
# Requests, and tokens of each prompt.
STEPS = {"1": (1, 30), "8": (8, 30), "32": (32, 30), "16 at 1,000": (16, 1000)}
NUM_STEPS = 8  # that are timed at once
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"kernels": "torch"},
    "products": {"kernels": "c"},  # these alone, see `steps`
    "rows": {"kernels": "c"},  # and norms, rotations and gates
    "float32": {"kernels": "c"},
    "float16": {"kernels": "c", "weights_dtype": "float16"},
    "bfloat16": {"kernels": "c", "weights_dtype": "bfloat16"},
}
PARTS = ("product", "attention", "rows", "step", "threads", "reading", "around", "choosing")


def main() -> None:
    """Measure, print, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the others stay as the file has them")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, after one that warms up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = bindings.load()
    if isinstance(kernels, str):
        raise SystemExit(f"There are no kernels here: {kernels}.")
    kernels.use_threads(args.threads)
    folder = resolve(None)
    config = ModelConfig.from_folder(folder)
    settings = {"threads": args.threads, "repeats": args.repeats, "warmup_rounds": 1, "seed": SEED}
    made = recipe(model=folder.name.rpartition("-")[0], **settings)
    others = json.loads(args.out.read_text()) if args.out.exists() else {}
    results: dict[str, Any] = {"recipe": made} | {name: part for name, part in others.items() if name != "recipe"}
    torch.manual_seed(SEED)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "product": lambda: products(kernels, config, args.repeats),
        "attention": lambda: attentions(kernels, config, args.repeats),
        "rows": lambda: rows(kernels, config, args.repeats),
        "step": lambda: steps(args.repeats),
        "threads": lambda: threads(args.threads, args.repeats),
        "reading": lambda: reading(config, args.repeats),
        "around": lambda: around(args.repeats),
        "choosing": lambda: choosings(kernels, config, args.repeats),
    }
    with torch.inference_mode():
        for name in args.only:
            results[name] = {"commit": made["commit"], **parts[name]()}
            print(json.dumps({name: results[name]}, indent=1))
            args.out.write_text(json.dumps(results, indent=1) + "\n")


def compared(ways: Mapping[str, Callable[[], object]], repeats: int, title: str, times_each: int = 1) -> dict[str, Any]:
    """Milliseconds of each way, and how many times as long the first one took within a round.

    A way does what is timed `times_each` times.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name in ways if repeat % 2 else reversed(list(ways)):
            start = time.perf_counter()
            ways[name]()
            if repeat:
                times[name].append(1e3 * (time.perf_counter() - start) / times_each)
    first = times[next(iter(ways))]
    tqdm.write(f"{title}: " + ", ".join(f"{name} {statistics.median(values):.2f} ms" for name, values in times.items()))
    return {
        "ms": {name: spread(values) for name, values in times.items()},
        "ratio": {name: spread([a / b for a, b in zip(first, times[name], strict=True)]) for name in list(ways)[1:]},
    }


def shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """`[width, depth]` of a layer's four matrices."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    return [(qkv, hidden), (hidden, heads), (2 * config.intermediate_size, hidden), (hidden, config.intermediate_size)]


def products(kernels: Kernels, config: ModelConfig, repeats: int) -> dict[str, Any]:
    """All products of some layers, for each number of rows."""
    sizes = shapes(config) * NUM_LAYERS
    weights = [torch.randn(size) for size in sizes]
    reordered = [llama.pack(weight) for weight in weights]
    packed = {
        str(dtype).removeprefix("torch."): [kernels.pack(weight, dtype) for weight in weights]
        for dtype in bindings.STORED
    }
    found = {}
    for num_rows in PRODUCT_ROWS:
        inputs = [torch.randn(num_rows, depth) for _, depth in sizes]
        ways: dict[str, Callable[[], object]] = {"onednn": partial(_products_by_onednn, inputs, reordered)}
        ways |= {name: partial(_products, kernels, inputs, panels, sizes) for name, panels in packed.items()}
        found[str(num_rows)] = compared(ways, repeats, f"products of {num_rows} rows")
    return {"num_layers": NUM_LAYERS, "rows": found}


def _products_by_onednn(inputs: list[Tensor], matrices: list[Tensor]) -> None:
    for x, matrix in zip(inputs, matrices, strict=True):
        llama.linear(x, matrix)


def _products(kernels: Kernels, inputs: list[Tensor], matrices: list[Tensor], sizes: list[tuple[int, int]]) -> None:
    for x, matrix, (width, _) in zip(inputs, matrices, sizes, strict=True):
        kernels.product(x, matrix, width)


def attentions(kernels: Kernels, config: ModelConfig, repeats: int) -> dict[str, Any]:
    """Attention of all layers, each over its own part of the pool; keys and values are stored first."""
    found = {}
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    for name, (num_requests, past, new) in ATTENTION.items():
        num_blocks = -(-(past + new) // 16)
        order = torch.randperm(num_blocks * num_requests).tolist()
        tables = [order[i * num_blocks : (i + 1) * num_blocks] for i in range(num_requests)]
        gathered = Gathering(config, len(order), 16, torch.device("cpu"), torch.float32, sdpa)
        in_place = PagedKVCache(config, len(order), 16, sdpa, kernels)
        for pool in (gathered, in_place):
            pool.kv.normal_()
            pool.begin_step(tables, [new] * num_requests, [past + new] * num_requests)
        qkv = torch.randn(num_requests * new, sum(heads), config.head_dim).split(heads, dim=1)
        ways = {"gathered": partial(_attend, gathered, qkv), "in_place": partial(_attend, in_place, qkv)}
        found[name] = compared(ways, repeats, f"attention, {name}")
    return {"num_layers": config.num_layers, "loads": found}


def _attend(pool: KVCache, qkv: Sequence[Tensor]) -> None:
    for layer in range(len(pool.kv)):
        pool.attend(layer, *qkv)


def rows(kernels: Kernels, config: ModelConfig, repeats: int) -> dict[str, Any]:
    """Both norms, the rotation and the gate of all layers."""
    found = {}
    for num_rows in NORM_ROWS:
        hidden, weight = torch.randn(num_rows, config.hidden_size), torch.rand(config.hidden_size)
        qk = torch.randn(num_rows, config.num_heads + config.num_kv_heads, config.head_dim)
        gate_up = torch.randn(num_rows, 2 * config.intermediate_size)
        cos, sin = llama.rope_cos_sin(torch.arange(num_rows), llama.rope_inv_freq(config.rope, config.head_dim))
        inputs = (config.num_layers, hidden, weight, qk, gate_up, cos, sin)
        ways = {"torch": partial(_rows_by_torch, *inputs), "c": partial(_rows, kernels, *inputs)}
        found[str(num_rows)] = compared(ways, repeats, f"norms and gates of {num_rows} rows")
    return {"num_layers": config.num_layers, "rows": found}


def _rows_by_torch(
    num_layers: int, hidden: Tensor, weight: Tensor, qk: Tensor, gate_up: Tensor, cos: Tensor, sin: Tensor
) -> None:
    for _ in range(num_layers):
        llama.rms_norm(hidden, weight, 1e-5)
        llama.apply_rope(qk, cos, sin)
        llama.rms_norm(hidden, weight, 1e-5)
        gate, up = gate_up.chunk(2, dim=-1)
        F.silu(gate).mul_(up)


def _rows(
    kernels: Kernels,
    num_layers: int,
    hidden: Tensor,
    weight: Tensor,
    qk: Tensor,
    gate_up: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    cos, sin = cos[:, 0], sin[:, 0]
    for _ in range(num_layers):
        kernels.rms_norm(hidden, weight, 1e-5)
        kernels.rotate(qk, cos, sin)
        kernels.rms_norm(hidden, weight, 1e-5)
        kernels.silu_mul(gate_up)


class Gathering(KVCache):
    """The plain pool, given queries and keys side by side, as PyTorch's rotation leaves them: else it is slower."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(layer, q.contiguous(), k.contiguous(), v)


class RowsByTorch:
    """Kernels whose norms, rotations and gates are PyTorch's."""

    def use_threads(self, num_threads: int) -> None:
        """PyTorch has its own."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return llama.rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        x.copy_(llama.apply_rope(x, cos[:, None], sin[:, None]))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def steps(repeats: int) -> dict[str, Any]:
    """Milliseconds of a step of decodes, by the number of requests; their prompts are computed before."""
    engines = {
        name: LLMEngine(max_model_len=2048, enable_prefix_caching=False, **flags) for name, flags in WAYS.items()
    }
    for name in ("products", "rows"):  # these gather
        runner, pool = engines[name].model_runner, engines[name].model_runner.kv_cache
        shape = (runner.model.config, engines[name].pool.num_blocks, pool.block_size)
        runner.kv_cache = Gathering(*shape, torch.device("cpu"), torch.float32, pool.attention)
    engines["products"].model.kernels = RowsByTorch()  # type: ignore[attr-defined]
    found = {}
    for name, (num_requests, prompt_len) in STEPS.items():
        for engine in engines.values():
            _begin(engine, num_requests, prompt_len, NUM_STEPS * (repeats + 1))
        ways = {way: partial(_step, engine) for way, engine in engines.items()}
        found[name] = compared(ways, repeats, f"{NUM_STEPS} steps of {name}", NUM_STEPS)
        for engine in engines.values():
            assert len(engine.scheduler.running) == num_requests, "a request has ended: its steps were no full ones"
            _end(engine, num_requests)
    return found


def threads(most: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step of decodes with 1, 2, 4, ... threads, by the number of requests."""
    engine = LLMEngine(max_model_len=2048, enable_prefix_caching=False, kernels="c")
    numbers = [number for number in (1, 2, 4, 8, 16, 32, 64) if number < most] + [most]
    found = {}
    for name, (num_requests, prompt_len) in STEPS.items():
        _begin(engine, num_requests, prompt_len, NUM_STEPS * (repeats + 1) * len(numbers))
        ways = {str(number): partial(_step_by, engine, number) for number in numbers}
        found[name] = compared(ways, repeats, f"{NUM_STEPS} steps of {name} by threads", NUM_STEPS)
        assert len(engine.scheduler.running) == num_requests, "a request has ended: its steps were no full ones"
        _end(engine, num_requests)
    torch.set_num_threads(most)
    return found


def _step_by(engine: LLMEngine, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    _step(engine)


def _step(engine: LLMEngine) -> None:
    for _ in range(NUM_STEPS):
        engine.step()


def _begin(engine: LLMEngine, num_requests: int, prompt_len: int, num_steps: int) -> None:
    """Add requests and compute their prompts, so that so many steps with all of them are left."""
    generator = torch.Generator().manual_seed(SEED)
    # Those that come first write while the others' prompts are computed, in chunks of the budget.
    while_others = num_requests * prompt_len // engine.scheduler.max_num_batched_tokens + num_requests
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + while_others + 2, ignore_eos=True)
    for i in range(num_requests):
        prompt = torch.randint(0, 40_000, (prompt_len,), generator=generator).tolist()
        engine.add_request(str(i), prompt, params)
    scheduler = engine.scheduler
    while any(not request.sampling.output_token_ids for request in (*scheduler.running, *scheduler.waiting)):
        engine.step()


def _end(engine: LLMEngine, num_requests: int) -> None:
    for i in range(num_requests):
        engine.abort_request(str(i))


def reading(config: ModelConfig, repeats: int) -> dict[str, Any]:
    """For weights of 4 and of 2 bytes: how long the reading takes, and which share of a step that is."""
    num_weights = config.num_layers * sum(map(math.prod, shapes(config))) + config.vocab_size * config.hidden_size
    found = {}
    for name, num_bytes in (("float32", 4), ("float16", 2)):
        engine = LLMEngine(max_model_len=2048, enable_prefix_caching=False, **WAYS[name])
        source = torch.rand(num_weights * num_bytes // 4)
        _begin(engine, 1, 30, NUM_STEPS * (repeats + 1))
        ways = {"reading": partial(_read, source), "step": partial(_step, engine)}
        times = compared(ways, repeats, f"{source.nbytes / 1e6:.0f} MB and a step", NUM_STEPS)
        rates = [source.nbytes / 1e6 / times["ms"]["reading"][end] for end in ("max", "median", "min")]
        found[name] = {
            "megabytes": source.nbytes / 1e6,
            "gb_s": dict(zip(("min", "median", "max"), rates, strict=True)),
            "ms": times["ms"],
            "share": times["ratio"]["step"],
        }
    return found


def _read(source: Tensor) -> None:
    for _ in range(NUM_STEPS):
        source.sum()


def around(repeats: int) -> dict[str, Any]:
    """Milliseconds of each part of a step of decodes, and of all of it, by clocks around its functions."""
    engine = LLMEngine(max_model_len=2048, enable_prefix_caching=False, kernels="c")
    parts: dict[str, tuple[Any, str]] = {
        "schedule": (engine.scheduler, "schedule"),
        "input": (model_runner, "pack"),
        "input of attention": (engine.model_runner.kv_cache, "begin_step"),
        "layers": (engine.model, "forward"),
        "head": (engine.model, "logits"),
        "sample": (model_runner, "sample"),
        "update": (engine.scheduler, "update"),
        "text": (engine.output_processor, "process"),
    }
    clocks = dict.fromkeys(parts, 0.0)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                clocks[name] += time.perf_counter() - start

        return run

    originals = {name: getattr(owner, function) for name, (owner, function) in parts.items()}
    for name, (owner, function) in parts.items():
        setattr(owner, function, timed(name, originals[name]))
    found: dict[str, Any] = {}
    for num_requests in (1, 32):
        times: dict[str, list[float]] = {name: [] for name in [*parts, "step"]}
        for repeat in range(repeats + 1):
            _begin(engine, num_requests, 30, NUM_STEPS)
            clocks.update(dict.fromkeys(parts, 0.0))
            start = time.perf_counter()
            _step(engine)
            seconds = time.perf_counter() - start
            _end(engine, num_requests)
            if repeat:
                for name, value in (clocks | {"step": seconds}).items():
                    times[name].append(1e3 * value / NUM_STEPS)
        found[str(num_requests)] = {name: spread(values) for name, values in times.items()}
    for name, (owner, function) in parts.items():
        setattr(owner, function, originals[name])
    return found


def choosings(kernels: Kernels, config: ModelConfig, repeats: int) -> dict[str, Any]:
    """Seconds to choose for all shapes of the model, and what was chosen: infinity is all rows."""
    layers = [[torch.randn(shape) for shape in shapes(config)] for _ in range(config.num_layers)]
    kinds = [list(weights) for weights in zip(*layers, strict=True)]
    kinds.append([torch.randn(config.vocab_size, config.hidden_size)])
    seconds, found = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        found.append([str(choosing.measured(kernels, weights)) for weights in kinds])
        seconds.append(time.perf_counter() - start)
    return {"seconds": spread(seconds), "most_rows": found}


if __name__ == "__main__":
    main()
