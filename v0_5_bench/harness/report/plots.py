"""The plots of the report, as SVG and PNG.

They are as wide as a phone's screen, so that their letters are not shrunk there; panels stand below each other.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.measuring.plotting import GREY, plotting

from .roofline import WEIGHT_BYTES, Results, roofline_point, roofs
from .tables import FAST, WORKLOADS, label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 5.0  # inches: 360 points, and a phone's screen has about as many pixels
COLOURS = {
    "v0_5": "#d9480f",
    "v0_9": "#d9480f",
    "v0_9-float16": "#d9480f",
    "vllm": "#1c7ed6",
    "vllm-in-process": "#74b3ec",
    "transformers": "#f59f00",
    "transformers-continuous": "#e8b75a",
    "llama.cpp": "#37963c",
    "llama.cpp-float16": "#37963c",
}
PART_COLOURS = ("#1c7ed6", "#d9480f", "#37963c", "#f59f00", "#9c36b5", "#0c8599", "#e64980", "#868e96", "#adb5bd")


def draw(results: Results, folder: Path, digest: str) -> list[Path]:
    """Draw every plot that the results suffice for; returns the files.

    Raises:
        ModelError: matplotlib is not installed.
    """
    files = []
    with plotting():
        folder.mkdir(parents=True, exist_ok=True)
        for name, (needed, plot) in PLOTS.items():
            if not set(needed) <= set(results):
                continue
            figure = plot(results)
            for kind, metadata in (("svg", {"Date": None, "Description": digest}), ("png", {"Description": digest})):
                files.append(folder / f"bench_{name}.{kind}")
                figure.savefig(files[-1], metadata=metadata, dpi=150)
    return files


def comparison(results: Results) -> "Figure":
    """Bars: tokens/s by requests, and seconds of the prefills; each engine's median, with smallest and largest."""
    figure, (upper, lower) = _figure(2, 5.6)
    found = results["comparison"]
    for axes, key, title in (
        (upper, "tokens_per_s", "output tokens/s"),
        (lower, "seconds", "seconds to the first token"),
    ):
        by_rate = key == "tokens_per_s"
        names = [name for name, entry in found["workloads"].items() if ("tokens_per_s" in entry) == by_rate]
        width = 0.84 / len(found["engines"])
        for i, (engine, versions) in enumerate(found["engines"].items()):
            values = [found["workloads"][name][key][engine] for name in names]
            places = [j + (i - (len(found["engines"]) - 1) / 2) * width for j in range(len(names))]
            medians = [value["median"] for value in values]
            errors = [[v["median"] - v["min"] for v in values], [v["max"] - v["median"] for v in values]]
            style = {"color": COLOURS.get(engine, GREY), "yerr": errors, "ecolor": GREY, "error_kw": {"lw": 0.8}}
            axes.bar(places, medians, width * 0.92, label=label(engine, versions).replace("`", ""), **style)
        axes.set_xticks(range(len(names)), [WORKLOADS[name] for name in names])
        axes.set_title(title, loc="left", fontsize=10)
        axes.tick_params(axis="x", length=0)
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1, fontsize=9)
    return figure


