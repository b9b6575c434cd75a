"""What the measurements stand on: the client, the loads, and the simulation. No Ray, and no figure of this machine."""

import asyncio

import pytest

from tests.kit.models import Successor
from v0_10_scale_out.cluster.routing import ROUTINGS
from v0_10_scale_out.measurements.load import Question, ask, ask_all, figures
from v0_10_scale_out.measurements.routing import ask_sessions, summary
from v0_10_scale_out.measurements.simulation import Costs, Simulation, errors, simulate
from v0_10_scale_out.measurements.workloads import WORKLOADS, Turn, chats, system_prompts

COSTS = Costs(step=0.03, request=0.003, token=0.002, around=0.015)


def test_the_client_notes_each_token_and_when_it_came(serve):
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        port = server.http.base_url.port
        [answer] = asyncio.run(ask_all(port, [Question([*b"ABCDEFGH"], 5)]))
        assert answer.token_ids == [*b"IJKLM"]
        assert answer.num_cached_tokens == 0
        assert len(answer.times) == 5
        assert answer.times == sorted(answer.times)
        assert 0 < answer.ttft < answer.times[-1] - answer.sent
        of_two = figures(asyncio.run(ask_all(port, [Question([*b"ABCDEFGH"], 5), Question([*b"abc"], 5)])))
        assert all(value > 0 for value in of_two.values())


def test_the_client_says_why_there_is_no_answer(serve):
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        port = server.http.base_url.port
        assert "max_tokens" in asyncio.run(ask(port, Question([65], 10**6))).error
    assert asyncio.run(ask(port, Question([65], 1))).error == "ConnectionRefusedError"
    with pytest.raises(SystemExit, match="1 of 1 requests failed"):
        asyncio.run(ask_all(port, [Question([65], 1)]))


def test_a_conversation_is_asked_turn_by_turn_and_finds_its_own_cache(serve):
    session = [Turn(None, [*b"ABCDEFGH"], 4), Turn(None, [*b"abcd"], 4), Turn([*b"ABCD"], [*b"xyz"], 2)]
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        answers = asyncio.run(ask_sessions(server.http.base_url.port, [session]))
    assert [length for length, _ in answers] == [8, 16, 7]
    assert [answer.token_ids for _, answer in answers] == [[*b"IJKL"], [*b"efgh"], [*b"{|"]]
    assert [answer.num_cached_tokens for _, answer in answers] == [0, 8, 4]
    assert summary(answers)["cached"] == 12 / 31


def test_users_of_a_load_have_in_common_what_it_says():
    first, second = chats(0, 2)
    assert len(first) == 6
    assert not set(map(tuple, (turn.new for turn in first))) & set(map(tuple, (turn.new for turn in second)))
    starts = {tuple(turn.start) for session in system_prompts(0, 8) for turn in session}
    assert [len(start) for start in starts] == [2000] * 4
    assert chats(0, 2) == chats(0, 2) != chats(1, 2)
    turns = [turn for session in chats(0, 50) for turn in session]
    assert {min(len(turn.new) for turn in turns), max(len(turn.new) for turn in turns)} == {20, 60}
    assert 150 < sum(turn.num_tokens for turn in turns) / len(turns) < 170


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("load", WORKLOADS)
def test_every_simulated_request_is_answered_and_every_replica_is_idle_at_the_end(load, routing):
    sessions = WORKLOADS[load](0, 8)
    simulation = Simulation(routing, 4, sessions, COSTS, seed=0)
    result = simulation.run()
    turns = [turn for session in sessions for turn in session]
    assert len(simulation.ttfts) == len(turns)
    assert simulation.num_tokens == sum(turn.num_tokens for turn in turns)
    assert 0 <= result["cached"] < 1 <= result["busiest"]
    assert all(replica.load == 0 for replica in simulation.policy.replicas.values())
    for replica in simulation.replicas.values():
        assert replica.scheduler.block_manager.num_free_blocks == replica.scheduler.block_manager.num_blocks
        replica.scheduler.check_integrity()


def test_one_simulated_request_takes_what_its_steps_cost():
    simulation = Simulation("prefix", 1, [[Turn([7] * 600, [], 3)]], COSTS, seed=0)
    simulation.run()
    first = 2 * (0.03 + 0.003) + (600 - 2) * 0.002  # chunks of 512 and 88 tokens, the first of each as a request
    assert simulation.ttfts == [pytest.approx(0.015 + first)]
    assert simulation.clock == pytest.approx(0.015 + first + 2 * 0.033)


def test_by_prefix_more_is_cached_than_at_random_and_more_is_done():
    results = simulate(COSTS, [2, 8], 1)["loads"]
    for load in WORKLOADS:
        for number in ("2", "8"):
            by_prefix, at_random = results[load][number]["prefix"], results[load][number]["random"]
            assert by_prefix["cached"]["median"] > at_random["cached"]["median"]
            assert by_prefix["rate"]["median"] > at_random["rate"]["median"]
    shared = results["system prompts"]["2"]
    assert shared["prefix"]["ttft_ms"]["median"] < 0.6 * shared["random"]["ttft_ms"]["median"]
    measured = {load: of["2"] for load, of in results.items()}
    assert {ratio for load in errors(results, measured).values() for of in load.values() for ratio in of.values()} == {
        1
    }
