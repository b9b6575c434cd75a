"""The loop around a policy: requests come, it schedules, a step takes its time, it updates, and everything is checked.

The model is missing: a step's tokens come from the requests' scripts. So does what a drafter would guess. The rules
that the engine and the model's code rely on are asked after each decision (`check_rules`), and the policy's own
`check_integrity` after each step. Whatever fails ends the run at that step, and says where.
"""

from dataclasses import asdict, dataclass
from typing import Any

from common.sampling_params import SamplingParams, SamplingState, check_request

from .comparing import ComparingTeller
from .cost import CostModel
from .metrics import Metrics
from .policy import Place, Policy
from .scenario import Script, SettingError, Settings, scripts
from .tellers import BusTeller, Message

MAX_STEPS = 5000
MAX_MODEL_LEN = 8192


class BrokenRuleError(Exception):
    """A decision that the engine couldn't carry out."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What has ended a run before its end: in which step, of which kind, and where in the policy."""

    step: int
    kind: str  # "integrity": an assertion of the policy's; "rule": one of the engine's; "error": anything else
    message: str
    place: Place | None


@dataclass(frozen=True, slots=True)
class Run:
    """All that a run has given."""

    messages: list[Message]
    metrics: dict[str, Any]
    failure: Failure | None

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {"messages": self.messages, "metrics": self.metrics, "failure": self.failure and asdict(self.failure)}


