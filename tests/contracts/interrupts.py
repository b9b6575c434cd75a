"""Ctrl-C: it may come between any two lines, and leaves the engine as it was before the call."""

import random

import pytest

from common.sampling_params import SamplingParams
from tests.contracts.blocks import block_manager
from tests.kit.interrupts import interrupt, num_lines
from tests.kit.models import Successor
from tests.kit.tokenizers import byte_tokenizer

SINCE = "v0_1"
NUM_PLACES = 60  # of the thousands of lines that each call runs


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


def new_llm(milestone):
    """Blocks for some of the requests below, so that they wait and are preempted."""
    pool = {} if milestone.__name__.startswith("v0_1") else {"num_blocks": 9, "block_size": 2}
    return milestone.LLM(Successor(), tokenizer=byte_tokenizer(), **pool)


def assert_nothing_stays(llm):
    if hasattr(llm, "engine"):
        llm.engine.scheduler.check_integrity()
        assert not llm.engine.has_unfinished_requests()
        assert llm._outputs == llm.engine.output_processor.parents == llm.engine.output_processor._children == {}
    if not hasattr(llm, "engine") and not hasattr(llm, "block_manager"):
        return  # v0.1: a request's slab is its own
    block_manager(llm).check_integrity()
    assert block_manager(llm).num_free_blocks == block_manager(llm).num_blocks


def generate(llm):
    params = [greedy(6), greedy(4, n=2), greedy(9, stop="hi"), greedy(3, logprobs=1)]
    return [
        choice.text
        for output in llm.generate(["a", "pqr", "cd", "x"], params, use_tqdm=False)
        for choice in output.outputs
    ]


TEXTS = ["bcdefg", "stuv", "stuv", "efg", "yz{"]


def places(milestone, prepare, call):
    """Lines of a call at which to interrupt it, the same each time: `call` of what `prepare` made."""
    prepared = prepare()
    total = num_lines(lambda: call(prepared), ("common", milestone.__name__))
    assert total > 100
    return sorted(random.Random(total).sample(range(total), min(NUM_PLACES, total)))


@pytest.mark.thorough
def test_unt_11_after_an_interrupt_at_any_line_of_generate_the_engine_is_as_before(milestone):
    for place in places(milestone, lambda: new_llm(milestone), generate):
        llm = new_llm(milestone)
        assert interrupt(lambda: generate(llm), ("common", milestone.__name__), place)  # noqa: B023
        assert_nothing_stays(llm)
        assert generate(llm) == TEXTS
        assert_nothing_stays(llm)


def test_unt_11_an_interrupt_while_prompts_are_added_leaves_none_of_them_for_the_next_call(milestone):
    llm = new_llm(milestone)

    def add_many():
        llm.generate(["a"] * 100, greedy(1), use_tqdm=False)

    for place in range(200, 2200, 400):
        assert interrupt(add_many, ("common", milestone.__name__), place)
        assert_nothing_stays(llm)
        num_forwards = llm_model(llm).num_forwards
        [output] = llm.generate(["a"], greedy(3), use_tqdm=False)
        assert output.outputs[0].text == "bcd"
        assert llm_model(llm).num_forwards - num_forwards == 3


def llm_model(llm):
    return llm.engine.model if hasattr(llm, "engine") else llm.model


@pytest.mark.thorough
def test_unt_11_an_interrupt_at_any_line_loses_no_other_stream_a_token(milestone):
    def prepare():
        llm = new_llm(milestone)
        stream = llm.stream("A", greedy(12))
        return llm, stream, [next(stream).outputs[0].text for _ in range(2)]

    def call(prepared):
        prepared[0].generate(["a", "b"], [greedy(3), greedy(5, n=2)], use_tqdm=False)

    for place in places(milestone, prepare, call):
        llm, stream, texts = prepare()
        assert interrupt(lambda: call([llm]), ("common", milestone.__name__), place)  # noqa: B023
        texts += [output.outputs[0].text for output in stream]
        assert "".join(texts) == "BCDEFGHIJKLM"
        del stream
        assert_nothing_stays(llm)


@pytest.mark.thorough
@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_unt_11_an_interrupt_at_any_line_of_a_stream_leaves_nothing_once_it_is_dropped(milestone, num_read):
    def call(llm):
        stream = llm.stream("a", greedy(6, n=2))
        for _ in range(num_read):
            next(stream)
        stream.close()
        return stream

    for place in places(milestone, lambda: new_llm(milestone), call)[::3]:
        llm = new_llm(milestone)
        assert interrupt(lambda: call(llm), ("common", milestone.__name__), place)  # noqa: B023
        assert generate(llm) == TEXTS
        assert_nothing_stays(llm)
