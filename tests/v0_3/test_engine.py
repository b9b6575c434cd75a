"""A step that is cut short after its tokens came: for callers and for the next step it has not happened."""

import pytest

from common.sampling_params import SamplingParams
from tests.kit.models import Successor
from tests.kit.tokenizers import byte_tokenizer
from v0_3_scheduler import LLMEngine


def test_a_step_that_fails_once_its_tokens_are_taken_in_has_not_happened():
    engine = LLMEngine(Successor(), tokenizer=byte_tokenizer(), num_blocks=20, block_size=4)
    engine.add_request("A", "a", SamplingParams(temperature=0.0, max_tokens=6))
    engine.add_request("B", "m", SamplingParams(temperature=0.0, max_tokens=4, stop="q"))
    texts, number = {"A": "", "B": ""}, 0

    def fail(scheduled):
        raise RuntimeError("the listener failed")

    while engine.has_unfinished_requests():
        number += 1
        engine.on_step = fail if number in (2, 5, 7) else None
        if engine.on_step is not None:
            with pytest.raises(RuntimeError, match="the listener failed"):
                engine.step()
        else:
            for output in engine.step():
                texts[output.request_id] += output.outputs[0].text
        engine.scheduler.check_integrity()
    assert texts == {"A": "bcdefg", "B": "nop"}
    assert engine.scheduler.block_manager.num_free_blocks == 20
