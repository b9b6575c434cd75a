"""What has happened in a step, as the messages that the visualizer draws (v0.8's `events.py` names them).

v0.8's files tell of it themselves, on their bus (`BusTeller`). Those of earlier milestones say nothing: there it is
found by comparing block tables, the cache and the requests before and after (`comparing.py`). Both give the same
messages for the same run, but for the order of those about blocks within a step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from .policy import Policy
from .scenario import Script, Settings

Message = dict[str, Any]


class Teller(ABC):
    """Numbers the messages, and knows what both kinds have in common.

    Args:
        policy: whose files run.
        settings: of the run.
        blocks: the block manager.
    """

    def __init__(self, policy: Policy, settings: Settings, blocks: Any, max_model_len: int) -> None:
        self.blocks = blocks
        self.scripts: dict[str, tuple[Script, int]] = {}  # by request id: the script, and which choice of it
        self.messages: list[Message] = []
        number = policy.milestone.split("_")
        does_draft = "num_speculative_tokens" in policy.sources["scheduler.py"] and settings.num_speculative_tokens > 0
        self._tell(
            "snapshot",
            0.0,
            reason="simulated",
            milestone=f"{number[0]}.{number[1]}",
            model="a script instead of a model",
            settings={
                "num_blocks": settings.num_blocks,
                "block_size": settings.block_size,
                "max_num_batched_tokens": settings.token_budget,
                "max_num_seqs": settings.max_num_seqs,
                "max_model_len": max_model_len,
                "enable_prefix_caching": bool(getattr(blocks, "enable_prefix_caching", False)),
                "speculative_method": "scripted" if does_draft else None,
                "num_speculative_tokens": settings.num_speculative_tokens if does_draft else 0,
                "allow_control": False,
            },
            pace={"paused": False, "delay": 0.0},
            step=-1,
            requests=[],
            cached_blocks=[],
        )

    def queued(self, request: Any, script: Script, choice: int, clock: float) -> None:
        """A request has come."""
        self.scripts[request.request_id] = script, choice
        shared = f", of which the first {script.num_shared} are shared" if script.num_shared else ""
        self._tell(
            "request_queued",
            clock,
            request_id=request.request_id,
            parent_id=script.name,
            num_prompt_tokens=len(script.prompt),
            max_tokens=request.sampling.params.max_tokens,
            prompt=f"a prompt of {len(script.prompt)} tokens{shared}",
        )

    @abstractmethod
    def begin(self, scheduler: Any) -> None:
        """A step is about to be scheduled."""

    @abstractmethod
    def scheduled(self, scheduler: Any, output: Any, clock: float) -> None:
        """It was, and nothing is computed yet."""

    @abstractmethod
    def updated(
        self, scheduler: Any, output: Any, taken: Mapping[str, int], number: int, clock: float, seconds: float
    ) -> None:
        """It has ended, after so many seconds."""

    def _tell(self, type: str, clock: float, **fields: Any) -> None:
        self.messages.append({"seq": len(self.messages) - 1, "type": type, "time": round(clock, 6), **fields})

    def _text(self, request: Any, num_tokens: int) -> tuple[list[int], str]:
        """A request's newest tokens, and what is shown of them: their numbers, as the script has no words."""
        tokens = list(request.sampling.output_token_ids)
        first = len(tokens) - num_tokens
        return tokens[first:], "".join(f"{position + 1} " for position in range(first, len(tokens)))


class BusTeller(Teller):
    """For files that tell of themselves: their events, at the clock's moments."""

    def __init__(self, policy: Policy, settings: Settings, blocks: Any, max_model_len: int) -> None:
        super().__init__(policy, settings, blocks, max_model_len)
        self.policy, self.bus, self.clock = policy, blocks.events, 0.0
        self.seconds = 0.0
        self.bus.subscribe(self)

    def on_events(self, events: Sequence[tuple[float, Any]]) -> None:
        """Of the bus."""
        for _, event in events:
            fields = self.policy["as_message"](event)
            if fields["type"] == "step":
                fields |= {"schedule_seconds": 0.0, "run_seconds": self.seconds}
                fields |= {"update_seconds": 0.0, "output_seconds": 0.0}
            listed = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
            self._tell(clock=self.clock, **fields | listed)

    def on_reset(self) -> None:
        """Of the bus."""

    def begin(self, scheduler: Any) -> None:
        """Nothing to note: the files tell of what changes."""

    def scheduled(self, scheduler: Any, output: Any, clock: float) -> None:
        """Tell what was decided."""
        self.clock = clock
        self.bus.flush()

    def updated(
        self, scheduler: Any, output: Any, taken: Mapping[str, int], number: int, clock: float, seconds: float
    ) -> None:
        """Tell what was computed."""
        self.clock, self.seconds = clock, seconds
        outputs = [
            self._output(request, taken[request.request_id], clock)
            for request in output.requests_and_forks
            if request.request_id in taken
        ]
        self.policy["emit_step"](self.bus, scheduler, number, output, taken, outputs, [0.0, 0.0, 0.0, 0.0])
        self.bus.flush()

    def _output(self, request: Any, num_tokens: int, clock: float) -> Any:
        from common.outputs import CompletionOutput, RequestMetrics, RequestOutput

        script, choice = self.scripts[request.request_id]
        tokens, text = self._text(request, num_tokens)
        reason, stop_reason = request.finish or (None, None)
        answer = CompletionOutput(choice, text, tokens, finish_reason=reason, stop_reason=stop_reason)
        metrics = RequestMetrics(0.0, first_token_time=round(clock - script.arrival, 6))
        return RequestOutput(script.name, None, script.prompt, [answer], reason is not None, metrics)
