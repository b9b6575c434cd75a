"""Three tasks for each milestone with a policy: a setting, what to change, and how a run shows that it is solved.

A goal compares the reader's run with the original files' on the same setting. The original never reaches it. Solutions
are in `solutions.json`; tests run all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Metrics = Mapping[str, Any]
Check = Callable[[Metrics, Metrics], tuple[bool, str]]

NAMES = {
    "mean_ttft": ("The mean TTFT", "s"),
    "max_ttft": ("The longest TTFT", "s"),
    "mean_tpot": ("The mean TPOT", "s"),
    "max_tpot": ("The slowest request's TPOT", "s"),
    "longest_gap": ("The longest gap", "s"),
    "seconds": ("The whole run", "s"),
    "tokens_per_s": ("The throughput", "tokens/s"),
    "num_scheduled_tokens": ("What is computed", "tokens"),
    "num_recomputed_tokens": ("What is computed twice", "tokens"),
    "num_cached_tokens": ("What the prefix cache saves", "tokens"),
    "num_wrong_drafts": ("Wrong drafts", "tokens"),
}


def value(metrics: Metrics, name: str) -> float:
    """A metric by its name, and one that follows from others."""
    if name == "num_wrong_drafts":
        return float(metrics["num_draft_tokens"] - metrics["num_accepted_tokens"])
    return float(metrics[name])


def at_most(name: str, share: float) -> Check:
    """The metric falls to this share of the original's, or below."""
    return lambda before, after: _compare(name, share, before, after, lambda ratio: ratio <= share, "at most")


def at_least(name: str, share: float) -> Check:
    """The metric rises to this share of the original's, or above; it may be below 1, if it may fall a little."""
    return lambda before, after: _compare(name, share, before, after, lambda ratio: ratio >= share, "at least")


def _compare(
    name: str, share: float, before: Metrics, after: Metrics, holds: Callable[[float], bool], word: str
) -> tuple[bool, str]:
    old, new = value(before, name), value(after, name)
    what, unit = NAMES[name]
    ratio = new / old if old else 1.0
    shown = [f"{number:.3g} s" if unit == "s" else f"{number:,.0f} {unit}" for number in (new, old)]
    text = f"{what}: {shown[0]} instead of {shown[1]}, or {100 * ratio:.0f} %. The goal is {word} {100 * share:.0f} %."
    return holds(ratio), text


@dataclass(frozen=True, slots=True)
class Challenge:
    """One task. `functions` are those that a solution may begin with."""

    id: str
    milestone: str
    title: str
    task: str
    functions: tuple[str, ...]
    settings: dict[str, Any]
    goals: tuple[Check, ...]
    asks_who_waits: bool = False

    def verdict(self, before: Metrics, after: Metrics) -> dict[str, Any]:
        """Whether a run solves it, and a sentence for each goal."""
        complete = after["num_finished"] == after["num_requests"] == before["num_requests"]
        if not complete or after["num_output_tokens"] != before["num_output_tokens"]:
            return {"is_solved": False, "sentences": ["Not every request has got its whole answer."]}
        results = [goal(before, after) for goal in self.goals]
        sentences = [text for _, text in results]
        if self.asks_who_waits:
            sentences.append(_who_waits(before, after))
        return {"is_solved": all(holds for holds, _ in results), "sentences": sentences}

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        names = ("id", "milestone", "title", "task", "functions", "settings")
        return {name: getattr(self, name) for name in names}


def _who_waits(before: Metrics, after: Metrics) -> str:
    """The price: whose first token comes so much later than before."""
    old, new = ({name: life["ttft"] or 0.0 for name, life in run["requests"].items()} for run in (before, after))
    worst = max(new, key=lambda name: new[name] - old[name])
    if new[worst] <= old[worst]:
        return "The price: nobody waits longer for its first token than before."
    name = worst.partition("/")[0]
    return f"The price: {name} waits {new[worst]:.2f} s for its first token; it was {old[worst]:.2f} s."


