"""The policy: which replica gets a prompt. No Ray, no server and no model."""

import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v0_10_scale_out.cluster.keys import chain
from v0_10_scale_out.cluster.routing import ROUTINGS, Choice, Policy, Route


def key(text, blocks=4):
    """A key of so many blocks, which begins like that of any text with the same first letters: a letter a block."""
    return chain(b"".join(letter.encode() * 64 for letter in text.ljust(blocks, text[-1])))


def policy(routing="prefix", *, names="ab", **options):
    made = Policy(routing, **({"seed": 0} | options))
    made.update(names)
    return made


def send(made, request_id, prompt):
    """As a router does: choose, then start."""
    choice = made.choose(prompt)
    made.start(request_id, choice.replica, prompt)
    return choice


def load(made):
    return {name: replica.load for name, replica in made.replicas.items()}


def test_a_prompt_that_nobody_has_seen_is_new_and_holds_nothing():
    choice = policy().choose(key("abcd"))
    assert (choice.rule, choice.num_held) == ("new", 0)
    assert choice.replica in ("a", "b")


def test_the_same_prompt_goes_where_it_was():
    made = policy()
    first = send(made, "1", key("abcd"))
    made.end("1")
    assert [send(made, f"{i}", key("abcd")) for i in range(5)] == [Choice(first.replica, "prefix", 4)] * 5


def test_the_longest_prefix_wins():
    made = policy()
    made.start("1", "a", key("abxx"))
    made.start("2", "b", key("abcx"))
    assert made.choose(key("abcd")) == Choice("b", "prefix", 3)
    assert made.choose(key("abxy")) == Choice("a", "prefix", 3)


def test_of_two_that_hold_as_much_the_less_busy_one_gets_it():
    made = policy()
    made.start("1", "a", key("abcd"))
    made.start("2", "b", key("abcd"))
    made.start("3", "b", key("xxxx"))
    assert {made.choose(key("abcd")).replica for _ in range(20)} == {"a"}
    made.end("3")
    made.start("4", "a", key("yyyy"))
    assert {made.choose(key("abcd")).replica for _ in range(20)} == {"b"}


@pytest.mark.parametrize("threshold", [0, 1, 3, 8])
def test_a_replica_is_too_busy_from_one_request_above_the_threshold(threshold):
    made = policy(threshold=threshold)
    made.start("first", "a", key("abcd"))
    made.end("first")
    for i in range(threshold):
        made.start(f"{i}", "a", key("zzzz"))
    assert made.choose(key("abcd")) == Choice("a", "prefix", 4)
    made.start("one more", "a", key("zzzz"))
    assert made.choose(key("abcd")) == Choice("b", "busy", 0)


def test_it_is_compared_with_the_least_busy_of_all():
    made = policy(names="abc", threshold=2)
    made.start("first", "a", key("abcd"))
    for i in range(2):
        made.start(f"a{i}", "a", key("zzzz"))
        made.start(f"b{i}", "b", key("zzzz"))
    assert made.choose(key("abcd")).rule == "busy"  # 3 and 0


def test_many_at_once_with_one_prefix_spread_by_the_threshold_and_then_evenly():
    made = policy(threshold=8)
    rules = [send(made, f"{i}", key("abcd")).rule for i in range(16)]
    assert rules == ["new", *["prefix"] * 8, "busy", *["prefix"] * 6]
    assert sorted(load(made).values()) == [7, 9]
    for i in range(16, 100):
        send(made, f"{i}", key("abcd"))
    assert sorted(load(made).values()) == [50, 50]


def test_six_prefixes_of_six_requests_each_have_one_replica_each_and_both_are_used():
    made = policy()
    places = {prefix: set() for prefix in "pqrstu"}
    for turn in range(6):
        for prefix in places:
            request_id = f"{prefix}{turn}"
            places[prefix].add(send(made, request_id, key(prefix * 4 + f"{turn}", 5)).replica)
            made.end(request_id)
    assert all(len(replicas) == 1 for replicas in places.values())
    assert Counter(replica for [replica] in places.values()) == {"a": 3, "b": 3}


