"""What the users of a server would have noticed of a run, and what it has cost. All times are the simulated clock's.

TTFT            seconds from a request's arrival to its first token
TPOT            seconds for each token after the first, the mean of a request
longest gap     the longest wait between two tokens of one answer
computed twice  tokens whose keys and values had been computed before, and were lost by a preemption
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass(slots=True)
class Life:
    """One request's: when it came, when each of its tokens did, and how far it was ever computed."""

    arrival: float
    num_prompt_tokens: int
    answer_len: int
    token_times: list[float] = field(default_factory=list)
    most_computed: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    is_finished: bool = False

    @property
    def ttft(self) -> float | None:
        """`None` while nothing is written."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """`None` for answers of one token."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def longest_gap(self) -> float:
        """0 for answers of one token."""
        return max(
            (after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)), default=0.0
        )


class Metrics:
    """Adds up while a run goes on."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.lives: dict[str, Life] = {}
        self.num_steps = self.num_scheduled = self.num_recomputed = self.most_used = 0
        self.num_drafts = self.num_accepted = 0
        self.clock = self.busy = self.block_seconds = 0.0

    def arrived(self, request_id: str, arrival: float, num_prompt_tokens: int, answer_len: int) -> None:
        """A request is there."""
        self.lives[request_id] = Life(arrival, num_prompt_tokens, answer_len)

    def scheduled(self, output: Any) -> None:
        """A step is about to be computed: from `num_computed_tokens` on, so many tokens of each request."""
        drafts = getattr(output, "num_draft_tokens", [0] * len(output.requests))
        for request, num_tokens, num_drafts in zip(output.requests, output.num_scheduled_tokens, drafts, strict=True):
            life, begin = self.lives[request.request_id], request.num_computed_tokens
            end = begin + num_tokens - num_drafts
            self.num_recomputed += max(0, min(end, life.most_computed) - begin)
            life.most_computed = max(life.most_computed, end)
            self.num_scheduled += num_tokens
            self.num_drafts += num_drafts
        for request in output.preempted:
            self.lives[request.request_id].num_preemptions += 1

    def updated(self, output: Any, taken: Mapping[str, int], num_used: int, clock: float, seconds: float) -> None:
        """It has ended, and so many tokens of each request are there."""
        self.num_steps += 1
        self.clock, self.busy = clock, self.busy + seconds
        self.block_seconds += num_used * seconds
        self.most_used = max(self.most_used, num_used)
        self.num_accepted += sum(getattr(output, "num_accepted_tokens", {}).values())
        for request in getattr(output, "requests_and_forks", output.requests):
            life = self.lives[request.request_id]
            life.token_times += [clock] * taken.get(request.request_id, 0)
            life.is_finished = request.finish is not None
            life.num_cached_tokens = getattr(request, "num_cached_tokens", 0)
            # A draft that was right has been computed, too.
            life.most_computed = max(life.most_computed, request.num_computed_tokens)

    def summary(self) -> dict[str, Any]:
        """All of it as JSON; times in seconds."""
        lives = list(self.lives.values())
        ttfts = [life.ttft for life in lives if life.ttft is not None]
        tpots = [life.tpot for life in lives if life.tpot is not None]
        num_tokens = sum(len(life.token_times) for life in lives)
        return {
            "seconds": self.clock,
            "num_steps": self.num_steps,
            "num_finished": sum(life.is_finished for life in lives),
            "num_requests": len(lives),
            "num_output_tokens": num_tokens,
            "tokens_per_s": _ratio(num_tokens, self.clock),
            "mean_ttft": _mean(ttfts),
            "max_ttft": max(ttfts, default=0.0),
            "mean_tpot": _mean(tpots),
            "max_tpot": max(tpots, default=0.0),
            "longest_gap": max((life.longest_gap for life in lives), default=0.0),
            "num_preemptions": sum(life.num_preemptions for life in lives),
            "num_scheduled_tokens": self.num_scheduled,
            "num_recomputed_tokens": self.num_recomputed,
            "num_cached_tokens": sum(life.num_cached_tokens for life in lives),
            "num_draft_tokens": self.num_drafts,
            "num_accepted_tokens": self.num_accepted,
            "mean_pool_use": _ratio(self.block_seconds, self.busy * self.num_blocks),
            "max_pool_use": self.most_used / self.num_blocks,
            "requests": {
                request_id: {
                    "arrival": life.arrival,
                    "num_prompt_tokens": life.num_prompt_tokens,
                    "answer_len": life.answer_len,
                    "ttft": life.ttft,
                    "tpot": life.tpot,
                    "longest_gap": life.longest_gap,
                    "num_preemptions": life.num_preemptions,
                    "end": life.token_times[-1] if life.is_finished else None,
                }
                for request_id, life in self.lives.items()
            },
        }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
