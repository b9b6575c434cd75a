"""The whole state of an engine at one moment, for those who begin to listen (`events.py`). Torch-free.

Taken in the engine's thread, between two steps. Requests that have ended are not part of it.
"""

from collections.abc import Mapping
from typing import Any

from common.detokenizer import Detokenizer

from .engine import PROMPT_CHARS, LLMEngine
from .output_processor import Child
from .pace import Pace
from .request import Request, RequestStatus


def take_snapshot(engine: LLMEngine) -> dict[str, Any]:
    """What JSON can say of it: settings, the number of the last step, requests in order of arrival, and the cache."""
    scheduler, blocks = engine.scheduler, engine.scheduler.block_manager
    leaders = {fork.request_id: leader.request_id for leader in scheduler.waiting for fork in leader.forks} | {
        fork.request_id: leader.request_id for leader in scheduler.running for fork in leader.forks
    }
    return {
        "settings": {
            "num_blocks": blocks.num_blocks,
            "block_size": blocks.block_size,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_model_len": engine.max_model_len,
            "enable_prefix_caching": blocks.enable_prefix_caching,
            "speculative_method": engine.speculative_method,
            "num_speculative_tokens": scheduler.num_speculative_tokens,
        },
        "step": engine.num_steps - 1,
        "requests": [
            _request(engine, child, leaders.get(child.request.request_id))
            for child in engine.output_processor.children()
        ],
        "cached_blocks": blocks.cached_blocks(),
    }


def begins_with(
    snapshot: dict[str, Any],
    num_events: int,
    seconds: float,
    pace: Pace,
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """A snapshot as a message of a stream, which goes on from it; but for its `reason`.

    Args:
        snapshot: of the engine.
        num_events: that the stream has had; the message has the number of the last of them.
        seconds: since the stream's beginning.
        pace: of the engine.
        about: what is said beside its state.
        settings: what is said beside its own.
    """
    return {
        "seq": num_events - 1,
        "type": "snapshot",
        "time": round(seconds, 6),
        "pace": {"paused": pace.paused, "delay": pace.delay},
        **about,
        **snapshot,
        "settings": snapshot["settings"] | dict(settings),
    }


def _request(engine: LLMEngine, child: Child, leader: str | None) -> dict[str, Any]:
    parent, request = child.parent, child.request
    runs = request.status is RequestStatus.RUNNING
    output = request.sampling.output_token_ids
    # A new one: what the request's own holds back until it is complete is none of ours.
    text = Detokenizer(engine.tokenizer, parent.prompt_token_ids, request.sampling.params).append(output)
    return {
        "request_id": request.request_id,
        "parent_id": parent.request_id,
        "state": _state(request, runs),
        "forked_from": leader,
        "prompt": None if parent.prompt is None else parent.prompt[:PROMPT_CHARS],
        "num_prompt_tokens": request.num_prompt_tokens,
        "max_tokens": request.sampling.params.max_tokens,
        "num_output_tokens": len(output),
        "num_computed_tokens": request.num_computed_tokens,
        "num_tokens": request.num_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
        "num_draft_tokens": request.num_draft_tokens,
        "num_accepted_tokens": request.num_accepted_tokens,
        "text": text,
        "block_table": engine.scheduler.block_manager.block_table(request.request_id) if runs else [],
    }


def _state(request: Request, runs: bool) -> str:
    if not runs:
        return "preempted" if request.num_preemptions else "waiting"
    has_outputs = request.num_tokens > request.num_prompt_tokens
    return "decode" if has_outputs and request.num_tokens - request.num_computed_tokens == 1 else "prefill"
