"""Earlier promises once more, kept while tokens are drafted: the engine drafts here unless it is told not to.

What is not run again says how many steps something takes, looks at what one step computes, or is said with drafts in
`tests/contracts/speculation.py`.
"""

import inspect

import pytest

import v0_7_speculative
from tests.contracts import batching, ending, parity, prompt_logprobs, sampling
from v0_7_speculative.engine_args import EngineArgs

METHODS = ("ngram", "early_exit")
CONTRACTS = [
    *(test for name, test in vars(ending).items() if name.startswith("test_")),
    *(test for name, test in vars(sampling).items() if name.startswith("test_")),
    batching.test_sch_2_the_only_request_fills_the_pool_to_its_last_slot_without_preempting_itself,
    batching.test_sch_3_a_preempted_request_keeps_its_tokens_and_sends_none_twice,
    batching.test_an_abort_leaves_the_others_tokens_as_they_are,
    batching.test_blk_2_blocks_come_back_from_an_abort_at_any_moment,
    batching.test_two_streams_and_a_generate_between_them_share_the_engine,
    batching.test_a_step_that_fails_leaves_nothing_behind_and_the_engine_goes_on,
    batching.test_a_step_that_fails_leaves_other_streams_whole,
    batching.test_stop_strings_end_a_request_in_the_step_that_completes_them,
    batching.test_preemptions_of_all_choices_are_counted,
    batching.test_an_abort_from_within_a_step_is_no_fault,
    parity.test_sch_10_prompts_of_mixed_lengths_together_equal_each_alone,
    parity.test_a_request_fills_the_context_to_its_last_token_and_equals_transformers,
    parity.test_64_greedy_tokens_of_the_real_model_equal_transformers,
    prompt_logprobs.test_prompts_that_are_preempted_are_scored_once_and_as_by_transformers,
    prompt_logprobs.test_only_the_first_output_of_a_stream_has_the_prompts_scores_also_with_n_choices,
    prompt_logprobs.test_max_tokens_0_scores_the_prompt_and_generates_nothing,
    prompt_logprobs.test_a_failed_step_is_computed_again_and_the_scores_are_the_same,
]


@pytest.fixture
def milestone(request, monkeypatch):
    """v0.7, whose engines draft three tokens by this method."""
    method = request.param
    flags = {"speculative_method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        flags["ngram_min"] = 1
    for name, value in flags.items():
        monkeypatch.setitem(EngineArgs.__init__.__kwdefaults__, name, value)
    return v0_7_speculative


@pytest.fixture
def load(milestone):
    """An engine for each test: those that are kept do not draft."""
    return lambda model: milestone.LLM(**model.ready)


def pytest_generate_tests(metafunc):
    if "milestone" in metafunc.fixturenames:
        metafunc.parametrize("milestone", methods_of(metafunc.function), indirect=True)


def methods_of(test):
    """A model whose layers cannot be counted, as SCRIPT is, has n-grams alone."""
    needed = inspect.signature(test).parameters
    return METHODS if "tiny" in needed or "real" in needed else METHODS[:1]


globals().update({test.__name__: test for test in CONTRACTS})
