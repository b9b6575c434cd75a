"""The policy alone, without a model: who runs, who waits, who gives way, step by step."""

import pytest

from common.sampling_params import SamplingParams, SamplingState
from tests.conftest import ROOT
from tools.citations import num_code_lines
from v0_3_scheduler.block_manager import BlockManager
from v0_3_scheduler.request import Request, RequestStatus
from v0_3_scheduler.scheduler import Scheduler


def scheduler(*, num_blocks=100, block_size=4, budget=64, max_num_seqs=16, max_request_len=1000):
    return Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_request_len=max_request_len,
    )


def request(request_id, prompt_len, max_tokens=50):
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id, SamplingState.create(params, [1] * prompt_len, (2,), seed=0))


def step(sched, token_id=7):
    """One step with a model that always says `token_id`; `{id: tokens scheduled}` and the ids preempted."""
    output = sched.schedule()
    sampled = {
        r.request_id: token_id
        for r, num in zip(output.requests, output.num_scheduled_tokens, strict=True)
        if r.num_computed_tokens + num == r.num_tokens
    }
    assert sum(output.num_scheduled_tokens) <= sched.max_num_batched_tokens
    assert len(sched.running) <= sched.max_num_seqs
    sched.update(output, sampled)
    sched.check_integrity()
    ids = [r.request_id for r in output.requests]
    preempted = [r.request_id for r in output.preempted]
    assert not set(ids) & set(preempted), "scheduled and preempted in one step"
    return dict(zip(ids, output.num_scheduled_tokens, strict=True)), preempted


