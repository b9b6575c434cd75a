"""How long a step takes, by what is in it: a sum of four terms, fitted to measurements (`tools/cost_model.py`).

    a step                 the weights are read once, whatever is computed with them
    a request in it        its row of the block tables, its attention's own pass, its sampling
    a token                the arithmetic of the layers
    a token and one before it that it attends to

What it leaves out: everything else. Memory that gets slower, other processes, the first step's warming up.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class CostModel:
    """Seconds of a step, from milliseconds per part."""

    def __init__(self, ms: Mapping[str, float]) -> None:
        self.step, self.request = ms["step"] / 1e3, ms["request"] / 1e3
        self.token, self.pair = ms["token"] / 1e3, ms["pair"] / 1e3

    def seconds(self, rows: Sequence[tuple[int, int]]) -> float:
        """Of a step whose requests compute so many tokens each, behind so many that are computed already."""
        num_tokens = sum(new for new, _ in rows)
        num_pairs = sum(new * before + new * (new + 1) // 2 for new, before in rows)
        return self.step + self.request * len(rows) + self.token * num_tokens + self.pair * num_pairs

    def of_step(self, output: Any) -> float:
        """Of what a scheduler has decided."""
        rows = zip(output.requests, output.num_scheduled_tokens, strict=True)
        return self.seconds([(num_tokens, request.num_computed_tokens) for request, num_tokens in rows])
