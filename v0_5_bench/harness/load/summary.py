"""What a run adds up to: rates, and mean, median, p90 and p99 of the latencies; as JSON, and as tables. Torch-free.

Failed requests are counted apart, and are in no latency and no rate: a request that was refused at once would be the
fastest of all.
"""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .client import RequestResult

if TYPE_CHECKING:
    from rich.table import Table

LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "e2el_ms": "end-to-end latency",
}


def summarise(results: Sequence[RequestResult]) -> dict[str, Any]:
    """The figures of a run; rates are over the time from the first request sent to the last answer's end."""
    good = [result for result in results if result.error is None]
    errors: dict[str, int] = {}
    for result in results:
        if result.error is not None:
            errors[result.error] = errors.get(result.error, 0) + 1
    summary: dict[str, Any] = {"completed": len(good), "failed": len(results) - len(good), "errors": errors}
    if not good:
        return summary
    seconds = max(result.end for result in good) - min(result.start for result in good)
    num_output = sum(result.num_output_tokens for result in good)
    num_prompt = sum(result.num_prompt_tokens for result in good)
    tpots = [result.tpot for result in good]
    return summary | {
        "seconds": seconds,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_prompt + num_output) / seconds,
        "ttft_ms": percentiles([result.ttft for result in good]),
        "tpot_ms": percentiles([tpot for tpot in tpots if tpot is not None]),
        "itl_ms": percentiles([itl for result in good for itl in result.itls]),
        "e2el_ms": percentiles([result.e2el for result in good]),
        # How late the client itself was: large values say that the client, not the server, was measured.
        "client_delay_ms": percentiles([result.start - result.planned for result in good]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, p90 and p99 in milliseconds; `None` of nothing.

    A percentile is the smallest value that so many per cent of the values do not exceed ("nearest rank").
    """
    if not seconds:
        return None
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    values = {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p90": rank(0.90),
        "p99": rank(0.99),
    }
    return {name: value * 1e3 for name, value in values.items()}


def tables(summary: dict[str, Any], title: str) -> "list[Table]":
    """The figures for people, within 80 columns."""
    from rich import box
    from rich.table import Table

    rates = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in ("requests", "failed", "seconds", "requests/s", "output tok/s", "total tok/s"):
        rates.add_column(column, justify="right")
    if summary["completed"]:
        rates.add_row(
            str(summary["completed"]),
            str(summary["failed"]),
            f"{summary['seconds']:.2f}",
            f"{summary['requests_per_s']:.2f}",
            f"{summary['output_tokens_per_s']:.1f}",
            f"{summary['total_tokens_per_s']:.1f}",
        )
    else:
        rates.add_row("0", str(summary["failed"]), *[""] * 4)
        return [rates]
    latencies = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    latencies.add_column("ms")
    for column in ("mean", "median", "p90", "p99"):
        latencies.add_column(column, justify="right")
    for key, name in (*LATENCIES.items(), ("client_delay_ms", "sent later than planned")):
        figures = summary[key]
        if key == "client_delay_ms" and figures is None:
            continue
        cells = ["–"] * 4 if figures is None else [f"{value:,.1f}" for value in figures.values()]
        latencies.add_row(name, *cells)
    return [rates, latencies]
