"""The simulation, drawn: what each routing finds in the caches, and how long a first token takes, by replicas."""

from typing import TYPE_CHECKING, Any

from common.measuring.plotting import plotting
from common.measuring.recipe import ROOT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT = ROOT / "docs" / "img" / "scale_out.svg"
COLOURS = {"prefix": "#d9480f", "balanced": "#1c7ed6", "random": "#868e96"}
ROWS = (("cached", "in the cache, %", 100.0), ("ttft_ms", "first token after, s", 0.001))


def draw(loads: dict[str, Any], measured: dict[str, Any]) -> None:
    """The plot, for the site: of what is simulated and of what was measured; raises `ModelError` without matplotlib."""
    with plotting():
        _plot(loads, measured).savefig(PLOT, metadata={"Date": None})


def _plot(loads: dict[str, Any], measured: dict[str, Any]) -> "Figure":
    """A column for each load; with two replicas, what was measured, too."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 4.6))
    panels = figure.subplots(len(ROWS), len(loads), sharex=True, squeeze=False)
    for column, (load, sizes) in enumerate(loads.items()):
        for row, (key, title, factor) in enumerate(ROWS):
            axes = panels[row][column]
            for routing, colour in COLOURS.items():
                values = [factor * size[routing][key]["median"] for size in sizes.values()]
                axes.plot(range(len(sizes)), values, "o-", color=colour, ms=3.5, lw=1.2, label=routing)
                axes.plot(0, factor * measured[load][routing][key]["median"], "x", color=colour, ms=8, mew=1.6)
            axes.set_title(f"{load}: {title}" if row == 0 else title, loc="left", fontsize=9)
            axes.set_ylim(bottom=0)
            axes.set_xticks(range(len(sizes)), list(sizes))
        panels[-1][column].set_xlabel("replicas")
    handles, labels = panels[0][0].get_legend_handles_labels()
    [cross] = panels[0][0].plot([], [], "x", color="#868e96", ms=8, mew=1.6)
    figure.legend([*handles, cross], [*labels, "measured"], loc="outside lower center", ncols=4, fontsize=9)
    return figure