def test_the_first_step_admits_in_the_order_of_arrival_whom_budget_seats_and_blocks_have_room_for():
    for options, expected in (
        ({}, {"A": 5, "B": 7, "C": 2}),
        ({"budget": 8}, {"A": 5, "B": 3}),  # a chunk of B's prompt
        ({"max_num_seqs": 2}, {"A": 5, "B": 7}),
        ({"num_blocks": 3}, {"A": 5}),  # nobody passes B, though C would fit
    ):
        sched = scheduler(**options)
        requests = [request("A", 5), request("B", 7), request("C", 2)]
        for each in requests:
            sched.add(each)
        output = sched.schedule()
        scheduled = zip(output.requests, output.num_scheduled_tokens, strict=True)
        assert {r.request_id: num for r, num in scheduled} == expected
        assert sched.running == output.requests == requests[: len(expected)]
        assert list(sched.waiting) == requests[len(expected) :]
        assert [r.status for r in sched.running] == [RequestStatus.RUNNING] * len(expected)
        tables = [sched.block_manager.block_table(r.request_id) for r in output.requests]
        assert output.block_tables == tables
        assert [len(table) for table in tables] == [-(-num // 4) for num in output.num_scheduled_tokens]


def test_a_prompt_is_computed_at_once_and_then_a_token_a_step():
    sched = scheduler()
    sched.add(request("A", 10))
    assert [step(sched)[0] for _ in range(3)] == [{"A": 10}, {"A": 1}, {"A": 1}]


def test_sch_7_a_long_prompt_is_chunked_by_what_decodes_leave_of_the_budget():
    sched = scheduler(budget=4, max_num_seqs=3)
    for name in "AB":
        sched.add(request(name, 1))
    step(sched)
    sched.add(request("C", 10))
    chunks = [step(sched)[0]["C"] for _ in range(6)]
    assert chunks == [2, 2, 2, 2, 2, 1]  # the first token comes with the last chunk, and is computed in the next step
    assert len(sched.running[2].sampling.output_token_ids) == 2


def test_sch_7_chunks_of_a_prompt_alone_fill_the_budget():
    sched = scheduler(budget=4)
    sched.add(request("A", 10))
    tokens = []
    for _ in range(4):
        step(sched)
        tokens.append(len(sched.running[0].sampling.output_token_ids))
    assert tokens == [0, 0, 1, 2]


@pytest.mark.parametrize(("prompt_len", "first"), [(4, [{"A": 4}, {"A": 1}]), (5, [{"A": 4}, {"A": 1}])])
def test_sch_7_a_prompt_as_long_as_the_budget_and_one_longer(prompt_len, first):
    sched = scheduler(budget=4)
    sched.add(request("A", prompt_len))
    assert [step(sched)[0] for _ in range(2)] == first
    assert len(sched.running[0].sampling.output_token_ids) == (2 if prompt_len == 4 else 1)


def test_sch_7_a_third_request_waits_while_two_may_run_and_follows_at_once():
    sched = scheduler(max_num_seqs=2)
    for name in "ABC":
        sched.add(request(name, 3, max_tokens=2))
    assert [step(sched)[0] for _ in range(3)] == [{"A": 3, "B": 3}, {"A": 1, "B": 1}, {"C": 3}]


def test_first_come_first_served_even_if_a_later_one_would_fit():
    sched = scheduler(num_blocks=4)
    sched.add(request("A", 8, max_tokens=3))
    sched.add(request("B", 12, max_tokens=2))
    sched.add(request("C", 1, max_tokens=2))
    order = [step(sched)[0] for _ in range(4)]
    assert order == [{"A": 8}, {"A": 1}, {"A": 1}, {"B": 12, "C": 1}]


def test_sch_6_victims_are_the_newest_and_wait_in_their_order_before_all_others():
    sched = scheduler(num_blocks=6, max_num_seqs=3)
    for name, prompt_len in (("A", 8), ("B", 8), ("C", 8)):
        sched.add(request(name, prompt_len))
    sched.add(request("D", 4))
    assert step(sched) == ({"A": 8, "B": 8, "C": 8}, [])
    # Each needs a third block, and none is free: C gives two to A and B.
    assert step(sched) == ({"A": 1, "B": 1}, ["C"])
    assert [r.request_id for r in sched.waiting] == ["C", "D"]
    for _ in range(3):
        assert step(sched) == ({"A": 1, "B": 1}, [])
    # Both need a fourth: B gives way, and goes before C.
    assert step(sched) == ({"A": 1}, ["B"])
    assert [r.request_id for r in sched.waiting] == ["B", "C", "D"]


def test_sch_6_two_preemptions_in_one_step():
    sched = scheduler(num_blocks=6, max_num_seqs=4, budget=64)
    for name, prompt_len in (("A", 8), ("B", 8), ("C", 8)):
        sched.add(request(name, prompt_len))
    step(sched)
    sched.add(request("D", 4))
    long = sched.running[0]
    long.sampling.output_token_ids += [7] * 9  # as if several tokens had been accepted at once: A needs three blocks
    scheduled, preempted = step(sched)
    assert (scheduled, preempted) == ({"A": 10}, ["C", "B"])
    assert [r.request_id for r in sched.waiting] == ["B", "C", "D"]


def test_nobody_is_admitted_in_a_step_that_has_preempted():
    sched = scheduler(num_blocks=4, max_num_seqs=3)
    sched.add(request("A", 8))
    sched.add(request("B", 8))
    step(sched)
    sched.add(request("C", 1))
    assert step(sched) == ({"A": 1}, ["B"])
    assert [r.request_id for r in sched.waiting] == ["B", "C"]


def test_a_preempted_request_computes_prompt_and_output_again_and_goes_on():
    sched = scheduler(num_blocks=4)
    sched.add(request("A", 8, max_tokens=4))
    sched.add(request("B", 8, max_tokens=4))
    step(sched)
    victim = sched.running[1]
    assert step(sched)[1] == ["B"]
    assert (victim.status, victim.num_computed_tokens, victim.num_preemptions) == (RequestStatus.WAITING, 0, 1)
    assert len(victim.sampling.output_token_ids) == 1  # the token that it had stays
    steps = []
    while sched.has_unfinished_requests():
        steps.append(step(sched)[0])
    assert {"B": 9} in steps
    assert len(victim.sampling.output_token_ids) == 4


def test_a_request_is_admitted_only_if_all_its_known_tokens_would_fit():
    sched = scheduler(num_blocks=6, budget=8)
    sched.add(request("A", 8, max_tokens=3))
    sched.add(request("B", 20, max_tokens=2))  # its first chunk would fit beside A
    assert [step(sched)[0] for _ in range(3)] == [{"A": 8}, {"A": 1}, {"A": 1}]
    assert step(sched)[0] == {"B": 8}


def test_an_end_token_and_the_length_end_a_request_and_free_its_blocks():
    for token_id, num_steps, finish in ((2, 1, ("stop", None)), (7, 3, ("length", None))):
        sched = scheduler()
        sched.add(request("A", 5, max_tokens=3))
        ended = sched.waiting[0]
        for _ in range(num_steps):
            step(sched, token_id)
        assert (ended.finish, ended.status) == (finish, RequestStatus.FINISHED)
        assert not sched.has_unfinished_requests()
        assert sched.block_manager.num_free_blocks == 100


def test_sch_11_an_empty_scheduler_gives_an_empty_step():
    output = scheduler().schedule()
    assert (output.requests, output.num_scheduled_tokens, output.block_tables, output.preempted) == ([], [], [], [])


def test_finishing_an_id_that_is_not_here_is_no_error():
    sched = scheduler()
    sched.add(request("A", 5))
    sched.finish_requests(["never", "A", "A"])
    assert not sched.has_unfinished_requests()


@pytest.mark.parametrize(
    ("start", "end", "ids"), [(0, 3, [10, 11, 12]), (1, 5, [11, 12, 20, 21]), (3, 5, [20, 21]), (4, 5, [21])]
)
def test_a_requests_tokens_are_prompt_and_output_in_one_row(start, end, ids):
    state = SamplingState.create(SamplingParams(), [10, 11, 12], (2,), seed=0)
    state.output_token_ids += [20, 21, 22]
    assert Request("A", state).token_ids(start, end) == ids


def test_a_request_has_the_tokens_of_its_prompt_and_of_its_output():
    each = request("A", 3)
    assert (each.num_prompt_tokens, each.num_tokens) == (3, 3)
    each.sampling.output_token_ids += [7, 7]
    assert (each.num_prompt_tokens, each.num_tokens) == (3, 5)


def test_the_seven_core_files_stay_under_500_lines_of_code():
    names = ("llm", "kv_cache", "block_manager", "request", "scheduler", "model_runner", "engine")
    assert sum(num_code_lines((ROOT / "v0_3_scheduler" / f"{name}.py").read_text()) for name in names) < 500


def test_step_is_about_five_statements():
    import ast

    tree = ast.parse((ROOT / "v0_3_scheduler" / "engine.py").read_text())
    [function] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "step"]
    assert len(function.body) - 1 <= 5  # less the docstring


def test_after_a_failed_step_everybody_waits_again_in_the_order_of_arrival():
    sched = scheduler(max_num_seqs=2)
    for name in "ABC":
        sched.add(request(name, 5))
    sched.schedule()
    assert [r.request_id for r in sched.running] == ["A", "B"]
    sched.restart([*sched.running, *sched.waiting])
    assert [r.request_id for r in sched.waiting] == ["A", "B", "C"]
    assert sched.running == []
    sched.check_integrity()
    assert sched.block_manager.num_free_blocks == 100
