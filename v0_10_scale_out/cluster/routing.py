"""Which replica a request goes to: the policy, nothing else. `router.py` calls it in Ray, and a simulation without.

    prompt's key        a ─ b ─ c ─ d        a digest for each full block, each of which stands for all before it
    replica 0 got       a ─ b ─ x            holds 2 of the 4
    replica 1 got       a ─ b ─ c            holds 3: the request goes there, unless replica 1 is too busy

A replica's prefix cache holds what it has computed, so a prompt is cheapest where its beginning was computed before. No
replica is asked: what was routed to it is what it may hold. It may have evicted some of that, and the table forgets as
well, the least recently used blocks first. A wrong guess costs time and changes no token.

Knows no HTTP and no Ray, and nothing of what a key was made from (`keys.py`). Torch-free.
"""

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

ROUTINGS = ("prefix", "balanced", "random")
Key = Sequence[bytes]  # digests of a prompt's full blocks, from its beginning


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and why.

    Args:
        replica: its name.
        rule: `"prefix"`, it holds most of the prompt. `"busy"`, another one holds more, but has too much to do.
            `"new"`, no replica holds enough of it. `"named"`, it was asked for by its name. `"balanced"` and `"random"`
            are the two controls.
        num_held: blocks of the prompt that the replica should hold.
    """

    replica: str
    rule: str
    num_held: int


@dataclass(slots=True)
class Route:
    """What goes with a request on its way: the key to choose by, and then the choice.

    `avoid` is a replica that was lost with this request, which the router may not know yet. `only` is the one that was
    asked for by its name. `is_request` is false for a call that adds no load. `has_ended` says that nobody waits for
    the answer any more.
    """

    key: Key = ()
    choice: Choice | None = None
    avoid: str | None = None
    only: str | None = None
    is_request: bool = True
    has_ended: bool = False

    def __reduce__(self) -> tuple[type["Route"], tuple[()]]:
        return Route, ()  # a replica that is sent one needs nothing of it, and a long prompt's key is 32 KiB


@dataclass(slots=True)
class Replica:
    """What is known of one: the blocks that it should hold, the least recently used first, and what runs there.

    `last_start` is the number of the request that it was given last, 0 before there was one.
    """

    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    running: set[str] = field(default_factory=set)
    last_start: int = 0

    @property
    def load(self) -> int:
        """Requests that it has, running or waiting."""
        return len(self.running)

    def num_held(self, key: Key) -> int:
        """Blocks from the key's beginning."""
        for number, digest in enumerate(key):
            if digest not in self.held:
                return number
        return len(key)

    def hold(self, key: Key, max_blocks: int) -> None:
        """It gets a prompt of this key. A block counts as newer than those behind it: the end is forgotten first."""
        for digest in reversed(key):
            self.held[digest] = None
            self.held.move_to_end(digest)
        while len(self.held) > max_blocks:
            self.held.popitem(last=False)


class Policy:
    """Chooses among replicas, and remembers what it has sent where.

    Args:
        routing: one of `ROUTINGS`.
        threshold: how many requests more than the least busy one a replica may have, to be chosen for its prefix.
        min_share: share of a prompt's blocks that must be held somewhere for that to count. A short beginning that all
            prompts have in common would otherwise bring all of them to one replica.
        max_blocks: that are remembered of each replica.
        seed: of the draws.

    Raises:
        ValueError: there is no such routing.
    """

    def __init__(
        self,
        routing: str = "prefix",
        *,
        threshold: int = 8,
        min_share: float = 0.25,
        max_blocks: int = 65536,
        seed: int | None = None,
    ) -> None:
        if routing not in ROUTINGS:
            raise ValueError(f"There is no routing {routing!r}: choose {', '.join(ROUTINGS)}.")
        self.routing, self.threshold, self.min_share, self.max_blocks = routing, threshold, min_share, max_blocks
        self.replicas: dict[str, Replica] = {}
        self._places: dict[str, str] = {}  # of each request that runs: its replica
        self._num_starts = 0
        self._random = random.Random(seed)

    def update(self, names: Collection[str]) -> None:
        """These replicas there are. What a lost one held is forgotten: its successor begins with an empty cache."""
        for name in [name for name in self.replicas if name not in names]:
            for request_id in self.replicas.pop(name).running:
                self._places.pop(request_id, None)
        for name in names:
            self.replicas.setdefault(name, Replica())

    def choose_for(self, route: Route, names: Collection[str]) -> Choice:
        """The replica for a request, among these.

        Raises:
            ValueError: there is none.
        """
        if route.only is not None and route.only in names:
            return self._chosen(route.only, "named", route.key)
        return self.choose(route.key, [name for name in names if name != route.avoid] or names)

    def choose(self, key: Key, names: Collection[str] | None = None) -> Choice:
        """The replica for a prompt of this key, among these (else among all); changes nothing.

        Raises:
            ValueError: there is none.
        """
        replicas = self.replicas if names is None else {n: self.replicas[n] for n in names if n in self.replicas}
        if not replicas:
            raise ValueError("There is no replica to choose from.")
        if self.routing == "random":
            return self._chosen(self._random.choice(list(replicas)), "random", key)
        if self.routing == "balanced":
            return self._chosen(self._less_busy_of_two(replicas), "balanced", key)
        held = {name: replica.num_held(key) for name, replica in replicas.items()}
        most = max(held.values())
        if most == 0 or most < self.min_share * len(key):
            return self._chosen(self._less_busy_of_two(replicas), "new", key)
        best = self._least_busy(replicas, (name for name in replicas if held[name] == most))
        if replicas[best].load - min(replica.load for replica in replicas.values()) <= self.threshold:
            return Choice(best, "prefix", most)
        return self._chosen(self._less_busy_of_two(replicas), "busy", key)

    def start(self, request_id: str, replica: str, key: Key) -> None:
        """A request goes to this replica; the same one may be sent again, elsewhere."""
        self.end(request_id)
        if replica in self.replicas:
            self._num_starts += 1
            self._places[request_id], state = replica, self.replicas[replica]
            state.last_start = self._num_starts
            state.running.add(request_id)
            state.hold(key, self.max_blocks)

    def end(self, request_id: str, replica: str | None = None) -> None:
        """It runs no more (on this replica, where one is given), for whatever reason; an unknown one is no error."""
        place = self._places.get(request_id)
        if place is not None and replica in (None, place):
            del self._places[request_id]
            self.replicas[place].running.discard(request_id)

    def _chosen(self, name: str, rule: str, key: Key) -> Choice:
        return Choice(name, rule, self.replicas[name].num_held(key))

    def _less_busy_of_two(self, replicas: dict[str, Replica]) -> str:
        """Of two that are drawn: nearly as even as looking at all (Mitzenmacher 2001, The Power of Two Choices).

        And where several routers do not know of each other, they don't all choose the same one.
        """
        return self._least_busy(replicas, self._random.sample(list(replicas), min(2, len(replicas))))

    def _least_busy(self, replicas: dict[str, Replica], names: Iterable[str]) -> str:
        """At a tie the one that was chosen longest ago, so that prompts spread while nothing runs, too. Then by lot."""
        return min(names, key=lambda name: (replicas[name].load, replicas[name].last_start, self._random.random()))
