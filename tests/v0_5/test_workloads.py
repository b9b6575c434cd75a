"""What is asked in a benchmark."""

import json

import pytest

from common.errors import ModelError, RequestError
from v0_5_bench.harness.load.workloads import chats, from_file, parse_range, random_prompts, shared_prefix


def test_the_same_seed_gives_the_same_requests_and_lengths_lie_in_their_ranges():
    requests = random_prompts(200, (10, 20), (5, 7), seed=1)
    assert requests == random_prompts(200, (10, 20), (5, 7), seed=1)
    assert requests != random_prompts(200, (10, 20), (5, 7), seed=2)
    assert {len(request.prompt) for request in requests} == set(range(10, 21))
    assert {request.num_output_tokens for request in requests} == {5, 6, 7}


def test_ben_6_no_two_prompts_begin_alike():
    prompts = [tuple(request.prompt[:8]) for request in random_prompts(300, (30, 30), (1, 1), seed=0)]
    assert len(set(prompts)) == 300
    firsts = [request.messages[0]["content"][:16] for request in chats(50, (1, 1), seed=0)]
    assert len(set(firsts)) == 50


def test_all_prompts_share_the_prefix_of_its_own_seed_and_nothing_behind_it():
    requests = shared_prefix(20, 40, (5, 9), (3, 3), seed=1, prefix_seed=7)
    others = shared_prefix(20, 40, (5, 9), (3, 3), seed=2, prefix_seed=7)
    assert len({tuple(request.prompt[:40]) for request in requests + others}) == 1
    assert len({tuple(request.prompt[40:44]) for request in requests + others}) == 40
    assert {len(request.prompt) for request in requests} == set(range(45, 50))
    assert requests == shared_prefix(20, 40, (5, 9), (3, 3), seed=1, prefix_seed=7)
    assert requests[0].prompt[:40] != shared_prefix(1, 40, (5, 9), (3, 3), seed=1, prefix_seed=8)[0].prompt[:40]


def test_chats_have_one_turn_or_two_and_end_with_the_user():
    requests = chats(40, (8, 8), seed=3)
    assert {len(request.messages) for request in requests} == {1, 3}
    assert all(request.messages[-1]["role"] == "user" for request in requests)


def test_a_file_has_texts_ids_or_conversations_with_lengths_of_their_own(tmp_path):
    file = tmp_path / "requests.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "a", "max_tokens": 3}, {"prompt": [1, 2]}, {"messages": messages}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    requests = from_file(file, 9)
    assert [(r.prompt, r.messages, r.num_output_tokens) for r in requests] == [
        ("a", None, 3),
        ([1, 2], None, 9),
        (None, messages, 9),
    ]


@pytest.mark.parametrize(
    "line", ["{", "[]", '"x"', "{}", '{"prompt": "a", "messages": []}', '{"prompt": "a", "max_tokens": "x"}']
)
def test_a_line_that_is_no_request_is_named_by_its_number(tmp_path, line):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(RequestError, match="line 2, is no request"):
        from_file(file, 9)


def test_a_file_that_cannot_be_read_or_is_empty_is_told(tmp_path):
    with pytest.raises(RequestError, match="cannot be read"):
        from_file(tmp_path / "nothing", 9)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(RequestError, match="has no requests"):
        from_file(tmp_path / "empty", 9)


def test_a_range_is_a_number_or_two():
    assert parse_range("30", "x") == (30, 30)
    assert parse_range("10-50", "x") == (10, 50)
    for wrong in ("", "0", "-5", "50-10", "a", "1-", "3-b", "1.5"):
        with pytest.raises(ModelError, match="x must be a number of tokens or a range"):
            parse_range(wrong, "x")