def progression(results: Results) -> "Figure":
    """Lines: tokens/s of each milestone by requests, and seconds of a prefill."""
    figure, (upper, lower) = _figure(2, 4.6)
    found = results["progression"]
    decodes = [name for name, entry in found["workloads"].items() if "tokens_per_s" in entry]
    prefills = [name for name in found["workloads"] if name not in decodes]
    engines = list(found["engines"])
    for i, name in enumerate(decodes):
        values = [found["workloads"][name]["tokens_per_s"][engine]["median"] for engine in engines]
        upper.plot(range(len(engines)), values, "o-", color=PART_COLOURS[i], lw=1.8, ms=5)
        upper.annotate(f" {WORKLOADS[name]}", (len(engines) - 1, values[-1]), va="center", color=PART_COLOURS[i])
    for i, name in enumerate(prefills):
        values = [found["workloads"][name]["seconds"][engine]["median"] for engine in engines]
        lower.plot(range(len(engines)), values, "o-", color=PART_COLOURS[i + 3], lw=1.8, ms=5)
        lower.annotate(f" {WORKLOADS[name]}", (len(engines) - 1, values[-1]), va="center", color=PART_COLOURS[i + 3])
    for axes, title in ((upper, "output tokens/s"), (lower, "seconds to the first token")):
        axes.set_xticks(range(len(engines)), [engine.replace("_", ".") for engine in engines])
        axes.set_xlim(-0.2, len(engines) + 0.6)
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def steps(results: Results) -> "Figure":
    """Stacked bars: the parts of a step by requests."""
    figure, [axes] = _figure(1, 3.2)
    found = results["attribution"]["steps"]["steps"]
    names = [name for name in found if not name.startswith("prefill")]
    parts = [part for part in found[names[0]] if part not in ("step_ms", "sum_of_step", "overhead")]
    parts.sort(key=lambda part: -found[names[-1]][part]["median"])
    left = [0.0] * len(names)
    for part, colour in zip(parts, PART_COLOURS, strict=True):
        values = [found[name][part]["median"] for name in names]
        axes.barh(range(len(names)), values, 0.62, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(names)), [f"{name} request{'s' if name != '1' else ''}" for name in names])
    axes.invert_yaxis()
    axes.set_title("ms of a decode step", loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


# Of each experiment: its name in the results, the figure, how it is called, and what it is multiplied by.
EXPERIMENTS = (
    ("batching", "tokens_per_s", "batching, tokens/s", 1),
    ("static_batching", "tokens_per_s", "static batching, tokens/s", 1),
    ("paging", "most_at_once", "paging, requests at once", 1),
    ("mixed_step", "tokens_per_s", "mixed step, tokens/s", 1),
    ("packed_matrices", "tokens_per_s", "packed matrices, tokens/s by requests", 1),
    ("chunked_prefill", "longest_gap_ms", "chunked prefill, longest gap in ms", 1),
    ("token_budget", "longest_gap_ms", "token budget, longest gap in ms", 1),
    ("token_budget", "ttft_s", "token budget, ms to the long prompt's first token", 1000),
)


def experiments(results: Results) -> "Figure":
    """Bars: a panel for each experiment, a bar for each way."""
    from matplotlib.figure import Figure

    found = results["attribution"]["experiments"]
    chosen = [(found[name]["ways"], key, title, factor) for name, key, title, factor in EXPERIMENTS if name in found]
    heights = [len(ways) for ways, *_ in chosen]
    height = 0.36 * sum(heights)
    # By hand: the solver of the other plots does not place so many panels the same every time.
    figure = Figure(figsize=(WIDTH, height))
    figure.set_layout_engine("none")
    places = {"left": 0.29, "right": 0.99, "top": 1 - 0.3 / height, "bottom": 0.05 / height, "hspace": 0.35}
    panels = figure.subplots(len(chosen), 1, height_ratios=heights, gridspec_kw=places, squeeze=False)[:, 0]
    for axes, (ways, key, title, factor) in zip(panels, chosen, strict=True):
        values = [way[key]["median"] * factor for way in ways.values()]
        axes.barh(range(len(ways)), values, 0.7, color=PART_COLOURS[0])
        for place, value in enumerate(values):
            axes.annotate(f" {value:,.0f}", (value, place), va="center", fontsize=9)
        axes.set_yticks(range(len(ways)), list(ways))
        axes.set_xticks([])
        axes.set_xlim(0, max(values) * 1.2)
        axes.tick_params(axis="y", length=0)
        axes.spines["bottom"].set_visible(False)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
    return figure


def roofline(results: Results) -> "Figure":
    """The roof of the machine, and every engine on every workload under it."""
    return _under_the_roof(results, ["comparison"])


def roofline_fast(results: Results) -> "Figure":
    """The same for v0.9 and its peers, with matrices in float32 and, further to the right, in float16."""
    return _under_the_roof(results, list(FAST))


def _under_the_roof(results: Results, comparisons: list[str]) -> "Figure":
    """All engines of these comparisons; both axes are logarithmic.

    The roof is a band, from the lowest that was measured to the highest. The first engine is a ring, so
    that no point hides another.
    """
    engines = [(each, *entry) for each in comparisons for entry in results[each]["engines"].items()]
    figure, [axes] = _figure(1, 4.0 + 0.2 * len(engines))
    (low_top, low_slope), (top, slope) = roofs(results, list(WORKLOADS), comparisons)
    xs = sorted([0.1, top / slope, low_top / low_slope, 3000.0])
    low, high = ([min(t, s * x) for x in xs] for t, s in ((low_top, low_slope), (top, slope)))
    axes.fill_between(xs, low, high, color=GREY, alpha=0.3, lw=0)
    axes.plot(xs, low, color=GREY, lw=1.0)
    axes.plot(xs, high, color=GREY, lw=1.0)
    middle = (xs[0] * xs[1]) ** 0.5
    axes.annotate("what memory\nallows ", (middle, slope * middle), ha="right", va="bottom")
    axes.annotate("what the cores allow", (xs[-1], top), xytext=(0, 5), textcoords="offset points", ha="right")
    for i, (comparison, engine, versions) in enumerate(engines):
        names = [name for name in WORKLOADS if name in results[comparison]["workloads"]]
        points = [roofline_point(results, engine, name, comparison) for name in names]
        colour = COLOURS.get(engine, GREY)
        axes.plot(
            [point["intensity"] for point in points],
            [point["gflop_s"] for point in points],
            "s" if engine in WEIGHT_BYTES else "o",
            color=colour,
            ms=11 if i == 0 else 6,
            mew=2,
            mfc="none" if i == 0 else colour,
            zorder=3 + i,
            label=label(engine, versions).replace("`", ""),
        )
    comparison, first, _ = engines[0]
    for name in WORKLOADS:
        point = roofline_point(results, first, name, comparison)
        short = (
            WORKLOADS[name]
            .replace(" requests", "")
            .replace(" request", "")
            .replace("prefill ", "")
            .replace(",000", "k")
        )
        axes.annotate(short, (point["intensity"], top * 0.0088), ha="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top * 0.0075, top * 1.8)
    axes.set_xlabel("FLOP for each byte that must be read\n(along the axis: requests, or tokens of a prompt)")
    axes.set_title("GFLOP/s", loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=1, fontsize=9)
    return figure


def _figure(num: int, height: float) -> "tuple[Figure, list[Any]]":
    """A figure with so many panels, one below the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    return figure, list(figure.subplots(num, 1, squeeze=False)[:, 0])


PLOTS = {
    "comparison": (("comparison",), comparison),
    "progression": (("progression",), progression),
    "steps": (("attribution",), steps),
    "experiments": (("attribution",), experiments),
    "roofline": (("comparison", "attribution"), roofline),
    "roofline_fast": ((*FAST, "attribution"), roofline_fast),
}
