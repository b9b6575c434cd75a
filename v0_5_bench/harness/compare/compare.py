"""`python -m v0_5_bench compare`: the same prompts through several engines, in turns, each in a process of its own.

What makes it a comparison: the same weights in the same dtype; before anything is timed, all must give the same greedy
tokens; prompts that no engine has seen before, the same for all, and answers of a fixed length; a round that warms up
and is left out; then rounds in alternating order, while whoever is not asked stands still. A ratio is taken within a
round, so that a machine that slows down slows down all of them. What the machine itself reaches is measured in every
round, too: the roof of one hour is not that of the next.

Prefix caches are switched off, except for the workloads `shared_prefix` and `shared_prefix_cold`, which are about them.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ModelError
from common.measuring.recipe import recipe, spread
from common.units import check_count

from ..load import runs, workloads
from . import peers
from .peers import Places

if TYPE_CHECKING:
    from rich.table import Table

# Continuations that a language model is sure of, so that engines that round differently do not part at once.
CHECK_TEXTS = (
    "The capital of France is",
    "One, two, three, four, five,",
    "Monday, Tuesday, Wednesday,",
    "The quick brown fox jumps over the lazy",
)
CHECK_LEN = 4
RATES = {"num_bytes": 512 * 2**20, "size": 2048}  # what `cpu_rates` sums up, and multiplies
MIN_MODEL_LEN = 128  # tokens; the check needs some, whatever is measured

# The pool of `measure_occupancy`, in tokens, and what is asked of it: more than it holds.
POOL_TOKENS, POOL_BLOCK = 4096, 16
POOL_REQUESTS, POOL_INPUT_LEN, POOL_OUTPUT_LEN, POOL_MODEL_LEN = 40, (20, 600), (16, 48), 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests at once, each of so many random tokens, each answered with so many.

    The first `shared_len` tokens are the same for all requests of a round; and, if `is_warm`, of all rounds, so that
    the round that warms up leaves them in the prefix cache.
    """

    num_requests: int
    input_len: int
    output_len: int
    shared_len: int = 0
    is_warm: bool = False

    def requests(self, seed: int, repeat: int) -> list[workloads.BenchRequest]:
        """Those of one round."""
        tail_len = self.input_len - self.shared_len
        lengths = (tail_len, tail_len), (self.output_len, self.output_len)
        if not self.shared_len:
            return workloads.random_prompts(self.num_requests, *lengths, seed + repeat)
        prefix_seed = seed if self.is_warm else seed + repeat + 1  # never the prefix of the warm workload
        return workloads.shared_prefix(
            self.num_requests, self.shared_len, *lengths, seed + repeat, prefix_seed=prefix_seed
        )


