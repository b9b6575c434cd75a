"""When guessing pays: measured costs and measured acceptance put together, and drawn.

A step with K drafts takes `K * d + t(K + 1)`: K passes of the drafter, then one of the model with K + 1 rows. It brings
one token and what was accepted. Plain decoding takes t(1) for each token. So guessing pays where

    tokens per step  >  (K * d + t(K + 1)) / t(1)

Both sides are counted in plain steps, and their ratio is the speed-up.
"""

from typing import TYPE_CHECKING, Any

from common.measuring.plotting import GREY, plotting
from common.measuring.recipe import ROOT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT = ROOT / "docs" / "img" / "break_even.svg"
NGRAM = {
    "ngram_copy": ("#0c8599", "copy"),
    "ngram_edit": ("#37963c", "edit"),
    "ngram_summarise": ("#1c7ed6", "summarise"),
    "ngram_chat": ("#f59f00", "chat"),
    "ngram_loop": ("#868e96", "chat, in a loop"),
}
EARLY_EXIT, DRAFT_MODEL = "#d9480f", "#9c36b5"
MOST = 16.0  # of both axes
NUM_DRAFTS = (1, 2, 4, 8)


def put_together(results: dict[str, Any]) -> dict[str, Any]:
    """Of each exit layer and K: the price of a step, what acceptance it needs, what it got, what speed-up follows."""
    costs, num_layers = results["costs"], results["costs"]["num_layers"]
    found: dict[str, Any] = {}
    for name, part in results.items():
        if not name.startswith("early_exit_"):
            continue
        layer = name.removeprefix("early_exit_")
        one_pass = costs["passes"][layer]["plain_steps"]["median"]
        found[layer] = {
            "simple_percent": round(100 * int(layer) / num_layers, 1),
            "pass_percent": round(100 * one_pass, 1),
        }
        for num, way in part["ways"].items():
            price = int(num) * one_pass + costs["steps"][str(int(num) + 1)]["plain_steps"]["median"]
            needed = needed_acceptance(price - 1, int(num))
            found[layer][num] = {
                "price": round(price, 3),
                "needed_percent": None if needed is None else round(100 * needed, 1),
                "needed": "more than all" if needed is None else f"{100 * needed:.0f} %",
                "accepted_percent": way["accepted_percent"],
                "predicted_speed_up": round(way["tokens_per_step"] / price, 3),
                "measured_speed_up": way["speed_up"]["median"],
            }
    speed_ups = {
        f"{name} {num}": way["speed_up"]["median"]
        for name, part in results.items()
        if isinstance(part, dict) and "ways" in part
        for num, way in part["ways"].items()
    }
    checks = {num: costs["steps"][str(num + 1)]["plain_steps"]["median"] for num in NUM_DRAFTS}
    return {
        "early_exit": found,
        "free_drafts": {str(num): round((num + 1) / checks[num], 2) for num in NUM_DRAFTS},
        "free_drafts_cost_percent": {str(num): round(100 * (checks[num] - 1), 1) for num in NUM_DRAFTS},
        "free_drafts_need_percent": {
            str(num): round(100 * (needed_acceptance(checks[num] - 1, num) or 1), 1) for num in NUM_DRAFTS
        },
        "losers": sorted(name for name, speed_up in speed_ups.items() if speed_up < 1),
        "winners": sorted(name for name, speed_up in speed_ups.items() if speed_up >= 1),
        "best_early_exit": max(
            (speed_up for name, speed_up in speed_ups.items() if name.startswith("early_exit")), default=None
        ),
    }


def needed_acceptance(price: float, num_drafts: int) -> float | None:
    """The acceptance `a` with which `a + a**2 + ... + a**K` is the price of the drafts; `None` if it exceeds K."""
    if price >= num_drafts:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, num_drafts + 1)) < price else (low, middle)
    return high


def draw(results: dict[str, Any]) -> None:
    """The plot, for the site."""
    with plotting():
        _plot(results).savefig(PLOT, metadata={"Date": None})


def _plot(results: dict[str, Any]) -> "Figure":
    """Tokens per step over the time of a step, both in plain steps, logarithmic: speed-ups are parallel lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 5.0))
    axes = figure.subplots()
    axes.fill_between([1, MOST], [1, MOST], [MOST, MOST], color="#37963c", alpha=0.10, lw=0)
    axes.fill_between([1, MOST], [1, 1], [1, MOST], color="#d9480f", alpha=0.10, lw=0)
    axes.plot([1, MOST], [1, MOST], color=GREY, lw=1.6)
    axes.plot([1, MOST / 2], [2, MOST], color=GREY, lw=0.8, ls=":")
    axes.plot([2, MOST], [1, MOST / 2], color=GREY, lw=0.8, ls=":")
    axes.annotate(
        "2 times as fast", (2.2, 4.65), rotation=45, ha="center", va="bottom", rotation_mode="anchor", fontsize=8.5
    )
    axes.annotate("break-even", (6.6, 7.0), rotation=45, ha="center", va="bottom", rotation_mode="anchor", fontsize=8.5)
    axes.annotate(
        "half as fast", (12.0, 6.35), rotation=45, ha="center", va="bottom", rotation_mode="anchor", fontsize=8.5
    )
    for name, part in results.items():
        if name in NGRAM:
            _points(axes, part, NGRAM[name][0], "o", f"n-gram, {NGRAM[name][1]}")
        elif name == "draft_model":
            _points(axes, part, DRAFT_MODEL, "D", "the model itself as draft model")
        elif name.startswith("early_exit_"):
            layer = name.removeprefix("early_exit_")
            _points(axes, part, EARLY_EXIT, "s", "early exit, chat" if layer == "2" else "", layer)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_tick_params(which="minor", size=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(0.95, MOST)
    axes.set_ylim(0.95, MOST)
    axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_xlabel("time of a step, in plain steps")
    axes.set_title("tokens per step", loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _points(axes: Any, part: dict[str, Any], colour: str, marker: str, label: str, note: str = "") -> None:
    """One drafter's points, joined from K = 1 to 8."""
    xs = [way["step_in_plain_steps"]["median"] for way in part["ways"].values()]
    ys = [way["tokens_per_step"] for way in part["ways"].values()]
    axes.plot(xs, ys, marker + "-", color=colour, ms=4.5, lw=0.8, label=label or None)
    if note:
        axes.annotate(f" {note}", (xs[-1], ys[-1]), color=colour, va="center", fontsize=8)
