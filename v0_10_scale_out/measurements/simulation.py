"""Routing on up to 64 replicas, simulated: `python -m v0_10_scale_out.measurements.simulation`.

The policy, the schedulers and the block managers are the real ones; only the model is not there. How long a step takes
comes from `routing.json`, where it was measured on two replicas:

    a step    +  each request in it  +  each token of a prompt       and around it all, once a request, HTTP and routing

With two replicas the simulated loads are those that were measured, so that the model's error is known: it stands in the
results beside the figures. With more replicas there are as many more users, and as many more system prompts.

No Ray and no model is needed. The figures go to `simulation.json` with their recipe, and are drawn. It takes some
minutes.
"""

import argparse
import heapq
import json
import random
import statistics
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.measuring.recipe import recipe, spread
from common.sampling_params import SamplingParams, SamplingState

from ..block_manager import BlockManager
from ..cluster.keys import chain
from ..cluster.routing import ROUTINGS, Policy
from ..request import Request
from ..scheduler import Scheduler, SchedulerOutput
from .plot import draw
from .workloads import NUM_BLOCKS, NUM_USERS, WORKLOADS, Session

RESULTS = Path(__file__).with_suffix(".json")
MEASURED = RESULTS.with_name("routing.json")
NUM_REPLICAS = (2, 4, 8, 16, 32, 64)
BLOCK_SIZE, BUDGET, MAX_LEN = 16, 512, 6400


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step, of a request in it, of a token of a prompt, and of all that is around the engine."""

    step: float
    request: float
    token: float
    around: float

    def of_step(self, output: SchedulerOutput) -> float:
        """A decode is one token, and is paid for as a request."""
        num_more = sum(number - 1 for number in output.num_scheduled_tokens)
        return self.step + self.request * len(output.requests) + self.token * num_more


@dataclass(slots=True)
class Replica:
    """An engine without a model. `output` is the step that it computes, if any."""

    scheduler: Scheduler
    output: SchedulerOutput | None = None
    num_requests: int = 0


@dataclass(slots=True)
class User:
    """One session, and how far it has come."""

    turns: list[Any]
    said: list[int] = field(default_factory=list)
    sent: float = 0.0
    prompt: list[int] = field(default_factory=list)


class Simulation:
    """Users, a policy and replicas, and a clock that goes from one event to the next.

    Args:
        routing: of the policy.
        num_replicas: how many.
        sessions: one for each user; all begin at once.
        costs: of the replicas.
        seed: of what the policy draws, and of what the replicas answer.
    """

    def __init__(self, routing: str, num_replicas: int, sessions: Sequence[Session], costs: Costs, seed: int) -> None:
        self.costs, self.random = costs, random.Random(seed)
        self.policy = Policy(routing, seed=seed)
        self.replicas = {f"{number}": _replica() for number in range(num_replicas)}
        self.policy.update(self.replicas)
        self.users = [User(list(session)) for session in sessions]
        self.ttfts: list[float] = []
        self.num_prompt_tokens = self.num_cached_tokens = self.num_tokens = 0
        self.clock = 0.0
        self._events: list[tuple[float, int, str]] = []  # when, in which order, and whose step ends or which user asks
        self._num_events = 0
        self._requests: dict[str, tuple[Request, User]] = {}

    def run(self) -> dict[str, float]:
        """To the end; the figures that are measured on real replicas, and the spread of the requests."""
        for number in range(len(self.users)):
            self._at(self.costs.around, f"user {number}")
        while self._events:
            self.clock, _, what = heapq.heappop(self._events)
            kind, _, name = what.partition(" ")
            if kind == "user":
                self._ask(int(name))
            else:
                self._end_step(name)
        loads = [replica.num_requests for replica in self.replicas.values()]
        return {
            "cached": self.num_cached_tokens / self.num_prompt_tokens,
            "ttft_ms": statistics.median(self.ttfts) * 1e3,
            "rate": self.num_tokens / self.clock,
            "busiest": max(loads) / statistics.mean(loads),
        }

    def _at(self, moment: float, what: str) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (moment, self._num_events, what))

    def _ask(self, number: int) -> None:
        """A user's next request has come to the router."""
        user = self.users[number]
        turn = user.turns.pop(0)
        user.prompt = turn.prompt(user.said)
        user.sent = self.clock - self.costs.around
        key = chain(array("i", user.prompt).tobytes())
        choice = self.policy.choose(key)
        request_id = f"{number}/{len(user.turns)}"
        self.policy.start(request_id, choice.replica, key)
        params = SamplingParams(temperature=0.0, max_tokens=turn.num_tokens, ignore_eos=True)
        request = Request(request_id, SamplingState.create(params, user.prompt, (), seed=0))
        self._requests[request_id] = request, user
        replica = self.replicas[choice.replica]
        replica.scheduler.add(request)
        replica.num_requests += 1
        if replica.output is None:
            self._begin_step(choice.replica)

    def _begin_step(self, name: str) -> None:
        replica = self.replicas[name]
        replica.output = None
        if replica.scheduler.has_unfinished_requests():
            replica.output = replica.scheduler.schedule()
            self._at(self.clock + self.costs.of_step(replica.output), f"step {name}")

    def _end_step(self, name: str) -> None:
        replica = self.replicas[name]
        output = replica.output
        assert output is not None
        computed = zip(output.requests, output.num_scheduled_tokens, strict=True)
        done = [request for request, number in computed if request.num_computed_tokens + number == request.num_tokens]
        first = [request for request in done if not request.sampling.output_token_ids]
        sampled = {request.request_id: [self.random.randrange(100, 40000)] for request in done}
        replica.scheduler.update(output, sampled)
        for request in first:
            _, user = self._requests[request.request_id]
            self.ttfts.append(self.clock - user.sent)
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens
        for request in done:
            if request.finish is not None:
                self._finish(request)
        self._begin_step(name)

    def _finish(self, request: Request) -> None:
        """An answer is complete: its user asks the next question."""
        _, user = self._requests.pop(request.request_id)
        self.policy.end(request.request_id)
        self.num_tokens += len(request.sampling.output_token_ids)
        user.said = user.prompt + request.sampling.output_token_ids
        if user.turns:
            self._at(self.clock + self.costs.around, f"user {request.request_id.partition('/')[0]}")


