"""What has happened in a step of files that don't tell: found by comparing what was before with what is after.

Block tables, the published blocks and the requests are looked at three times: before a step is scheduled, after it, and
after the update. A table that has changed was cut where the two differ first, and grew again from there.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from .policy import Policy
from .scenario import Script, Settings
from .tellers import Teller


class ComparingTeller(Teller):
    """For files without events."""

    def __init__(self, policy: Policy, settings: Settings, blocks: Any, max_model_len: int) -> None:
        super().__init__(policy, settings, blocks, max_model_len)
        self.tables: dict[str, list[int]] = {}
        self.owners: Counter[int] = Counter()
        self.cached: set[int] = set()
        self.before: dict[str, tuple[bool, int]] = {}  # by request id: whether it ran, and its computed tokens
        self.made_room: dict[str, str] = {}  # who lost its blocks, and who had asked for room just before
        self.asked: str | None = None
        self.refused: tuple[str | None, str | None] = None, None
        self.arrivals: dict[str, float] = {}
        self._listen("can_append", lambda request_id: setattr(self, "asked", request_id))
        self._listen("free", lambda request_id: self.made_room.setdefault(request_id, self.asked or request_id))

    def _listen(self, verb: str, then: Any) -> None:
        """Have `then` called with the request whenever the block manager is told this."""
        original = getattr(self.blocks, verb)

        def heard(request_id: str, *args: Any, **kwargs: Any) -> Any:
            then(request_id)
            return original(request_id, *args, **kwargs)

        setattr(self.blocks, verb, heard)

    def queued(self, request: Any, script: Script, choice: int, clock: float) -> None:
        """A request has come."""
        super().queued(request, script, choice, clock)
        self.arrivals[request.request_id] = script.arrival

    def begin(self, scheduler: Any) -> None:
        """Remember who runs, and how far each has come."""
        self.asked, self.made_room = None, {}
        self.before = {request.request_id: (True, request.num_computed_tokens) for request in scheduler.running}

    def scheduled(self, scheduler: Any, output: Any, clock: float) -> None:
        """Who was preempted and admitted, and which blocks have changed hands."""
        published = self._published()
        for request in output.preempted:
            request_id, table = request.request_id, self.tables.get(request.request_id, [])
            _, num_computed = self.before.get(request_id, (False, 0))
            self._tell(
                "request_preempted",
                clock,
                request_id=request_id,
                for_request_id=self.made_room.get(request_id, request_id),
                num_blocks=len(table),
                num_tokens=num_computed,
            )
            self._move(request_id, [], published, clock)
        copies = {target: source for source, target in getattr(output, "blocks_to_copy", [])}
        found = getattr(output, "num_cached_tokens", {})
        lost = {request.request_id for request in output.preempted}
        for request, table in zip(output.requests, output.block_tables, strict=True):
            request_id = request.request_id
            is_new = request_id not in self.before or request_id in lost
            self._move(request_id, table, published, clock)
            if is_new:
                self._tell("request_admitted", clock, request_id=request_id, num_cached_tokens=found.get(request_id, 0))
            for target in filter(copies.__contains__, table):
                source = copies.pop(target)
                self._tell("block_copied", clock, source=source, target=target, request_id=request_id)
        self.cached = published
        self.refused = self._refusal(scheduler, output)

    def updated(
        self, scheduler: Any, output: Any, taken: Mapping[str, int], number: int, clock: float, seconds: float
    ) -> None:
        """What the requests have computed and written, and the blocks that were given back."""
        published = self._published()
        for block in sorted(published - self.cached):
            self._tell("block_cached", clock, block=block)
        self.cached = published
        everybody = self._everybody(output)
        runs = {request.request_id for request in scheduler.running}
        for leader, forks in zip(output.requests, getattr(output, "forks", [[]] * len(output.requests)), strict=True):
            for fork in forks:
                if fork.request_id in taken:
                    table = self._table(fork.request_id) or self.tables.get(leader.request_id, [])
                    self._move(fork.request_id, table, set(table), clock)
                    self._tell("request_forked", clock, request_id=fork.request_id, from_request_id=leader.request_id)
        for request in everybody:
            table = self._table(request.request_id) if request.request_id in runs else []
            self._move(request.request_id, table, published, clock)
        self._tell_step(scheduler, output, taken, number, clock, seconds)

    def _tell_step(
        self, scheduler: Any, output: Any, taken: Mapping[str, int], number: int, clock: float, seconds: float
    ) -> None:
        """As v0.8's `step_events.py` does it."""
        drafts = getattr(output, "num_draft_tokens", [0] * len(output.requests))
        rows = []
        for request, num_tokens, num_drafts in zip(output.requests, output.num_scheduled_tokens, drafts, strict=True):
            request_id = request.request_id
            num_outputs = len(request.sampling.output_token_ids) - taken.get(request_id, 0)
            is_decode = num_tokens - num_drafts == 1 and num_outputs > 0 and request_id in taken
            rows.append(
                {
                    "request_id": request_id,
                    "num_tokens": num_tokens,
                    "is_decode": is_decode,
                    "num_draft_tokens": num_drafts,
                }
            )
            if num_drafts:
                num_accepted = output.num_accepted_tokens.get(request_id, 0)
                self._tell(
                    "speculative_round",
                    clock,
                    request_id=request_id,
                    num_draft_tokens=num_drafts,
                    num_accepted_tokens=num_accepted,
                    num_rolled_back=num_drafts - num_accepted,
                )
            if not is_decode:
                self._tell(
                    "prefill_chunk",
                    clock,
                    request_id=request_id,
                    num_new_tokens=num_tokens,
                    num_computed_tokens=request.num_computed_tokens,
                    num_tokens=request.num_tokens - taken.get(request_id, 0),
                    num_cached_tokens=getattr(output, "num_cached_tokens", {}).get(request_id, 0),
                )
        for request in self._everybody(output):
            self._tell_tokens(request, taken.get(request.request_id, 0), clock)
        refused, reason = self.refused
        self._tell(
            "step",
            clock,
            number=number,
            token_budget=scheduler.max_num_batched_tokens,
            scheduled=rows,
            preempted=[request.request_id for request in output.preempted],
            refused=refused,
            refused_reason=reason,
            num_running=len(scheduler.running),
            num_waiting=sum(1 + len(getattr(request, "forks", ())) for request in scheduler.waiting),
            num_free_blocks=self.blocks.num_free_blocks,
            schedule_seconds=0.0,
            run_seconds=seconds,
            update_seconds=0.0,
            output_seconds=0.0,
        )

    def _tell_tokens(self, request: Any, num_tokens: int, clock: float) -> None:
        request_id = request.request_id
        tokens, text = self._text(request, num_tokens)
        if tokens and len(tokens) == len(request.sampling.output_token_ids):
            seconds = round(clock - self.arrivals[request_id], 6)
            self._tell("first_token", clock, request_id=request_id, token_ids=tokens, text=text, seconds=seconds)
        elif tokens:
            self._tell("decode", clock, request_id=request_id, token_ids=tokens, text=text)
        if tokens and request.finish is not None:
            reason, stop_reason = request.finish
            self._tell("request_finished", clock, request_id=request_id, reason=reason, stop_reason=stop_reason)

    def _everybody(self, output: Any) -> Sequence[Any]:
        return getattr(output, "requests_and_forks", output.requests)

    def _published(self) -> set[int]:
        return set(getattr(self.blocks, "_published", {}).values())

    def _table(self, request_id: str) -> list[int]:
        try:
            return self.blocks.block_table(request_id)
        except ValueError:  # it has none
            return []

    def _move(self, request_id: str, table: Sequence[int], published: set[int], clock: float) -> None:
        """Tell how a request's table has become another one: it was cut where the two differ first, and grew again."""
        before = self.tables.get(request_id, [])
        if before == table:
            return
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, table, strict=False))))
        for block in reversed(before[same:]):
            self.owners[block] -= 1
            self._tell("block_freed", clock, block=block, request_id=request_id, ref_count=self.owners[block])
        for block in table[same:]:
            self.owners[block] += 1
            if block in published:
                num_owners = self.owners[block]
                self._tell("block_shared", clock, block=block, request_id=request_id, ref_count=num_owners)
                continue
            if block in self.cached:
                self._tell("block_evicted", clock, block=block)
                self.cached.discard(block)
            self._tell("block_allocated", clock, block=block, request_id=request_id)
        self.tables[request_id] = list(table)

    def _refusal(self, scheduler: Any, output: Any) -> tuple[str | None, str | None]:
        """Who stands at the head of the queue, and why: in the order in which the scheduler asks."""
        if not scheduler.waiting:
            return None, None
        head = scheduler.waiting[0]
        num_drafts = sum(getattr(output, "num_draft_tokens", []))
        num_seats = getattr(scheduler, "num_seats", len(scheduler.running)) + len(getattr(head, "forks", ()))
        if output.preempted:
            reason = "preemption"
        elif sum(output.num_scheduled_tokens) - num_drafts >= scheduler.max_num_batched_tokens:
            reason = "token_budget"
        elif num_seats >= scheduler.max_num_seqs:
            reason = "max_num_seqs"
        else:
            reason = "blocks"
        return head.request_id, reason
