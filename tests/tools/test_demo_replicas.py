"""What the demo of two replicas prints, and what it says without Ray. That it runs on Ray is seen by `make`."""

import sys
from collections import Counter

import pytest

from common.errors import ModelError
from tools import demo_replicas
from tools.demo_replicas import QUESTIONS, RULES, Turn, _summary, _turns


def turn(user, number, replica, num_found):
    return Turn(user, number, replica, "prefix" if num_found else "new", num_found, 200, "Bread is\nmade of flour.")


TURNS = [turn("cook", 1, "A", 0), turn("sailor", 1, "B", 0), turn("cook", 2, "A", 176), turn("sailor", 2, "B", 160)]


def test_a_turn_is_one_line_with_replica_rule_and_what_was_found():
    line = "cook      2     A        prefix   176 of 200 tokens  Bread is made of flour."
    assert str(TURNS[2]) == line
    heading = demo_replicas.ROW.format("user", "turn", "replica", "rule", "found in its cache", "answer")
    assert heading.index("answer") == line.index("Bread")


def test_a_long_answer_is_cut_where_the_line_ends():
    line = str(Turn("gardener", 3, "B", "prefix", 1008, 1234, "word " * 20))
    assert line.endswith("word wo...")
    assert len(line) <= 100


def test_the_summary_counts_what_later_turns_found_and_what_each_replica_got():
    assert _summary([*TURNS, turn("cook", 3, "A", 192)]).split("\n") == [
        "Each conversation stayed on its replica, where the later turns found 528 of their 600 tokens.",
        "Requests: 3 to replica A, 2 to replica B.",
    ]


def test_a_conversation_that_moved_is_an_error_that_names_it():
    with pytest.raises(ModelError, match=r"^Not every conversation stayed on its replica: cook\.$"):
        _summary([*TURNS, turn("cook", 3, "B", 0)])


class Replicas:
    """Two of them as `_http` finds them: x gets the gardener's conversation, y the others."""

    def __init__(self):
        self.routed = {"x": Counter(), "y": Counter()}
        self.bodies = []

    def http(self, url, body=None):
        if body is None:
            assert url == "http://here/replicas"
            return {"replicas": [{"name": name, "routed": dict(routed)} for name, routed in self.routed.items()]}
        assert url == "http://here/v1/chat/completions"
        self.bodies.append([message["content"] for message in body["messages"]])
        is_first = len(body["messages"]) == 2
        self.routed["x" if "gardener" in self.bodies[-1][0] else "y"]["new" if is_first else "prefix"] += 1
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 0 if is_first else 96}}
        return {"choices": [{"message": {"content": f"answer {len(self.bodies)}"}}], "usage": usage}


def test_conversations_take_turns_and_each_sends_all_that_was_said_in_it(monkeypatch):
    replicas = Replicas()
    monkeypatch.setattr(demo_replicas, "_http", replicas.http)
    turns = list(_turns("http://here"))
    assert [(each.user, each.number) for each in turns] == [(user, n) for n in (1, 2, 3) for user in QUESTIONS]
    assert [each.replica for each in turns] == ["A", "B", "A"] * 3  # letters in the order in which they answered
    assert [each.rule for each in turns] == ["new"] * 3 + ["prefix"] * 6
    assert [each.num_found for each in turns] == [0] * 3 + [96] * 6
    cook = QUESTIONS["cook"]
    system = f"You are a helpful cook. {RULES}"
    assert replicas.bodies[6] == [system, cook[0], "answer 1", cook[1], "answer 4", cook[2]]


def test_a_replica_that_is_lost_meanwhile_is_an_error(monkeypatch):
    replicas = Replicas()

    def http(url, body=None):
        answer = replicas.http(url, body)
        if body is not None and len(replicas.bodies) == 2:
            replicas.routed = {"z": Counter()}
        return answer

    monkeypatch.setattr(demo_replicas, "_http", http)
    turns = _turns("http://here")
    assert next(turns).user == "cook"
    with pytest.raises(ModelError, match="It is not clear which replica has answered"):
        next(turns)


def test_without_ray_it_says_how_to_install_it_and_starts_nothing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(demo_replicas, "running", lambda *_: pytest.fail("a server was started"))
    assert demo_replicas.main([]) == 1
    assert capsys.readouterr().err == "error: Several replicas need Ray: install it with `pip install -e '.[ray]'`.\n"