def _replica() -> Replica:
    blocks = BlockManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, enable_prefix_caching=True)
    return Replica(Scheduler(blocks, max_num_batched_tokens=BUDGET, max_num_seqs=256, max_request_len=MAX_LEN))


def main() -> None:
    """Simulate, print and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each with other prompts")
    parser.add_argument("--most", type=int, default=NUM_REPLICAS[-1], help="replicas, at most")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="what routing.py has written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text())
    costs = Costs(**{name: of["median"] / 1e3 for name, of in measured["costs"].items()})
    made = recipe(repeats=args.repeats, num_blocks=NUM_BLOCKS, costs_of=measured["recipe"]["commit"])
    sizes = [number for number in NUM_REPLICAS if number <= args.most]
    results = {"recipe": made, **simulate(costs, sizes, args.repeats)}
    results["error"] = errors(results["loads"], measured["loads"])
    print(json.dumps(results, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    if args.out == RESULTS:
        draw(results["loads"], measured["loads"])


def simulate(costs: Costs, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Of each load, each number of replicas and each routing: the figures, and how busy the busiest replica is."""
    loads: dict[str, Any] = {load: {} for load in WORKLOADS}
    for number in sizes:
        print(f"{number} replicas ...", file=sys.stderr, flush=True)
        for load in WORKLOADS:
            loads[load][f"{number}"] = {
                routing: _spreads([_one(load, routing, number, costs, seed) for seed in range(repeats)])
                for routing in ROUTINGS
            }
    return {
        "what": "cached share, median TTFT in ms, output tokens/s, and requests of the busiest replica over the mean",
        "loads": loads,
    }


def errors(simulated: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """With two replicas: what is simulated, divided by what was measured."""
    return {
        load: {
            routing: {
                name: round(simulated[load]["2"][routing][name]["median"] / measured[load][routing][name]["median"], 3)
                for name in ("cached", "ttft_ms", "rate")
            }
            for routing in ROUTINGS
        }
        for load in measured
    }


def _one(load: str, routing: str, num_replicas: int, costs: Costs, seed: int) -> dict[str, float]:
    sessions = WORKLOADS[load](seed, NUM_USERS * num_replicas // 2)  # with two replicas those that were measured
    return Simulation(routing, num_replicas, sessions, costs, seed).run()


def _spreads(rounds: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: spread([one[name] for one in rounds]) for name in rounds[0]}


if __name__ == "__main__":
    main()
