"""The engine under random arrivals, prefixes, choices, drafters and aborts, in tight pools: never a wrong token.

Hypothesis drives it, the same way each time. The model is TINY; what each request is due, v0.7 says without drafts and
with all the room there is. After each step everything is where it belongs.
"""

import functools
import random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from common.sampling_params import SamplingParams
from tests.kit.drafters import Counts, options, speculate
from v0_7_speculative import LLM, LLMEngine

LONGEST = 14  # output tokens
PREFIXES = [[(7 * i + i * i) % 256 for i in range(9)], [3, 5, 9, 3, 5, 3, 9, 5, 3]]
FEW = dict.fromkeys((3, 5, 9), 100.0)
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logit_bias": FEW},
    {"temperature": 0.9, "logit_bias": FEW, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.8, "top_p": 0.9},
]


@pytest.fixture
def machine(tiny):
    """The class of a run; its counts are of all runs together."""
    plain = LLM(**tiny.ready, num_blocks=100)

    @functools.cache
    def answer(prompt, sampling, seed):
        params = SamplingParams(**SAMPLINGS[sampling], seed=seed, max_tokens=LONGEST, ignore_eos=True)
        [output] = plain.generate([list(prompt)], params, use_tqdm=False)
        return output.outputs[0].token_ids

    class AnyArrivals(RuleBasedStateMachine):
        seen: ClassVar = {"right": 0, "wrong": 0, "preempted": 0, "cached": 0, "aborted": 0}

        @initialize(
            method=st.sampled_from(["ngram", "early_exit", "draft_model", "any guess"]),
            num_tokens=st.integers(1, 6),
            block_size=st.sampled_from([2, 3, 4, 8]),
            num_slots=st.integers(24, 60),
            max_num_seqs=st.integers(3, 6),
            extra_budget=st.integers(0, 20),
            caching=st.booleans(),
            below=st.sampled_from([0.0, 0.0, 0.4]),
        )
        def start(self, method, num_tokens, block_size, num_slots, max_num_seqs, extra_budget, caching, below):
            self.engine = LLMEngine(
                **tiny.ready,
                num_blocks=num_slots // block_size,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + extra_budget,
                enable_prefix_caching=caching,
                speculative_disable_below=below,
                **({} if method == "any guess" else options(method, tiny, num_tokens)),
            )
            if method == "any guess":
                coin = random.Random(num_tokens)

                def guess(request, index):
                    due = self.due[request.request_id]
                    return due[index] if coin.random() < 0.7 and index < len(due) else coin.randrange(256)

                speculate(self.engine, guess, num_tokens)
            self.counts = Counts(self.engine)
            self.due, self.came, self.limit = {}, {}, {}

        @rule(
            prefix=st.integers(0, 1),
            prompt_len=st.integers(1, 9),
            rest=st.lists(st.integers(0, 5), max_size=3),
            sampling=st.integers(0, 3),
            seed=st.integers(0, 2),
            max_tokens=st.integers(1, LONGEST),
            n=st.sampled_from([1, 1, 2, 3]),
        )
        def arrive(self, prefix, prompt_len, rest, sampling, seed, max_tokens, n):
            if len(self.engine.output_processor.parents) >= 6:
                return
            prompt = [*PREFIXES[prefix][:prompt_len], *rest]
            max_tokens = min(max_tokens, self.engine.pool.num_tokens + 1 - len(prompt))
            request_id = str(len(self.limit))
            for choice in range(n):
                self.due[f"{request_id}/{choice}"] = answer(tuple(prompt), sampling, seed + choice)
                self.came[f"{request_id}/{choice}"] = []
            self.limit[request_id] = max_tokens
            params = SamplingParams(**SAMPLINGS[sampling], seed=seed, max_tokens=max_tokens, n=n, ignore_eos=True)
            self.engine.add_request(request_id, prompt, params)

        @rule(choice=st.integers(0, 1000))
        def abort(self, choice):
            running = list(self.engine.output_processor.parents)
            if running and choice % 3 == 0:
                self.engine.abort_request(running[choice % len(running)])
                self.seen["aborted"] += 1

        @rule(num_steps=st.integers(1, 4))
        def steps(self, num_steps):
            for _ in range(num_steps):
                self.step()
                self.everything_has_its_place()

        def step(self):
            for output in self.engine.step():
                for choice in output.outputs:
                    child = f"{output.request_id}/{choice.index}"
                    self.came[child] += choice.token_ids
                    due = self.due[child][: self.limit[output.request_id]]
                    assert self.came[child] == due[: len(self.came[child])], "a wrong token"
                    assert (choice.finish_reason == "length") == (len(self.came[child]) == len(due))
                if output.finished:
                    self.seen["preempted"] += output.metrics.num_preemptions
                    self.seen["cached"] += output.num_cached_tokens

        @invariant()
        def everything_has_its_place(self):
            if hasattr(self, "engine"):
                self.engine.scheduler.check_integrity()
                assert len(self.engine.scheduler.running) <= self.engine.scheduler.max_num_seqs

        def teardown(self):
            if not hasattr(self, "engine"):
                return
            for _ in range(1000):
                if not self.engine.has_unfinished_requests():
                    break
                self.step()
                self.everything_has_its_place()
            assert not self.engine.has_unfinished_requests()
            manager = self.engine.scheduler.block_manager
            assert manager.num_free_blocks == manager.num_blocks
            assert self.engine.output_processor.parents == self.engine.output_processor._children == {}
            self.seen["right"] += self.counts.num_right
            self.seen["wrong"] += self.counts.num_drafts - self.counts.num_right

    return AnyArrivals


def test_any_drafter_prefixes_choices_and_aborts_in_tight_pools_give_the_tokens_of_plain_decoding(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=20, stateful_step_count=20, suppress_health_check=list(HealthCheck)),
    )
    assert all(machine.seen.values()), machine.seen