CHALLENGES = (
    Challenge(
        "shortest-first",
        "v0_3_scheduler",
        "Shortest job first",
        "Three long prompts came first, and seven short ones wait behind them. Let the short ones go ahead: change the "
        "order of the queue so that the mean time to first token falls below 60 % of what it was. Then look at who "
        "pays for it.",
        ("scheduler.py:Scheduler.add", "scheduler.py:Scheduler.schedule"),
        {
            "requests": "900+30, 800+30, 700+30, 40+30, 40+30, 30+30, 30+30, 20+30, 20+30, 20+30",
            "token_budget": 128,
            "max_num_seqs": 4,
            "num_blocks": 256,
        },
        (at_most("mean_ttft", 0.6),),
        asks_who_waits=True,
    ),
    Challenge(
        "another-victim",
        "v0_3_scheduler",
        "Another victim",
        "When blocks run out, the newest request loses its own. Here the newest are those with the longest prompts, so "
        "much is computed twice. Choose a victim with less to lose: at most 75 % of what is computed twice now. "
        "Beware: a request that is in this step already must keep its blocks.",
        ("scheduler.py:Scheduler._preempt_newest", "scheduler.py:Scheduler.schedule"),
        {
            "requests": "20+160, 20+160, 20+160, 20+160, 400+60@0.2, 300+60@0.3",
            "num_blocks": 58,
            "token_budget": 512,
        },
        (at_most("num_recomputed_tokens", 0.75),),
    ),
    Challenge(
        "long-prompts",
        "v0_3_scheduler",
        "A smaller budget for long prompts",
        "Six answers are being written when a prompt of 2,000 tokens comes. Its chunks take the whole budget, and the "
        "six streams stand still meanwhile. Give long prompts less of each step while others write: the longest gap "
        "falls to 45 %, and the whole run takes at most 15 % longer.",
        ("scheduler.py:Scheduler.schedule",),
        {"requests": "30+80, 30+80, 30+80, 30+80, 30+80, 30+80, 2000+20@0.5", "num_blocks": 256, "token_budget": 512},
        (at_most("longest_gap", 0.45), at_most("seconds", 1.15)),
    ),
    Challenge(
        "wait-for-the-prefix",
        "v0_6_prefix_cache",
        "Wait for the one who computes it",
        "Eight requests with the same beginning come at once. None finds it in the cache, as none has computed it yet: "
        "eight times the same work. Admit one, and the others a step later, so that at most half of the tokens are "
        "computed.",
        ("scheduler.py:Scheduler.schedule",),
        {
            "num_requests": 8,
            "shared_prefix": 320,
            "min_prompt": 20,
            "max_prompt": 40,
            "token_budget": 4096,
            "num_blocks": 256,
        },
        (at_most("num_scheduled_tokens", 0.5),),
    ),
    Challenge(
        "answers-stay-out",
        "v0_6_prefix_cache",
        "Nobody asks for an answer again",
        "The cache keeps the blocks of answers as long as those of prompts. In this run no prompt continues an answer, "
        "so they only push out the beginnings that others need. Publish less: the cache saves at least twice as many "
        "tokens. (In a chat the next turn's prompt does contain the answer. What would this change cost there?)",
        ("scheduler.py:Scheduler.update", "block_manager.py:BlockManager.publish"),
        {
            "num_requests": 14,
            "shared_prefix": 256,
            "prefix_groups": 4,
            "min_prompt": 10,
            "max_prompt": 30,
            "min_answer": 150,
            "max_answer": 190,
            "num_blocks": 84,
            "max_num_seqs": 2,
        },
        (at_least("num_cached_tokens", 2.0),),
    ),
    Challenge(
        "ask-the-cache",
        "v0_6_prefix_cache",
        "Ask the cache who goes next",
        "Requests with three different beginnings take turns in the queue, and the pool has no room for all three "
        "beginnings: each pushes out the one that the next request needs. Admit first whoever finds the most in the "
        "cache, so that at most 65 % of the tokens are computed. Who waits longer?",
        ("scheduler.py:Scheduler.schedule",),
        {
            "num_requests": 12,
            "shared_prefix": 320,
            "prefix_groups": 3,
            "min_prompt": 10,
            "max_prompt": 30,
            "min_answer": 10,
            "max_answer": 20,
            "num_blocks": 56,
            "max_num_seqs": 2,
        },
        (at_most("num_scheduled_tokens", 0.65),),
        asks_who_waits=True,
    ),
    Challenge(
        "guess-less",
        "v0_7_speculative",
        "Guess less where it is wrong",
        "Of every second request nine tokens in ten can be guessed, of the others one in ten. The scheduler gives "
        "everybody eight drafts. Let it learn from each request's own counts: at most half of the wrong drafts, and a "
        "mean TPOT of at most 85 %. One smaller number for all is not enough.",
        ("scheduler.py:Scheduler._num_drafts", "scheduler.py:Scheduler._is_disabled"),
        {
            "num_requests": 4,
            "min_prompt": 20,
            "max_prompt": 40,
            "min_answer": 80,
            "max_answer": 120,
            "num_speculative_tokens": 8,
            "acceptance": 0.9,
            "other_acceptance": 0.1,
            "num_blocks": 256,
        },
        (at_most("num_wrong_drafts", 0.5), at_most("mean_tpot", 0.85)),
    ),
    Challenge(
        "fair-share",
        "v0_7_speculative",
        "Drafts for everybody",
        "The budget is small, and drafts are given to the oldest request first: it gets eight, and the last gets none. "
        "Share what is left of the budget, so that the slowest request needs at most 80 % of its time per token.",
        ("scheduler.py:Scheduler.schedule", "scheduler.py:Scheduler._num_drafts"),
        {
            "num_requests": 8,
            "min_prompt": 10,
            "max_prompt": 10,
            "min_answer": 100,
            "max_answer": 100,
            "token_budget": 24,
            "num_speculative_tokens": 8,
            "acceptance": 0.7,
            "num_blocks": 256,
        },
        (at_most("max_tpot", 0.8),),
    ),
    Challenge(
        "break-even",
        "v0_7_speculative",
        "Know when to stop guessing",
        "Half of the tokens can be guessed. With two requests in a step a wrong draft costs little, because reading "
        "the weights takes most of the time; with twenty-four its arithmetic counts. Guess only as much as pays: at "
        "least 30 % more tokens per second than with five drafts always. Never to guess is not enough.",
        ("scheduler.py:Scheduler._num_drafts",),
        {
            "num_requests": 24,
            "min_prompt": 10,
            "max_prompt": 30,
            "min_answer": 20,
            "max_answer": 160,
            "num_speculative_tokens": 5,
            "acceptance": 0.5,
            "num_blocks": 512,
        },
        (at_least("tokens_per_s", 1.3),),
    ),
)


def challenge(id: str) -> Challenge | None:
    """By its id."""
    return next((each for each in CHALLENGES if each.id == id), None)
