"""Drafts over HTTP: answers, chunks and counts are those of plain decoding, however many tokens a step brings."""

import json

import pytest

from tests.kit.models import Successor
from tests.kit.server import streamed

SINCE = "v0_7"

PROMPT = [*b"ABCDEFG ABC"]  # answered DEFGHI...: of these DEFG have come before, and are guessed
FLAGS = {"speculative_method": "ngram", "num_speculative_tokens": 4, "num_blocks": 100, "block_size": 4}


def final_usage(response):
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [chunk["usage"] for chunk in map(json.loads, lines) if chunk.get("usage")]


def test_spd_2_usage_counts_the_tokens_that_are_delivered_whole_and_streamed(serve):
    with serve(Successor(), **FLAGS) as server:
        for max_tokens in range(1, 10):
            body = {"prompt": PROMPT, "max_tokens": max_tokens, "logprobs": 1}
            whole = server.complete(**body).json()
            [choice] = whole["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("DEFGHIJKL"[:max_tokens], "length")
            assert whole["usage"]["completion_tokens"] == max_tokens == len(choice["logprobs"]["tokens"])
            options = {"include_usage": True, "continuous_usage_stats": True}
            response = server.complete(**body, stream=True, stream_options=options)
            assert streamed(response)[0] == (choice["text"], "length")
            counts = [usage["completion_tokens"] for usage in final_usage(response)]
            assert counts[-1] == max_tokens
            assert counts == sorted(counts)
        server.assert_idle()


@pytest.mark.parametrize("stop", ["EF", "F", "GH"])
def test_spd_1_a_stop_string_inside_accepted_tokens_ends_the_answer_and_its_counts(serve, stop):
    with serve(Successor(), **FLAGS) as server:
        plain_tokens = "DEFGHIJKL".index(stop) + len(stop)
        whole = server.complete(prompt=PROMPT, max_tokens=20, stop=stop, logprobs=0).json()
        [choice] = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("DEFGHIJKL"[: plain_tokens - len(stop)], "stop")
        assert whole["usage"]["completion_tokens"] == plain_tokens
        response = server.complete(prompt=PROMPT, max_tokens=20, stop=stop, stream=True)
        assert streamed(response)[0] == (choice["text"], "stop")
        server.assert_idle()
