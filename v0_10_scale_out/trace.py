"""`--trace`: one line for each step, for people, and the same as JSON lines, for plots and tests. Torch-free."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from .scheduler import Scheduler, SchedulerOutput

COLUMNS = ("step", "running", "waiting", "cached", "prefill", "decode", "drafts", "right", "free", "preempted")
WIDTHS = (6, 8, 8, 7, 8, 7, 7, 6, 6, 0)


def record(step: int, scheduler: Scheduler, scheduled: SchedulerOutput) -> dict[str, Any]:
    """What happened in a step: who computed how many tokens, and how the queues and the pool stand after it."""
    scheduled_tokens = dict(zip(scheduled.requests, scheduled.num_scheduled_tokens, strict=True))
    # One token of the output, and guesses behind it; a prompt, too, may have one token left for its last chunk.
    num_drafts = dict(zip(scheduled.requests, scheduled.num_draft_tokens, strict=True))
    decodes = [
        r for r, n in scheduled_tokens.items() if n - num_drafts[r] == 1 and r.num_computed_tokens > r.num_prompt_tokens
    ]
    return {
        "step": step,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "cached": sum(scheduled.num_cached_tokens.values()),
        "prefill": sum(scheduled.num_scheduled_tokens) - sum(scheduled.num_draft_tokens) - len(decodes),
        "decode": len(decodes),
        "drafts": sum(scheduled.num_draft_tokens),
        "right": sum(scheduled.num_accepted_tokens.values()),
        "free": scheduler.block_manager.num_free_blocks,
        "preempted": [request.request_id for request in scheduled.preempted],
        "scheduled": {request.request_id: num_tokens for request, num_tokens in scheduled_tokens.items()},
        "decoding": [request.request_id for request in decodes],
        "queue": [request.request_id for request in scheduler.waiting],
        "tables": {r.request_id: scheduler.block_manager.block_table(r.request_id) for r in scheduler.running},
    }


def line(entry: dict[str, Any]) -> str:
    """One record in columns."""
    return _columns([", ".join(entry[name]) if name == "preempted" else str(entry[name]) for name in COLUMNS])


def tracer(scheduler: Scheduler, out: TextIO | None, jsonl: TextIO | None) -> Callable[[SchedulerOutput], None]:
    """A function for `LLMEngine.on_step` that writes every step to `out` and to `jsonl`, where they are given."""
    num_steps = 0
    if out is not None:
        print(_columns(COLUMNS), file=out)

    def on_step(scheduled: SchedulerOutput) -> None:
        nonlocal num_steps
        entry = record(num_steps, scheduler, scheduled)
        num_steps += 1
        if out is not None:
            print(line(entry), file=out)
        if jsonl is not None:
            print(json.dumps(entry), file=jsonl)

    return on_step


def _columns(cells: Sequence[str]) -> str:
    return "".join(
        f" {cell:>{width - 1}}" if width else f"  {cell}" for cell, width in zip(cells, WIDTHS, strict=True)
    ).rstrip()
