"""The whole engine under anything that may come: never a wrong token, never a lost, wrong or doubly owned block.

The model is `Recall`, whose every token hangs on all that it finds in the KV cache, and what it has to say is known
without an engine. Prompts share prefixes at random, digests collide, pools and budgets are tight; steps fail half-way
and are computed again, requests are aborted in the middle of their prompts, the cache is reset, and after each step all
free blocks that nothing leads to are filled with what is not a number.
"""

import contextlib
import functools
import hashlib
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from common.sampling_params import SamplingParams
from tests.kit.models import Recall, recalled
from tests.kit.tokenizers import byte_tokenizer
from v0_6_prefix_cache import LLMEngine, hash_chain
from v0_6_prefix_cache.request import RequestStatus

TOKENIZER = byte_tokenizer()
LONGEST = 14  # tokens of the longest prompt, and of the longest answer
SEEN: dict[str, int] = {}  # over all runs: what the test has to have met, or it says little


def prompt_of(turns, num):
    """A path in a tree of prompts: every third token is one of two, the others are always the same."""
    return [1 + turns[i // 3] if i % 3 == 2 else 5 for i in range(num)]


PROMPTS = st.builds(
    prompt_of, st.lists(st.integers(0, 1), min_size=LONGEST // 3, max_size=LONGEST // 3), st.integers(1, LONGEST)
)


@functools.cache
def expected(prompt, index, temperature, seed, max_tokens, stop_token_ids):
    params = sampling(temperature, seed, max_tokens, stop_token_ids)
    return recalled(prompt, params, vocab_size=TOKENIZER.vocab_size, index=index)


def sampling(temperature, seed, max_tokens, stop_token_ids, **params):
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, stop_token_ids=list(stop_token_ids), **params
    )


class AnyRequests(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 12),
        caching=st.sampled_from([True, True, True, False]),
        bits=st.sampled_from([1, 2, 256, 256]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, extra_budget, caching, bits):
        def digest(parent, content):
            whole = hashlib.sha256(parent + content).digest()
            return whole if bits == 256 else bytes([whole[0] % 2**bits])

        self.open = contextlib.ExitStack()
        self.open.enter_context(mock.patch.object(hash_chain, "digest", digest))
        self.caching = caching
        self.engine = LLMEngine(
            Recall(),
            tokenizer=TOKENIZER,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            enable_prefix_caching=caching,
        )
        self.engine.model_runner.kv_cache.kv.fill_(torch.nan)
        self.engine.on_failure = lambda request_id, error: self.failed.add(request_id)
        self.engine.on_step = self.on_step
        self.failed = set()
        self.asked = {}  # request -> prompt and parameters
        self.salts = {}
        self.got = {}  # request -> choice -> tokens
        self.ended = set()

    def on_step(self, scheduled):
        assert sum(scheduled.num_scheduled_tokens) <= self.engine.scheduler.max_num_batched_tokens
        assert all(num >= 1 for num in scheduled.num_scheduled_tokens)
        for name, num in (
            ("preempted", len(scheduled.preempted)),
            ("copied", len(scheduled.blocks_to_copy)),
            ("cached", sum(scheduled.num_cached_tokens.values())),
            ("with forks", any(scheduled.forks)),
            ("preempted forks", sum(request.request_id[-1] != "0" for request in scheduled.preempted)),
        ):
            SEEN[name] = SEEN.get(name, 0) + num

    @rule(
        prompt=PROMPTS,
        n=st.sampled_from([1, 1, 2, 3, 4]),
        temperature=st.sampled_from([0.0, 0.9]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, LONGEST),
        stop_token_ids=st.sampled_from([(), (3,), (0, 1, 2, 3, 4, 5, 6, 7)]),
        salt=st.sampled_from([None, None, None, "x"]),
        scored=st.sampled_from([False, False, True]),
    )
    def arrive(self, prompt, n, temperature, seed, max_tokens, stop_token_ids, salt, scored):
        scheduler = self.engine.scheduler
        n = min(n, scheduler.max_num_seqs)
        prompt = prompt[: self.engine.max_model_len - 1]
        max_tokens = min(max_tokens, self.engine.max_model_len - len(prompt))
        request_id = str(len(self.asked))
        self.asked[request_id] = (tuple(prompt), temperature, seed, max_tokens, stop_token_ids, n, scored)
        self.salts[request_id] = salt
        params = sampling(
            temperature, seed, max_tokens, stop_token_ids, n=n, **({"prompt_logprobs": 0} if scored else {})
        )
        self.engine.add_request(request_id, prompt, params, cache_salt=salt)

    @rule(num_steps=st.integers(1, 6))
    def run(self, num_steps):
        for _ in range(num_steps):
            self.step()

    @rule(fails_in=st.integers(0, 2))
    def run_a_step_that_fails_at_first(self, fails_in):
        if self.engine.has_unfinished_requests():
            self.engine.model.fails_in = fails_in
            self.step()

    @rule(fails_in=st.integers(0, 2), really=st.integers(0, 2))
    def run_a_step_that_raises(self, fails_in, really):
        if self.engine.has_unfinished_requests() and really == 0:
            self.engine.model.fails_in = fails_in
            on_failure, self.engine.on_failure = self.engine.on_failure, None
            with pytest.raises(RuntimeError, match="the model failed"):
                self.engine.step()
            self.engine.on_failure = on_failure

    @rule(choice=st.integers(0, 99))
    def abort(self, choice):
        alive = list(self.engine.output_processor.parents)
        if alive:
            request_id = alive[choice % len(alive)]
            self.engine.abort_request(request_id)
            self.ended.add(request_id)

    @rule(really=st.integers(0, 3))
    def reset(self, really):
        if really == 0:
            self.engine.reset_prefix_cache()

    def step(self):
        num_failed = len(self.failed)
        outputs = self.engine.step()
        assert outputs or num_failed < len(self.failed) or not self.is_stuck()
        for output in outputs:
            assert output.request_id not in self.ended | self.failed, "tokens for a request that has ended"
            prompt, temperature, seed, max_tokens, stop_token_ids, n, scored = self.asked[output.request_id]
            is_first = output.request_id not in self.got
            choices = self.got.setdefault(output.request_id, [[] for _ in range(n)])
            assert (output.prompt_logprobs is not None) == (scored and is_first)
            assert output.prompt_logprobs is None or len(output.prompt_logprobs) == len(prompt)
            for delta in output.outputs:
                whole = expected(prompt, delta.index, temperature, seed, max_tokens, stop_token_ids)
                choice = choices[delta.index]
                choice += delta.token_ids
                assert choice == whole[: len(choice)], "a wrong token"
                assert (delta.finish_reason is not None) == (len(choice) == len(whole))
            if output.finished:
                self.ended.add(output.request_id)
                for index, choice in enumerate(choices):
                    assert choice == expected(prompt, index, temperature, seed, max_tokens, stop_token_ids)
        self.poison()

    def is_stuck(self):
        """Whether nobody runs though somebody waits: a step without outputs may only be within a prompt."""
        return bool(self.engine.scheduler.waiting) and not self.engine.scheduler.running

    def poison(self):
        manager = self.engine.scheduler.block_manager
        found = set(manager._published.values())
        lost = [block for block in range(manager.num_blocks) if manager.ref_count(block) == 0 and block not in found]
        self.engine.model_runner.kv_cache.kv[:, :, lost] = torch.nan

    @invariant()
    def blocks_have_the_owners_that_they_may_have(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        manager = scheduler.block_manager
        owners = {block: [] for block in range(manager.num_blocks)}
        for request in scheduler.running:
            for index, block in enumerate(manager.block_table(request.request_id)):
                end = min((index + 1) * manager.block_size, request.num_computed_tokens)
                content = (request.cache_salt, *request.token_ids(0, end))
                owners[block].append((request, content))
        assert manager.num_free_blocks == sum(not its_owners for its_owners in owners.values())
        for block, its_owners in owners.items():
            assert manager.ref_count(block) == len(its_owners)
            # Whoever shares a block means the same by it: the same tokens, behind the same past, at the same place.
            assert len({content for _, content in its_owners}) <= 1
            if len(its_owners) > 1 and not self.caching:
                assert len({request.request_id.split("/")[0] for request, _ in its_owners}) == 1
        # All that are here, in the order of arrival: those that run, and behind them those that wait.
        here = [*scheduler.running, *scheduler.waiting]
        assert [r.request_id for r in here] == sorted(
            (r.request_id for r in here), key=lambda id_: [int(part) for part in id_.split("/")]
        )
        with_forks = [fork for request in here for fork in (request, *request.forks)]
        assert {r.request_id for r in with_forks} == self.engine.output_processor._children.keys()
        assert all(fork.status is RequestStatus.WAITING for request in here for fork in request.forks)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        with self.open:
            for _ in range(3000):
                if not self.engine.has_unfinished_requests():
                    break
                self.step()
                self.blocks_have_the_owners_that_they_may_have()
            assert self.ended | self.failed == self.asked.keys(), "a request never ended"
            manager = self.engine.scheduler.block_manager
            assert manager.num_free_blocks == manager.num_blocks
            assert self.engine.output_processor.parents == self.engine.output_processor._children == {}


def test_whatever_comes_no_token_is_wrong_and_no_block_lost_or_shared_by_those_who_must_not():
    SEEN.clear()
    run_state_machine_as_test(
        AnyRequests,
        settings=settings(max_examples=100, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )
    for name in ("preempted", "copied", "cached", "with forks", "preempted forks"):
        assert SEEN[name] > 0, name
