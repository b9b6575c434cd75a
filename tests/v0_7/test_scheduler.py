"""How many drafts a request gets, by the policy alone: only one that decodes, and only what nobody else needs."""

import pytest

from common.sampling_params import SamplingParams, SamplingState
from v0_7_speculative.block_manager import BlockManager
from v0_7_speculative.request import Request
from v0_7_speculative.scheduler import ENOUGH_DRAFTS, Scheduler


def decoding(*, num_blocks=50, num_speculative_tokens=4, max_tokens=100, max_request_len=1000, disable_below=0.0):
    """A scheduler, and a request of it with 5 known tokens: the prompt's 4, which are computed, and its first own."""
    asked = []

    def count_drafts(request, most):
        asked.append(most)
        return most

    sched = Scheduler(
        BlockManager(num_blocks, block_size=4),
        max_num_batched_tokens=64,
        max_num_seqs=4,
        max_request_len=max_request_len,
        num_speculative_tokens=num_speculative_tokens,
        count_drafts=count_drafts,
        disable_below=disable_below,
    )
    request = Request("A", SamplingState.create(SamplingParams(max_tokens=max_tokens), [1] * 4, (2,), seed=0))
    request.sampling.output_token_ids.append(7)
    request.num_computed_tokens = 4
    sched.block_manager.allocate("A", 5)
    return sched, request, asked


def test_a_request_that_decodes_gets_as_many_as_are_allowed():
    sched, request, asked = decoding()
    assert (sched._num_drafts(request, 1, 60), asked) == (4, [4])


@pytest.mark.parametrize(
    ("options", "budget", "expected"),
    [
        ({}, 3, 3),  # the step's budget
        ({"max_tokens": 4}, 60, 2),  # three may still be written: two drafts, and the token behind them
        ({"max_request_len": 7}, 60, 1),  # two fit into the context
        ({"num_blocks": 2}, 60, 3),  # the last block has three free slots, and no block is free
    ],
)
def test_there_are_fewer_where_less_may_be_written_computed_or_stored(options, budget, expected):
    sched, request, asked = decoding(**options)
    assert (sched._num_drafts(request, 1, budget), asked) == (expected, [expected])


@pytest.mark.parametrize(("options", "budget"), [({}, 0), ({"max_tokens": 2}, 60), ({"num_speculative_tokens": 0}, 60)])
def test_where_there_is_room_for_none_nobody_is_asked(options, budget):
    sched, request, asked = decoding(**options)
    assert (sched._num_drafts(request, 1, budget), asked) == (0, [])


def test_a_prompt_gets_none():
    sched, request, asked = decoding()
    request.sampling.output_token_ids.clear()
    request.num_computed_tokens = 3  # the last token of its prompt
    assert sched._num_drafts(request, 1, 60) == 0
    request.num_computed_tokens = 0
    assert sched._num_drafts(request, 4, 60) == 0
    request.sampling.output_token_ids.append(7)  # computed again after a preemption
    assert sched._num_drafts(request, 5, 60) == 0
    assert asked == []


def test_a_request_whose_drafts_were_too_seldom_right_gets_none():
    sched, request, asked = decoding(disable_below=0.5)
    request.num_draft_tokens, request.num_accepted_tokens = ENOUGH_DRAFTS, ENOUGH_DRAFTS // 2 - 1
    assert (sched._num_drafts(request, 1, 60), asked) == (0, [])