WORKLOADS = {
    "decode_1": Workload(1, 30, 64),
    "decode_8": Workload(8, 30, 64),
    "decode_32": Workload(32, 30, 64),
    "prefill_2000": Workload(1, 2000, 1),
    "prefill_4000": Workload(1, 4000, 1),
    "shared_prefix": Workload(16, 1020, 16, shared_len=1000, is_warm=True),
    "shared_prefix_cold": Workload(16, 1020, 16, shared_len=1000),
}
UNSHARED = [name for name, workload in WORKLOADS.items() if not workload.shared_len]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `compare`."""
    parser.add_argument(
        "--engines", nargs="+", metavar="ENGINE", help=f"compared to the first: {', '.join(peers.PEERS)}"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=UNSHARED,
        metavar="WORKLOAD",
        help=f"of {', '.join(WORKLOADS)} (default: those whose prompts share nothing)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="what --model of the milestones takes (default: the default model)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--vllm-venv", type=Path, help="a virtual environment with the real vLLM")
    parser.add_argument("--llama-venv", type=Path, help="a virtual environment with llama-cpp-python")
    parser.add_argument("--no-occupancy", action="store_true", help="leave out how full the KV pools get")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")


def run(args: argparse.Namespace) -> None:
    """Compare, print a table, write the file."""
    from rich.console import Console

    check_count("repeats", args.repeats)
    runs.make_room(args.out)
    chosen = {name: WORKLOADS[name] for name in args.workloads}
    longest = max(MIN_MODEL_LEN, *(workload.input_len + workload.output_len for workload in chosen.values()))
    prefix_caching = any(workload.shared_len for workload in chosen.values())
    if prefix_caching and not all(workload.shared_len for workload in chosen.values()):
        raise ModelError("workloads: a shared prefix is compared with prefix caches, all else without: run them apart.")
    places = replace(
        find_places(args.model, args.vllm_venv, args.llama_venv),
        max_model_len=longest,
        dtype=args.dtype,
        prefix_caching=prefix_caching,
    )
    names = args.engines or [
        "v0_5",
        "transformers",
        *(["vllm"] if args.vllm_venv else []),
        *(["llama.cpp"] if args.llama_venv else []),
    ]
    if len(set(names)) < len(names):
        raise ModelError("engines: the same one is named twice.")
    starts = {name: peers.describe(name, places) for name in names}  # here, so that what is missing is said at once
    results: dict[str, Any] = {
        "recipe": recipe(
            model=runs.model_name(places.folder),
            dtype=args.dtype,
            threads=peers.NUM_THREADS,
            repeats=args.repeats,
            warmup_rounds=1,
            seed=args.seed,
            temperature=0,
            ignore_eos=True,
            prefix_caching=prefix_caching,
            order="alternates from round to round; whoever is not asked is stopped",
        ),
        "weights": weights_of(places),
    }
    if not args.no_occupancy and not prefix_caching:
        results["occupancy"] = measure_occupancy([name for name in names if name in ("v0_5", "vllm")], places)
    with ExitStack() as stack:
        engines: dict[str, peers.Engine] = {}
        for name, start in starts.items():
            print(f"starting {name} ...", file=sys.stderr, flush=True)
            engines[name] = stack.enter_context(peers.Engine(name, start))
        results["engines"] = {name: engine.versions for name, engine in engines.items()}
        results["check"] = check_same(engines, places)
        print(results["check"]["what"], file=sys.stderr)
        results["workloads"] = {}
        machine = stack.enter_context(peers.Engine("machine", peers.machine()))
        for name, entry in measure(engines, chosen, args.repeats, args.seed, machine):
            results["workloads"][name] = entry
            runs.write(args.out, results)
    Console().print(table(results))


def find_places(model: str | None, vllm_venv: Path | None, llama_venv: Path | None) -> Places:
    """Resolve the model once, for all; raises `ModelError` where it is not there."""
    from common.weights import default_gguf, resolve

    gguf = default_gguf() if model is None else Path(model) if model.endswith(".gguf") else None
    return Places(resolve(model), gguf, vllm_venv, llama_venv)


def weights_of(places: Places) -> dict[str, str]:
    """Which weights all of them had, by the digests of the files."""
    files = sorted(places.folder.glob("*.safetensors")) + ([places.gguf] if places.gguf else [])
    return {file.name: f"sha256 {peers.sha256(file)}" for file in files}


def check_same(engines: dict[str, peers.Engine], places: Places) -> dict[str, Any]:
    """Whether all give the same greedy tokens.

    Raises:
        ModelError: one of them does not; what it computes is something else, and its speed says nothing.
    """
    from common.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(places.folder)
    prompts = [tokenizer.encode(text) for text in CHECK_TEXTS]
    job = {"do": "generate", "prompts": prompts, "output_lens": [CHECK_LEN] * len(prompts)}
    answers = {name: engine.ask(job)["token_ids"] for name, engine in engines.items()}
    first, *others = answers
    for name in others:
        if answers[name] != answers[first]:
            raise ModelError(
                f"{name} gives other greedy tokens than {first} ({answers[name]} and {answers[first]}): the two do not "
                "serve the same weights in the same dtype."
            )
    return {
        "what": f"all give the same first {CHECK_LEN} greedy tokens after each of {len(prompts)} prompts",
        "prompts": list(CHECK_TEXTS),
        "token_ids": answers[first],
    }


def measure(
    engines: dict[str, peers.Engine],
    chosen: dict[str, Workload],
    repeats: int,
    seed: int,
    machine: peers.Engine | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rounds of one workload after the other.

    Yields:
        A workload's name, and of each engine the seconds, and how its tokens and its speed stand to the first one's;
        and what the machine reached in the same rounds, if `machine` is there to be asked.
    """
    from tqdm import tqdm

    first = next(iter(engines))
    with tqdm(total=len(chosen) * len(engines) * (repeats + 1), desc="Comparing", disable=None) as bar:
        for name, workload in chosen.items():
            seconds: dict[str, list[float]] = {engine: [] for engine in engines}
            same = dict.fromkeys(engines, 0)
            rates: list[dict[str, Any]] = []
            for repeat in range(repeats + 1):
                if bar.disable:  # into a file, or a log: a line a round is what one can see of it
                    print(f"{name}, round {repeat} of {repeats} ...", file=sys.stderr, flush=True)
                requests = workload.requests(seed, repeat)
                output_lens = [request.num_output_tokens for request in requests]
                job = {"do": "generate", "prompts": [r.prompt for r in requests], "output_lens": output_lens}
                answers = {}
                for engine in list(engines) if repeat % 2 else reversed(engines):
                    bar.set_postfix_str(f"{name}, {engine}")
                    answers[engine] = engines[engine].ask(job)
                    _check_lengths(engine, answers[engine]["token_ids"], output_lens)
                    bar.update()
                if repeat and machine is not None:
                    rates.append(machine.ask({"do": "measure", **RATES}))
                if repeat:
                    for engine, answer in answers.items():
                        seconds[engine].append(answer["seconds"])
                        pairs = zip(answer["token_ids"], answers[first]["token_ids"], strict=True)
                        same[engine] += sum(a == b for a, b in pairs)
            entry = _entry(workload, seconds, same, first)
            if rates:
                reached = ("read_gb_s", "float32_tflop_s")
                entry["machine"] = {key: spread([rate[key]["median"] for rate in rates]) for key in reached}
            yield name, entry


