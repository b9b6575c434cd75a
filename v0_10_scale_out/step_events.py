"""A step that has ended, as events: what each of its requests has done, and the step itself. Torch-free.

Blocks, admissions and preemptions have been told by those who decide them, while they did (`events.py`).
"""

import time
from collections.abc import Mapping, Sequence

from common.outputs import CompletionOutput, RequestOutput

from .events import (
    Decode,
    EventBus,
    FirstToken,
    PrefillChunk,
    RequestFinished,
    ScheduledTokens,
    SpeculativeRound,
    Step,
)
from .request import Request
from .scheduler import Scheduler, SchedulerOutput


def emit_step(
    events: EventBus,
    scheduler: Scheduler,
    number: int,
    scheduled: SchedulerOutput,
    taken: Mapping[str, int],
    outputs: Sequence[RequestOutput],
    times: Sequence[float],
) -> None:
    """Tell of a step.

    Args:
        events: the bus.
        scheduler: as it stands after the step.
        number: of the step, from 0.
        scheduled: what was to be computed.
        taken: how many tokens each request has taken in, by its id.
        outputs: what the callers are told.
        times: clock readings: when scheduling began, when the model did, when the scheduler took in its tokens, and
            when the text was made from them.
    """
    rows = []
    steps = zip(scheduled.requests, scheduled.num_scheduled_tokens, scheduled.num_draft_tokens, strict=True)
    for request, num_tokens, num_drafts in steps:
        is_decode = _is_decode(request, num_tokens - num_drafts, taken)
        rows.append(ScheduledTokens(request.request_id, num_tokens, is_decode, num_drafts))
        if num_drafts:
            num_accepted = scheduled.num_accepted_tokens.get(request.request_id, 0)
            events.emit(SpeculativeRound, request.request_id, num_drafts, num_accepted, num_drafts - num_accepted)
        if not is_decode:
            events.emit(
                PrefillChunk,
                request.request_id,
                num_tokens,
                request.num_computed_tokens,
                request.num_tokens - taken.get(request.request_id, 0),
                scheduled.num_cached_tokens.get(request.request_id, 0),
            )
    requests = {request.request_id: request for request in scheduled.requests_and_forks}
    for output in outputs:
        for choice in output.outputs:
            _emit_choice(events, requests[f"{output.request_id}/{choice.index}"], output, choice)
    refused, reason = scheduled.refused or (None, None)
    begin, run, update, text = times
    events.emit(
        Step,
        number,
        scheduler.max_num_batched_tokens,
        tuple(rows),
        tuple(request.request_id for request in scheduled.preempted),
        refused,
        reason,
        len(scheduler.running),
        scheduler.num_waiting,
        scheduler.block_manager.num_free_blocks,
        run - begin,
        update - run,
        text - update,
        time.perf_counter() - text,
    )


def _is_decode(request: Request, num_tokens: int, taken: Mapping[str, int]) -> bool:
    """Whether a request has computed the one token that it had drawn last, and no part of its prompt."""
    num_outputs = len(request.sampling.output_token_ids) - taken.get(request.request_id, 0)
    return num_tokens == 1 and num_outputs > 0 and request.request_id in taken


def _emit_choice(events: EventBus, request: Request, output: RequestOutput, choice: CompletionOutput) -> None:
    """What a caller is told of one choice."""
    tokens = tuple(choice.token_ids)
    is_first = len(tokens) == len(request.sampling.output_token_ids)
    if tokens and is_first:
        seconds = output.metrics.first_token_time - output.metrics.arrival_time
        events.emit(FirstToken, request.request_id, tokens, choice.text, seconds)
    elif tokens:
        events.emit(Decode, request.request_id, tokens, choice.text)
    if choice.finish_reason is not None:
        events.emit(RequestFinished, request.request_id, choice.finish_reason, choice.stop_reason)
