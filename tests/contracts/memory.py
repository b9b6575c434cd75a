"""An engine that has ended frees its memory at once, whatever was done with it, without the garbage collector.

A pool takes a gigabyte, and the weights of a model several: they cannot wait until a reference cycle is found.
"""

import pytest

from common.errors import RequestError
from common.sampling_params import SamplingParams
from tests.kit.memory import Watched, without_garbage_collector
from tests.kit.tokenizers import byte_tokenizer

SINCE = "v0_1"

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


def nothing(llm):
    pass


def answers(llm):
    llm.generate(["Hi", "Hello"], GREEDY)
    llm.chat([{"role": "user", "content": "Hi"}], GREEDY)


def streams_to_the_end(llm):
    assert len(list(llm.stream("Hi", GREEDY))) == 5


def a_stream_that_is_closed(llm):
    stream = llm.stream("Hi", GREEDY)
    next(stream)
    stream.close()


def a_stream_that_is_dropped(llm):
    next(llm.stream("Hi", GREEDY))


def a_stream_that_was_never_read(llm):
    llm.stream("Hi", GREEDY)


def a_refusal(llm):
    with pytest.raises(RequestError):
        llm.generate(["Hi"], SamplingParams(max_tokens=10_000))


def a_failed_step(llm):
    with pytest.raises(RuntimeError, match="the model failed"):
        llm.generate(["Hi", "z"], GREEDY)


def a_failed_step_of_a_stream(llm):
    with pytest.raises(RuntimeError, match="the model failed"):
        list(llm.stream("z", GREEDY))


@pytest.mark.parametrize(
    "use",
    [
        nothing,
        answers,
        streams_to_the_end,
        a_stream_that_is_closed,
        a_stream_that_is_dropped,
        a_stream_that_was_never_read,
        a_refusal,
        a_failed_step,
        a_failed_step_of_a_stream,
    ],
)
def test_an_llm_that_is_gone_leaves_neither_its_model_nor_its_kv_after(milestone, use):
    watched = []
    with without_garbage_collector():
        llm = milestone.LLM(Watched(watched), tokenizer=byte_tokenizer(), max_model_len=64)
        use(llm)
        del llm
        assert [what for what, is_there in watched if is_there() is not None] == []
    assert watched[0][0] == "model"
    assert ("kv_cache" in dict(watched)) == (use not in (nothing, a_refusal, a_stream_that_was_never_read))