def test_new_prompts_spread_while_nothing_runs():
    made = policy(names="abcd")
    for number in range(400):
        send(made, "1", chain(f"{number:03}".encode() * 64))
        made.end("1")
    held = [len(replica.held) // 3 for replica in made.replicas.values()]  # prompts of three blocks
    assert sum(held) == 400
    assert max(held) - min(held) <= 20


def test_new_prompts_spread_however_much_was_held_before():
    made = policy()
    for number in range(50):
        send(made, "1", chain(f"same{number:04}".encode() * 64))
        made.update("a" if number < 40 else "ab")
        made.end("1")
    before = dict.fromkeys("ab", 0)
    for name in "pqrs":
        before[send(made, "1", key(name)).replica] += 1
        made.end("1")
    assert before == {"a": 2, "b": 2}


@pytest.mark.parametrize(("share", "rule"), [(0.0, "prefix"), (0.25, "prefix"), (0.26, "new"), (1.0, "new")])
def test_a_short_common_beginning_does_not_count(share, rule):
    made = policy(min_share=share)
    made.start("1", "a", key("abcd"))
    assert made.choose(key("axyz")).rule == rule  # one block of four


def test_with_a_share_of_one_only_a_whole_prompt_counts():
    made = policy(min_share=1.0)
    made.start("1", "a", key("abcd"))
    assert made.choose(key("abcd")).rule == "prefix"


def test_a_conversation_stays_where_it_began():
    made = policy()
    made.start("other", "b", key("z"))
    places = set()
    for turn in range(1, 20):
        places.add(send(made, "1", key("abcdefghijklmnopqrst"[:turn], turn)).replica)
        made.end("1")
    assert len(places) == 1


@pytest.mark.parametrize("routing", ["balanced", "random"])
def test_the_controls_look_at_no_prefix(routing):
    made = policy(routing)
    counts = Counter()
    for number in range(200):
        choice = send(made, f"{number}", key("abcd"))
        counts[choice.replica] += 1
        assert choice.rule == routing
        made.end(f"{number}")
    assert min(counts.values()) > 70


@pytest.mark.parametrize("routing", ROUTINGS)
def test_what_is_held_is_told_whatever_the_rule(routing):
    made = policy(routing, names="a")
    made.start("1", "a", key("abcd"))
    assert made.choose(key("abxx")).num_held == 2


@pytest.mark.parametrize("num_replicas", [2, 3, 8, 64])
def test_balanced_keeps_replicas_even(num_replicas):
    made = policy("balanced", names=[f"{i}" for i in range(num_replicas)])
    for number in range(num_replicas * 50):
        send(made, f"{number}", ())
    assert max(load(made).values()) - min(load(made).values()) <= 8
    if num_replicas == 2:  # both are looked at
        assert set(load(made).values()) == {50}


def test_a_prompt_without_a_block_goes_to_the_less_busy_one():
    made = policy()
    made.start("1", "a", ())
    assert {made.choose(()) for _ in range(20)} == {Choice("b", "new", 0)}


def test_a_lost_replica_is_forgotten_with_what_it_held_and_ran():
    made = policy()
    made.start("1", "a", key("abcd"))
    made.update("bc")
    assert load(made) == {"b": 0, "c": 0}
    assert made.choose(key("abcd")).rule == "new"
    made.end("1")
    made.update("abc")  # the same name, should it come again, is a new replica
    assert made.choose(key("abcd")).rule == "new"
    assert load(made) == {"a": 0, "b": 0, "c": 0}


def test_a_new_replica_gets_what_is_new():
    made = policy("prefix", names="a")
    made.start("1", "a", key("abcd"))
    made.update("ab")
    assert made.choose(key("wxyz")).replica == "b"
    assert made.choose(key("abcd")) == Choice("a", "prefix", 4)


def test_only_the_named_ones_are_chosen_from():
    made = policy(names="abc")
    made.start("1", "a", key("abcd"))
    assert {made.choose(key("abcd"), ["b"]) for _ in range(5)} == {Choice("b", "new", 0)}
    assert made.choose(key("abcd"), ["b", "unknown"]).replica == "b"


@pytest.mark.parametrize("routing", ROUTINGS)
def test_one_that_is_asked_for_by_its_name_gets_the_request_whatever_the_rule(routing):
    made = policy(routing, names="abc")
    made.start("1", "a", key("abcd"))
    route = Route(key("abcd"), only="b")
    assert {made.choose_for(route, "abc") for _ in range(10)} == {Choice("b", "named", 0)}
    assert made.choose_for(Route(only="z"), "abc").rule != "named"  # the ingress refuses what comes from another one


def test_a_lost_replica_is_avoided_while_there_is_another_one():
    made = policy()
    made.start("1", "a", key("abcd"))
    assert made.choose_for(Route(key("abcd"), avoid="a"), "ab").replica == "b"
    assert made.choose_for(Route(key("abcd"), avoid="a"), "a").replica == "a"


@pytest.mark.parametrize("names", [[], ["unknown"]])
def test_without_a_replica_there_is_no_choice(names):
    with pytest.raises(ValueError, match="no replica"):
        policy().choose((), names)


def test_an_unknown_routing_is_refused():
    with pytest.raises(ValueError, match="There is no routing 'best'"):
        Policy("best")


def test_a_request_that_is_sent_again_counts_once():
    made = policy()
    made.start("1", "a", key("abcd"))
    made.start("1", "b", key("abcd"))
    assert load(made) == {"a": 0, "b": 1}
    made.end("1")
    assert load(made) == {"a": 0, "b": 0}


def test_the_late_end_of_a_first_try_leaves_the_second_alone():
    made = policy()
    made.start("1", "a", ())
    made.start("1", "b", ())
    made.end("1", "a")
    assert load(made) == {"a": 0, "b": 1}
    made.end("1", "b")
    made.end("1", "b")
    made.end("never seen")
    assert load(made) == {"a": 0, "b": 0}


def test_what_goes_to_a_replica_that_is_not_there_any_more_is_not_counted():
    made = policy()
    made.start("1", "c", key("abcd"))
    made.end("1")
    assert load(made) == {"a": 0, "b": 0}


def test_so_many_blocks_are_remembered_the_latest_used_ones():
    made = policy(names="a", max_blocks=8)
    for prompt in ("abcd", "efgh", "abcd", "ijkl"):
        send(made, "1", key(prompt))
    assert len(made.replicas["a"].held) == 8
    assert [made.choose(key(prompt)).num_held for prompt in ("abcd", "efgh", "ijkl")] == [4, 0, 4]


def test_a_prefix_is_forgotten_from_its_end():
    made = policy(names="a", max_blocks=6)
    send(made, "1", key("abcd"))
    send(made, "1", key("wxyz"))
    assert made.choose(key("abcd")).num_held == 2


def test_a_prompt_that_is_longer_than_all_that_is_remembered_is_held_in_its_beginning():
    made = policy(names="a", max_blocks=3)
    send(made, "1", key("abcdef", 6))
    assert made.choose(key("abcdef", 6)).num_held == 3


def test_a_route_travels_without_its_key():
    route = pickle.loads(pickle.dumps(Route(key("abcd"), Choice("a", "new", 0))))
    assert (route.key, route.choice) == ((), None)


@given(
    st.sampled_from(ROUTINGS),
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 30), st.text("ab", min_size=1, max_size=5)),
            st.tuples(st.just("end"), st.integers(0, 30), st.just("")),
            st.tuples(st.just("replicas"), st.integers(1, 5), st.just("")),
        ),
        max_size=60,
    ),
)
def test_any_order_of_requests_and_replicas_keeps_count(routing, actions):
    made = policy(routing, names=["0", "1"], threshold=2, max_blocks=7)
    running = {}
    for action, number, text in actions:
        if action == "send":
            prompt = key(text, len(text))
            choice = send(made, f"{number}", prompt)
            assert choice.num_held <= len(prompt)
            running[number] = choice.replica
            assert made.replicas[choice.replica].num_held(prompt) == min(len(prompt), 7)
        elif action == "end":
            made.end(f"{number}")
            running.pop(number, None)
        else:
            names = [f"{i}" for i in range(number)]
            made.update(names)
            running = {request: replica for request, replica in running.items() if replica in names}
        assert load(made) == {name: list(running.values()).count(name) for name in made.replicas}
        assert all(len(replica.held) <= 7 for replica in made.replicas.values())


@given(
    st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=20), st.text("abc", min_size=1, max_size=6)
)
def test_a_prefix_choice_holds_as_much_as_any_and_is_not_too_busy(sent, text):
    made = policy(names="wxyz", threshold=3)
    for number, prompt in enumerate(sent):
        send(made, f"{number}", key(prompt, len(prompt)))
    prompt = key(text, len(text))
    choice = made.choose(prompt)
    most = max(replica.num_held(prompt) for replica in made.replicas.values())
    busiest = min(load(made).values()) + 3
    if choice.rule == "prefix":
        assert choice.num_held == most >= 0.25 * len(prompt)
        assert load(made)[choice.replica] <= busiest
    elif choice.rule == "busy":
        holders = [replica for replica in made.replicas.values() if replica.num_held(prompt) == most]
        assert all(replica.load > busiest for replica in holders)
    else:
        assert most < 0.25 * len(prompt) or most == 0
