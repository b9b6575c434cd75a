"""The policy: which requests compute how many tokens in the next step. First come, first served; no torch, no text.

One token budget and no phases. A request that runs gets what is left of it, as far as the budget goes: a decode is the
case where one token is left, a long prompt is cut into chunks by the same rule.

    waiting  [ C, D, E ]  --admit-->  running  [ A, B ]  --finish-->  gone
                 ^                                  |
                 +------------- preempt ------------+     the newest one gives its blocks back and computes again

Both queues are in the order of arrival, and every running request has arrived before every waiting one: a victim is
always the newest, goes to the head of the queue, and comes back before any other.

A request whose first tokens are in the prefix cache begins behind them, and takes only the rest from the budget. What a
step computes is found from the next step on: of two requests that begin alike in one step, both compute. A prompt that
is computed in chunks looks again before each of them. The choices of one request (`n > 1`) are one in the queue: the
first computes the prompt, and then its forks run with the same blocks.

What a step has left, of its budget and of the pool, goes to drafts: a request that decodes may compute some guessed
tokens behind its known one. Whatever the model would not have drawn is taken back.
"""

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .block_manager import BlockManager
from .events import RequestAdmitted, RequestForked, RequestPreempted
from .request import Request, RequestStatus

ENOUGH_DRAFTS = 32  # to know how often they are right


