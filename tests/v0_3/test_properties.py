"""Scheduler and block manager under random arrivals, lengths and aborts, in tight pools: nothing is ever lost or stuck.

Hypothesis drives them through some thousands of steps, the same ones each time. After every step every invariant of the
architecture is checked, and at the end every request must have ended with exactly the tokens it was due.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from common.sampling_params import SamplingParams, SamplingState
from v0_3_scheduler.block_manager import BlockManager
from v0_3_scheduler.request import Request, RequestStatus
from v0_3_scheduler.scheduler import Scheduler

TOKEN, EOS = 7, 2
NUM_PREEMPTED = [0]  # over all runs: the test has to have seen some


class AnyArrivals(RuleBasedStateMachine):
    """Requests come and go; `step` is the engine's, with a model that writes one token for ever."""

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.sampled_from([1, 3, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
    )
    def start(self, num_blocks, block_size, max_num_seqs, extra_budget):
        self.capacity = num_blocks * block_size
        self.sched = Scheduler(
            BlockManager(num_blocks, block_size),
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_num_seqs=max_num_seqs,
            max_request_len=self.capacity + 1,
        )
        self.arrived: list[Request] = []
        self.aborted: set[str] = set()

    @rule(prompt_len=st.integers(1, 30), max_tokens=st.integers(1, 20))
    def arrive(self, prompt_len, max_tokens):
        # What can never fit is refused before it gets here (`check_request`).
        prompt_len = min(prompt_len, self.capacity)
        max_tokens = min(max_tokens, self.capacity + 1 - prompt_len)
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(str(len(self.arrived)), SamplingState.create(params, [1] * prompt_len, (EOS,), seed=0))
        self.arrived.append(request)
        self.sched.add(request)

    @rule(choice=st.integers(0, 1000))
    def abort(self, choice):
        if self.arrived:
            request = self.arrived[choice % len(self.arrived)]
            if request.status is not RequestStatus.FINISHED:
                self.aborted.add(request.request_id)
            self.sched.finish_requests([request.request_id])  # harmless for one that has ended

    @rule(num_steps=st.integers(1, 5), ends=st.booleans())
    def run(self, num_steps, ends):
        for number in range(num_steps):
            self.step(EOS if ends and number == num_steps - 1 else TOKEN)

    def step(self, token_id=TOKEN):
        before = {r.request_id: (r.num_computed_tokens, len(r.sampling.output_token_ids)) for r in self.arrived}
        output = self.sched.schedule()
        assert sum(output.num_scheduled_tokens) <= self.sched.max_num_batched_tokens
        assert all(num >= 1 for num in output.num_scheduled_tokens)
        ids = [r.request_id for r in output.requests]
        preempted = [r.request_id for r in output.preempted]
        assert len(set(ids)) == len(ids)
        assert not set(ids) & set(preempted)
        NUM_PREEMPTED[0] += len(preempted)
        # Progress: whenever anybody is here, somebody computes.
        assert ids or not self.sched.has_unfinished_requests()
        sampled = {}
        for request, num, table in zip(output.requests, output.num_scheduled_tokens, output.block_tables, strict=True):
            end = request.num_computed_tokens + num
            assert end <= request.num_tokens, "a token is computed before it is known"
            assert len(table) == self.sched.block_manager.num_blocks_for(end)
            if end == request.num_tokens:
                sampled[request.request_id] = token_id
        self.sched.update(output, sampled)
        for request in self.arrived:
            num_output = len(request.sampling.output_token_ids)
            assert num_output == before[request.request_id][1] + (request.request_id in sampled)

    @invariant()
    def everything_has_its_place(self):
        if not hasattr(self, "sched"):
            return
        self.sched.check_integrity()
        by_status = {status: [r for r in self.arrived if r.status is status] for status in RequestStatus}
        # First come, first served: everybody who runs came before everybody who waits, both in order of arrival.
        assert [*self.sched.running, *self.sched.waiting] == [
            r for r in self.arrived if r.status is not RequestStatus.FINISHED
        ]
        assert self.sched.running == by_status[RequestStatus.RUNNING]
        for request in by_status[RequestStatus.FINISHED]:
            if request.request_id not in self.aborted:
                tokens = request.sampling.output_token_ids
                assert tokens[-1] == EOS or len(tokens) == request.sampling.params.max_tokens

    def teardown(self):
        if not hasattr(self, "sched"):
            return
        # Nobody waits for ever: each step computes at least one token, and what is computed twice is bounded.
        for _ in range(5000):
            if not self.sched.has_unfinished_requests():
                break
            self.step()
            self.everything_has_its_place()
        assert not self.sched.has_unfinished_requests()
        assert self.sched.block_manager.num_free_blocks == self.sched.block_manager.num_blocks


def test_any_arrivals_lengths_and_aborts_keep_every_invariant_and_every_request_ends():
    NUM_PREEMPTED[0] = 0
    run_state_machine_as_test(
        AnyArrivals,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert NUM_PREEMPTED[0] > 0  # how many depends on the version of hypothesis, which draws the examples
