"""The n-gram drafter alone: what it finds, and that it does not take longer than it should."""

import random

import pytest

from common.sampling_params import SamplingParams, SamplingState
from tests.kit.interrupts import num_lines
from v0_7_speculative.drafter import NgramDrafter
from v0_7_speculative.request import Request
from v0_7_speculative.scheduler import SchedulerOutput


def request_of(prompt, output=()):
    request = Request("A", SamplingState.create(SamplingParams(), list(prompt), (), seed=0))
    request.sampling.output_token_ids.extend(output)
    return request


def drafts(prompt, output=(), most=4, ngram_min=2, ngram_max=4):
    request = request_of(prompt, output)
    num = NgramDrafter(ngram_min, ngram_max).count(request, most)
    assert num == len(request.draft_token_ids)
    return request.draft_token_ids


def plain(token_ids, most, ngram_min, ngram_max):
    """What `NgramDrafter` has to find, token by token."""
    for length in range(min(ngram_max, len(token_ids) - 1), ngram_min - 1, -1):
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == token_ids[-length:]:
                return token_ids[start + length : start + length + most]
    return []


def test_what_followed_the_last_tokens_before_is_proposed():
    assert drafts([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]


def test_the_longest_match_wins_though_a_shorter_one_is_later():
    #             |--------|  70            |--|  80                |--------|
    assert drafts([1, 2, 3, 4, 70, 71, 72, 73, 3, 4, 80, 81, 82, 83, 1, 2, 3, 4]) == [70, 71, 72, 73]
    assert drafts([1, 2, 3, 4, 70, 71, 72, 73, 3, 4, 80, 81, 82, 83, 1, 2, 3, 4], ngram_max=2) == [80, 81, 82, 83]


def test_of_several_matches_of_one_length_the_latest_wins():
    assert drafts([5, 6, 10, 11, 5, 6, 20, 21, 5, 6, 30, 31, 7, 5, 6], most=2) == [30, 31]


def test_no_longer_a_match_than_ngram_max_is_looked_for():
    tokens = [1, 2, 3, 70, 8, 2, 3, 80, 1, 2, 3]
    assert drafts(tokens, most=1, ngram_max=3) == [70]
    assert drafts(tokens, most=1, ngram_max=2) == [80]


def test_a_shorter_match_than_ngram_min_is_none():
    tokens = [1, 2, 70, 3, 2]
    assert drafts(tokens, ngram_min=2) == []
    assert drafts(tokens, ngram_min=1) == [70, 3, 2]


def test_prompt_and_output_are_one_sequence():
    assert drafts([1, 2, 3, 4], [9, 1, 2], most=3) == [3, 4, 9]
    assert drafts([7, 7, 1], [2, 3, 4, 1, 2], most=2) == [3, 4]  # across their border
    assert drafts([8], [1, 2, 50, 1, 2], most=1) == [50]  # within the output alone


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5], [2, 1, 1, 2, 3, 4]])
def test_where_nothing_came_before_nothing_is_proposed(tokens):
    assert drafts(tokens) == []


def test_no_more_is_proposed_than_asked_for_and_no_more_than_there_is():
    tokens = [1, 2, 3, 4, 5, 1, 2]
    assert [drafts(tokens, most=most) for most in (1, 2, 5)] == [[3], [3, 4], [3, 4, 5, 1, 2]]
    assert drafts(tokens, most=9) == [3, 4, 5, 1, 2]


def test_a_match_may_overlap_with_the_end_but_is_not_the_end_itself():
    assert drafts([4, 4, 4], most=3) == [4]
    assert drafts([1, 2, 1, 2, 1, 2], most=3) == [1, 2]
    assert drafts([3, 3], most=2, ngram_min=1) == [3]


def test_tokens_whose_bytes_only_look_alike_are_no_match():
    assert drafts([256, 256, 256, 1, 1], most=1) == []
    assert drafts([65536, 1, 7, 256, 0, 65536, 256], most=1, ngram_min=1) == [0]
    assert drafts([9, 1, 2, *[256, 512] * 50, 1, 2], most=2) == [256, 512]


def test_a_step_that_turns_out_shorter_takes_the_first_ones():
    request, drafter = request_of([1, 2, 3, 4, 5, 1, 2]), NgramDrafter(2, 4)
    assert drafter.count(request, 3) == 3
    for num_drafts in (2, 2, 0):  # twice, as a step that is computed again asks
        drafter.draft(SchedulerOutput([request], [1 + num_drafts], [[0]], [], [[]], [], {}, [num_drafts]))
        assert request.draft_token_ids == [3, 4][:num_drafts]


@pytest.mark.parametrize("vocab", [2, 3, 300, 70000])
def test_any_sequence_gives_what_a_search_token_by_token_gives(vocab):
    rng = random.Random(vocab)
    num_found = 0
    for _ in range(300):
        few = [rng.randrange(vocab) * rng.choice((1, 256, 65536) if vocab < 300 else (1,)) for _ in range(4)]
        token_ids = [rng.choice(few) for _ in range(rng.randint(1, 40))]
        low = rng.randint(1, 4)
        high, most, split = rng.randint(low, 6), rng.randint(1, 8), rng.randint(1, len(token_ids))
        expected = plain(token_ids, most, low, high)
        num_found += bool(expected)
        assert drafts(token_ids[:split], token_ids[split:], most, low, high) == expected
    assert 100 < num_found < 300


def test_a_long_prompt_takes_no_more_lines_of_python_than_a_short_one():
    """A loop over the tokens, for each request and in each step, would cost as much as a small model."""
    rng = random.Random(0)

    def lines(num_tokens):
        request = request_of([rng.randrange(2, 200) for _ in range(num_tokens)] + [0, 1])  # which come nowhere else
        return num_lines(lambda: NgramDrafter(2, 4).count(request, 4), ("v0_7_speculative",))

    assert lines(8000) == lines(80) < 60