class Refusal(enum.StrEnum):
    """Why the request at the head of the queue was not admitted in a step."""

    SEATS = "max_num_seqs"  # as many run as may
    BLOCKS = "blocks"  # its known tokens don't fit into the free blocks
    BUDGET = "token_budget"  # the running ones take all of it
    PREEMPTION = "preemption"  # one has just lost its blocks: there are none for others


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: `requests[i]` computes `num_scheduled_tokens[i]` tokens, and finds its KV in `block_tables[i]`.

    `forks[i]` are sampled from its last token, too. `blocks_to_copy` are pairs of blocks, from and to, for before
    anything is written. `num_cached_tokens` says of the requests that have looked in the prefix cache in this step, by
    their ids, how many of their tokens it had. The last `num_draft_tokens[i]` tokens of a request are drafts. After the
    step `num_accepted_tokens` says of those that had some how many were right.
    """

    requests: list[Request]
    num_scheduled_tokens: list[int]
    block_tables: list[list[int]]
    preempted: list[Request]
    forks: list[list[Request]]
    blocks_to_copy: list[tuple[int, int]]
    num_cached_tokens: dict[str, int]
    num_draft_tokens: list[int]
    num_accepted_tokens: dict[str, int] = field(default_factory=dict)
    refused: tuple[str, Refusal] | None = None  # the head of the queue, and why it was not admitted

    @property
    def requests_and_forks(self) -> list[Request]:
        """All that may get a token in this step, each request before its forks."""
        return [
            request for leader, forks in zip(self.requests, self.forks, strict=True) for request in (leader, *forks)
        ]

    def only(self, requests: Collection[Request]) -> "SchedulerOutput":
        """The same step for these of its requests alone."""
        kept = [i for i, request in enumerate(self.requests) if request in requests]
        return SchedulerOutput(
            [self.requests[i] for i in kept],
            [self.num_scheduled_tokens[i] for i in kept],
            [self.block_tables[i] for i in kept],
            self.preempted,
            [self.forks[i] for i in kept],
            # Once more does harm to another's: he may have written into his copy meanwhile.
            [copy for copy in self.blocks_to_copy if any(copy[1] in self.block_tables[i] for i in kept)],
            self.num_cached_tokens,
            [self.num_draft_tokens[i] for i in kept],
            refused=self.refused,
        )


def no_drafts(request: Request, most: int) -> int:
    """What a scheduler without a drafter asks."""
    return 0


class Scheduler:
    """Decides, and keeps the block manager true to its decisions.

    Args:
        block_manager: hands out the blocks.
        max_num_batched_tokens: the token budget of a step.
        max_num_seqs: how many requests may run at once.
        max_request_len: prompt plus output of the longest request there can be; it alone fits into the pool.
        num_speculative_tokens: most drafts of a request in a step.
        count_drafts: the drafter's: how many it has for a request, if it may have so many.
        disable_below: a request of whose drafts a smaller share is right gets no more.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_request_len: int,
        num_speculative_tokens: int = 0,
        count_drafts: Callable[[Request, int], int] = no_drafts,
        disable_below: float = 0.0,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.max_request_len = max_request_len
        self.num_speculative_tokens, self.count_drafts = num_speculative_tokens, count_drafts
        self.disable_below = disable_below
        self.events = block_manager.events
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def has_unfinished_requests(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_seats(self) -> int:
        """Requests that run, and those that will run with them once their common prompt is computed."""
        return sum(1 + len(request.forks) for request in self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait; of one with forks each counts. May be asked for from another thread."""
        return sum(1 + len(request.forks) for request in list(self.waiting))

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, and take the blocks it needs. Without requests the step is empty."""
        requests: list[Request] = []
        num_scheduled_tokens: list[int] = []
        preempted: list[Request] = []
        blocks_to_copy: list[tuple[int, int]] = []
        num_cached_tokens: dict[str, int] = {}
        budget = self.max_num_batched_tokens

        # 1. Running requests, oldest first. Victims are taken from the other end, so none has been scheduled yet.
        while len(requests) < len(self.running) and budget > 0:
            request = self.running[len(requests)]
            if request.num_tokens - request.num_computed_tokens > 1:
                self._catch_up(request, num_cached_tokens)
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self.block_manager.can_append(request.request_id, num_tokens):
                preempted.append(self._preempt_newest(request))
                if preempted[-1] is request:
                    break
            else:
                copy = self.block_manager.append(request.request_id, num_tokens)
                blocks_to_copy += [copy] if copy is not None else []
                requests.append(request)
                num_scheduled_tokens.append(num_tokens)
                budget -= num_tokens

        # 2. Waiting requests, in their order, unless blocks are so short that somebody has just lost his: he stands at
        # the head, and has just been found not to fit. One is admitted only if all its known tokens would fit now,
        # though it takes the blocks of its first chunk alone: half-admitted prompts would only preempt each other.
        refusal = Refusal.PREEMPTION if preempted else Refusal.BUDGET
        while self.waiting and not preempted and budget > 0:
            request, salt = self.waiting[0], self.waiting[0].cache_salt
            if self.num_seats + 1 + len(request.forks) > self.max_num_seqs:
                refusal = Refusal.SEATS
                break
            prefix = self.block_manager.find_prefix(request.token_ids, request.num_reusable_tokens, salt)
            if not self.block_manager.can_allocate(request.num_tokens, prefix):
                refusal = Refusal.BLOCKS
                break
            num_cached = len(prefix) * self.block_manager.block_size
            num_tokens = min(request.num_tokens - num_cached, budget)
            self.events.emit(RequestAdmitted, request.request_id, num_cached)
            self.block_manager.allocate(request.request_id, num_cached + num_tokens, prefix, salt)
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, num_cached
            num_cached_tokens[request.request_id] = num_cached
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached
            self.running.append(self.waiting.popleft())
            requests.append(request)
            num_scheduled_tokens.append(num_tokens)
            budget -= num_tokens

        # 3. Drafts, from what is left: nobody waits for a block, or for his turn, because another one guesses.
        num_draft_tokens = [0] * len(requests)
        for i, request in enumerate(requests):
            num_drafts = self._num_drafts(request, num_scheduled_tokens[i], budget)
            if num_drafts > 0:
                self.block_manager.append(request.request_id, num_drafts)
                num_draft_tokens[i] = num_drafts
                num_scheduled_tokens[i] += num_drafts
                budget -= num_drafts

        assert requests or not self.has_unfinished_requests(), "a step without progress"
        block_tables = [self.block_manager.block_table(request.request_id) for request in requests]
        forks = [
            request.forks if request.num_computed_tokens + num_tokens == request.num_tokens else []
            for request, num_tokens in zip(requests, num_scheduled_tokens, strict=True)
        ]
        return SchedulerOutput(
            requests,
            num_scheduled_tokens,
            block_tables,
            preempted,
            forks,
            blocks_to_copy,
            num_cached_tokens,
            num_draft_tokens,
            refused=(self.waiting[0].request_id, refusal) if self.waiting else None,
        )

    def update(self, scheduled: SchedulerOutput, sampled: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Take in what a step has computed, and end the requests that its tokens end.

        Args:
            scheduled: the step.
            sampled: the new tokens of every request whose known tokens are all computed: accepted drafts, and one more.

        Returns:
            How many of them each request has taken in: nothing comes after its end.
        """
        taken = {
            request.request_id: self._take_in(request, sampled[request.request_id])
            for request in scheduled.requests_and_forks
            if request.request_id in sampled
        }
        steps = zip(scheduled.requests, scheduled.num_scheduled_tokens, scheduled.num_draft_tokens, strict=True)
        for request, num_tokens, num_drafts in steps:
            num_rejected = 0
            if num_drafts:
                # One that ends the request is right, too, and is kept, though no other token follows it.
                num_accepted = min(taken[request.request_id], len(sampled[request.request_id]) - 1)
                num_rejected = num_drafts - num_accepted
                scheduled.num_accepted_tokens[request.request_id] = num_accepted
                request.num_draft_tokens += num_drafts
                request.num_accepted_tokens += num_accepted
                self.block_manager.shrink(request.request_id, num_rejected)
            request.num_computed_tokens += num_tokens - num_rejected
            self.block_manager.publish(request.request_id, request.token_ids)
        for request, forks in zip(scheduled.requests, scheduled.forks, strict=True):
            if forks:
                self._fork(request, forks)
        ended = [request.request_id for request in scheduled.requests_and_forks if request.finish is not None]
        self.finish_requests(ended)
        return taken

    def restart(self, requests: Iterable[Request]) -> None:
        """Let all of these wait, in order, to compute again, and know no others: a verb was cut short at any line."""
        self.block_manager.reclaim()
        self.running, self.waiting = [], deque(requests)
        for request in self.waiting:
            request.num_preemptions += request.num_computed_tokens > 0
            request.status, request.num_computed_tokens, request.forks = RequestStatus.WAITING, 0, []

    def finish_requests(self, request_ids: Iterable[str]) -> None:
        """End requests wherever they are, and take their blocks back; an id that is not here is no error."""
        for request_id in request_ids:
            for queue in (self.running, self.waiting):
                request = next((request for request in queue if request.request_id == request_id), None)
                if request is not None:
                    queue.remove(request)
                    request.status = RequestStatus.FINISHED
                    if queue is self.running:
                        self.block_manager.free(request_id)

    def check_integrity(self) -> None:
        """Raise an `AssertionError` unless what must hold between two steps does."""
        self.block_manager.check_integrity()
        assert self.num_seats <= self.max_num_seqs, "more requests run than may"
        owned = {block for r in self.running for block in self.block_manager.block_table(r.request_id)}
        num_owned = self.block_manager.num_blocks - self.block_manager.num_free_blocks
        assert len(owned) == num_owned, "blocks of nobody who runs"
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            assert self.block_manager.num_tokens(request.request_id) == request.num_computed_tokens
            assert request.num_computed_tokens < request.num_tokens, "a request without work runs"
        for request in self.waiting:
            assert (request.status, request.num_computed_tokens) == (RequestStatus.WAITING, 0)

    def _num_drafts(self, request: Request, num_tokens: int, budget: int) -> int:
        """How many drafts a request gets behind the tokens that it computes in this step."""
        state = request.sampling
        is_decode = num_tokens == 1 and request.num_computed_tokens + 1 == request.num_tokens and state.output_token_ids
        if not is_decode or self._is_disabled(request):
            return 0
        # One token follows the last accepted draft. So many may be written, and so many fit.
        num_left = self.max_request_len - request.num_tokens
        if state.params.max_tokens is not None:
            num_left = min(num_left, state.params.max_tokens - len(state.output_token_ids))
        room = self.block_manager.num_room(request.request_id)
        most = min(self.num_speculative_tokens, num_left - 1, budget, room)
        return self.count_drafts(request, most) if most > 0 else 0

    def _is_disabled(self, request: Request) -> bool:
        num_drafts, num_accepted = request.num_draft_tokens, request.num_accepted_tokens
        return num_drafts >= ENOUGH_DRAFTS and num_accepted < self.disable_below * num_drafts

    def _take_in(self, request: Request, token_ids: Sequence[int]) -> int:
        """Append tokens up to the one that ends the request, if one does; returns how many."""
        for num_taken, token_id in enumerate(token_ids, 1):
            request.sampling.output_token_ids.append(token_id)
            request.finish = request.sampling.finish_reason(self.max_request_len)
            if request.finish is not None:
                return num_taken
        return len(token_ids)

    def _catch_up(self, request: Request, num_cached_tokens: dict[str, int]) -> None:
        """Let a prompt in chunks go on behind what others have computed of it since its last chunk."""
        num_tokens = self.block_manager.catch_up(request.request_id, request.token_ids, request.num_reusable_tokens)
        if num_tokens > request.num_computed_tokens:
            num_cached_tokens[request.request_id] = num_tokens - request.num_computed_tokens
            if request.num_preemptions == 0:
                request.num_cached_tokens += num_tokens - request.num_computed_tokens
            request.num_computed_tokens = num_tokens

    def _fork(self, leader: Request, forks: list[Request]) -> None:
        """Run the requests that have waited for a leader's prompt, next to it: all of them came when it did."""
        for fork in forks:
            self.block_manager.fork(leader.request_id, fork.request_id)
            fork.status, fork.num_computed_tokens = RequestStatus.RUNNING, leader.num_computed_tokens
            self.events.emit(RequestForked, fork.request_id, leader.request_id)
        after = self.running.index(leader) + 1
        self.running[after:after] = forks
        leader.forks = []

    def _preempt_newest(self, for_request: Request) -> Request:
        """The newest running request gives its blocks back, and waits at the head of the queue to compute again."""
        victim = self.running.pop()
        num_blocks = len(self.block_manager.block_table(victim.request_id))
        num_tokens = victim.num_computed_tokens
        self.events.emit(RequestPreempted, victim.request_id, for_request.request_id, num_blocks, num_tokens)
        self.block_manager.free(victim.request_id)
        victim.status, victim.num_computed_tokens = RequestStatus.WAITING, 0
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)
        return victim