def _check_lengths(engine: str, token_ids: list[list[int]], output_lens: Sequence[int]) -> None:
    lengths = [len(ids) for ids in token_ids]
    if lengths != list(output_lens):
        raise ModelError(f"{engine} answered {lengths} tokens where {list(output_lens)} were asked for.")


def _entry(workload: Workload, seconds: dict[str, list[float]], same: dict[str, int], first: str) -> dict[str, Any]:
    num_tokens, num_answers = workload.num_requests * workload.output_len, workload.num_requests * len(seconds[first])
    entry: dict[str, Any] = {
        "num_requests": workload.num_requests,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        **({"shared_len": workload.shared_len, "is_warm": workload.is_warm} if workload.shared_len else {}),
        "samples_seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        "seconds": {name: spread(values) for name, values in seconds.items()},
        # How many times as fast as each the first one is, within each round.
        "ratio": {
            name: spread([theirs / ours for theirs, ours in zip(values, seconds[first], strict=True)])
            for name, values in seconds.items()
        },
        "same_answers": {name: f"{count} of {num_answers}" for name, count in same.items()},
    }
    if workload.output_len > 1:
        entry["tokens_per_s"] = {
            name: spread([num_tokens / value for value in values]) for name, values in seconds.items()
        }
    return entry


def measure_occupancy(names: Sequence[str], places: Places) -> dict[str, Any]:
    """How full a KV pool is while requests wait for room in it: the means over the steps of such a load.

    `tokens_of_pool` is the share of all slots that hold tokens; `blocks_of_pool` that of blocks in use;
    `tokens_of_blocks` how much of those blocks is filled.
    """
    small = {"max_model_len": POOL_MODEL_LEN}
    ways = {
        "v0_5": ("v0_5", {"num_blocks": POOL_TOKENS // POOL_BLOCK, "block_size": POOL_BLOCK}),
        # One block more: vLLM keeps one that holds nothing. Its CPU kernels take no block of fewer than 32 tokens; the
        # default for them is 128.
        "vllm": ("vllm-in-process", {"num_gpu_blocks_override": POOL_TOKENS // 32 + 1, "block_size": 32}),
        "vllm_default_block": ("vllm-in-process", {"num_gpu_blocks_override": POOL_TOKENS // 128 + 1}),
    }
    requests = workloads.random_prompts(POOL_REQUESTS, POOL_INPUT_LEN, POOL_OUTPUT_LEN, seed=7)
    job = {"prompts": [r.prompt for r in requests], "output_lens": [r.num_output_tokens for r in requests]}
    engines = {}
    for label, (name, arguments) in ways.items():
        if name.removesuffix("-in-process") not in names:
            continue
        print(f"pool of {label} ...", file=sys.stderr, flush=True)
        with peers.Engine(label, peers.describe(name, places, **small, **arguments)) as engine:
            answer = engine.ask({"do": "occupancy", **job})
        samples = answer["samples"]
        engines[label] = {
            "block_size": answer["block_size"],
            "num_blocks": answer["num_blocks"],
            "num_steps": len(samples),
            "tokens_of_pool": statistics.fmean(tokens / slots for tokens, _, slots in samples),
            "blocks_of_pool": statistics.fmean(used / slots for _, used, slots in samples),
            "tokens_of_blocks": statistics.fmean(tokens / used for tokens, used, _ in samples if used),
        }
    low, high = POOL_INPUT_LEN
    what = f"{POOL_REQUESTS} prompts of {low} to {high} tokens on a pool for {POOL_TOKENS}, the steps while some wait"
    return {"what": what, "engines": engines}


def table(results: dict[str, Any]) -> "Table":
    """The medians for people: tokens/s of the decodes, seconds of the prefills; × says how much faster the first is."""
    from rich import box
    from rich.table import Table

    names = list(results["engines"])
    shown = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="tokens/s, and seconds of a prefill; ×2: the first is twice as fast",
        title_justify="left",
    )
    shown.add_column("engine")
    for name in results["workloads"]:
        shown.add_column(name, justify="right")
    for engine in names:
        cells = []
        for entry in results["workloads"].values():
            by_rate = "tokens_per_s" in entry
            value = entry["tokens_per_s" if by_rate else "seconds"][engine]["median"]
            cell = f"{value:.1f}" if by_rate else f"{value:.2f} s"
            cells.append(cell if engine == names[0] else f"{cell} ×{entry['ratio'][engine]['median']:.2f}")
        shown.add_row(engine, *cells)
    return shown