class Simulation:
    """A policy on its way through some requests.

    Args:
        policy: the files.
        settings: sizes, and what the requests are like.
        cost: what a step takes.
    """

    def __init__(self, policy: Policy, settings: Settings, cost: CostModel) -> None:
        self.policy, self.settings, self.cost = policy, settings, cost
        num_kv_tokens = settings.num_blocks * settings.block_size
        sizes: dict[str, Any] = {"num_blocks": settings.num_blocks, "block_size": settings.block_size}
        if "Chain" in policy:  # a prefix cache, from v0.6 on
            sizes["enable_prefix_caching"] = settings.prefix_caching
        self.blocks = policy["BlockManager"](**sizes)
        options: dict[str, Any] = {}
        if "no_drafts" in policy:  # drafts, from v0.7 on
            options = {"num_speculative_tokens": settings.num_speculative_tokens, "count_drafts": lambda _, most: most}
        self.scheduler = policy["Scheduler"](
            self.blocks,
            max_num_batched_tokens=settings.token_budget,
            max_num_seqs=min(settings.max_num_seqs, settings.token_budget),
            max_request_len=min(MAX_MODEL_LEN, num_kv_tokens + 1),
            **options,
        )
        teller = BusTeller if "EventBus" in policy else ComparingTeller
        self.teller = teller(policy, settings, self.blocks, MAX_MODEL_LEN)
        self.metrics = Metrics(settings.num_blocks)
        self.clock, self.num_steps = 0.0, 0

    def add(self, script: Script) -> None:
        """A request comes. With several choices it is as many requests; from v0.6 on they share its prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=script.answer_len, ignore_eos=True)
        num_kv_tokens = self.settings.num_blocks * self.settings.block_size
        try:
            check_request(
                len(script.prompt), params, vocab_size=2**62, max_model_len=MAX_MODEL_LEN, num_kv_tokens=num_kv_tokens
            )
        except ValueError as error:
            raise SettingError(f"Request {script.name} can never be served: {error}") from error
        children = []
        for choice in range(script.num_choices):
            sampling = SamplingState.create(params, list(script.prompt), (), seed=choice)
            children.append(self.policy["Request"](f"{script.name}/{choice}", sampling))
        if hasattr(children[0], "forks"):
            if len(children) > self.scheduler.max_num_seqs:
                raise SettingError("Each request has more answers than requests may run at once: raise max_num_seqs.")
            children[0].forks = children[1:]
            self.scheduler.add(children[0])
        else:
            for child in children:
                self.scheduler.add(child)
        for choice, child in enumerate(children):
            self.metrics.arrived(child.request_id, script.arrival, len(script.prompt), script.answer_len)
            self.teller.queued(child, script, choice, self.clock)

    def step(self) -> None:
        """One step; raises whatever the policy does."""
        scheduler = self.scheduler
        self.teller.begin(scheduler)
        output = scheduler.schedule()
        check_rules(scheduler, output)
        self.teller.scheduled(scheduler, output, self.clock)
        seconds = self.cost.of_step(output)
        self.metrics.scheduled(output)
        sampled = self._sample(output)
        is_single = "no_drafts" not in self.policy  # one token a request, until there are drafts
        self.clock += seconds
        told = scheduler.update(output, {key: tokens[0] for key, tokens in sampled.items()} if is_single else sampled)
        taken = dict.fromkeys(sampled, 1) if is_single else told
        num_used = self.blocks.num_blocks - self.blocks.num_free_blocks
        self.metrics.updated(output, taken, num_used, self.clock, seconds)
        self.teller.updated(scheduler, output, taken, self.num_steps, self.clock, seconds)
        self.num_steps += 1
        scheduler.check_integrity()

    def _sample(self, output: Any) -> dict[str, list[int]]:
        """The next tokens of every request whose known ones are computed in this step: right drafts, and one more."""
        sampled = {}
        numbers = range(len(output.requests))
        for i in numbers:
            request = output.requests[i]
            num_drafts = getattr(output, "num_draft_tokens", [0] * len(numbers))[i]
            if request.num_computed_tokens + output.num_scheduled_tokens[i] - num_drafts < request.num_tokens:
                continue
            forks = output.forks[i] if hasattr(output, "forks") else []
            for each in (request, *forks):
                script, choice = self.teller.scripts[each.request_id]
                position = len(each.sampling.output_token_ids)
                right = script.guessable[position : position + num_drafts]
                num_right = right.index(False) if False in right else len(right)
                end = min(position + num_right + 1, script.answer_len)
                sampled[each.request_id] = [script.token(choice, at) for at in range(position, end)]
        return sampled


def check_rules(scheduler: Any, output: Any) -> None:
    """Raise unless the engine can carry a decision out.

    Raises:
        BrokenRuleError: too many tokens for the budget, a request without a token or twice, a table that is too short.
    """
    waits = len(scheduler.waiting) + len(scheduler.running)
    if waits and not output.requests:
        raise BrokenRuleError("The step computes nothing, though requests are there: it would go on like this forever.")
    total = sum(output.num_scheduled_tokens)
    if total > scheduler.max_num_batched_tokens:
        raise BrokenRuleError(f"The step computes {total} tokens; its budget is {scheduler.max_num_batched_tokens}.")
    if len({request.request_id for request in output.requests}) < len(output.requests):
        raise BrokenRuleError("A request is in the step twice.")
    block_size = scheduler.block_manager.block_size
    for request, num_tokens, table in zip(
        output.requests, output.num_scheduled_tokens, output.block_tables, strict=True
    ):
        name, known = request.request_id, request.num_computed_tokens
        if num_tokens < 1:
            raise BrokenRuleError(f"{name} is in the step, but computes {num_tokens} tokens.")
        if len(table) * block_size < known + num_tokens:
            raise BrokenRuleError(
                f"{name}: {len(table)} blocks of {block_size} don't hold {known} + {num_tokens} tokens."
            )


def run(policy: Policy, settings: Settings, cost: CostModel, found: list[Script] | None = None) -> Run:
    """Serve all requests of a setting (or those given), until they are done or something fails."""
    simulation = Simulation(policy, settings, cost)
    coming = scripts(settings) if found is None else list(found)
    failure = None
    try:
        while coming or simulation.scheduler.has_unfinished_requests():
            if not simulation.scheduler.has_unfinished_requests():
                simulation.clock = max(simulation.clock, coming[0].arrival)
            while coming and coming[0].arrival <= simulation.clock:
                simulation.add(coming.pop(0))
            simulation.step()
            if simulation.num_steps >= MAX_STEPS:
                raise BrokenRuleError(f"The run was stopped after {MAX_STEPS} steps.")
    except SettingError:
        raise
    except Exception as error:
        failure = _failure(policy, simulation, error)
    summary = simulation.metrics.summary()
    unfinished = summary["num_requests"] - summary["num_finished"]
    if failure is None and unfinished:
        text = f"{unfinished} of {summary['num_requests']} requests were never finished, but the scheduler knows none."
        failure = Failure(simulation.num_steps - 1, "rule", text, None)
    return Run(simulation.teller.messages, summary, failure)


def _failure(policy: Policy, simulation: Simulation, error: Exception) -> Failure:
    place = policy.place(error.__traceback__)
    if isinstance(error, BrokenRuleError):
        return Failure(simulation.num_steps, "rule", str(error), place)
    number = simulation.num_steps
    if isinstance(error, AssertionError):
        # An assertion of the check comes after the step, whose number has been counted already.
        after = place is not None and place.function is not None and place.function.endswith("check_integrity")
        text = str(error) or (place.text if place is not None else "an assertion failed")
        return Failure(number - 1 if after else number, "integrity", text, place)
    return Failure(number, "error", f"{type(error).__name__}: {error}", place)
