# %% [markdown]
# # v0.10: poke at the router
#
# Which replica gets a request? [v0.10](../milestones/v0_10.md) answers with a policy that knows no HTTP, no Ray and no
# model. So this notebook needs none of them. It sends prompts by hand, makes one prompt very popular, simulates 16
# replicas, and loses one.
#
# On your machine: `python docs/notebooks/v0_10.py`, or `make notebooks` and then Jupyter.

# %%
from itertools import accumulate

from v0_10_scale_out.cluster.keys import BLOCK_BYTES, chain
from v0_10_scale_out.cluster.routing import Policy


def key(letters: str) -> list[bytes]:
    """The key of a prompt in which each letter fills a block."""
    return chain(b"".join(letter.encode() * BLOCK_BYTES for letter in letters))


for prompt in ("abcd", "abcx", "xbcd"):
    print(prompt, [digest.hex()[:6] for digest in key(prompt)])
assert key("abcd")[:3] == key("abcx")[:3]
assert not set(key("abcd")) & set(key("xbcd")), "the same blocks behind another beginning"

# %% [markdown]
# A prompt's **key** has a digest for each block of 64 bytes. A digest stands for its block *and* for everything before
# it. So the first two prompts have three digests in common. The third has none in common with them, although three of
# its blocks have the same text as in the first.
#
# ## Send prompts by hand
#
# Three replicas, A, B and C. Five prompts come one after the other, and each has its answer before the next one comes.
#
# *Predict: which of the five follow an earlier one to its replica? (At least a quarter of a prompt's blocks must be
# held by some replica, or it counts as new.)*


# %%
def send(policy: Policy, prompts: list[str]) -> list[str]:
    """As the router does for each request: choose, start, and end when the answer is complete."""
    rules = []
    for prompt in prompts:
        choice = policy.choose(key(prompt))
        policy.start(prompt, choice.replica, key(prompt))
        policy.end(prompt)
        rules.append(choice.rule)
        print(f"{prompt:6} to {choice.replica}: {choice.rule}, {choice.num_held} of {len(prompt)} blocks")
    return rules


policy = Policy("prefix", seed=2)
policy.update(["A", "B", "C"])
PROMPTS = ["abcd", "efgh", "abcx", "xbcd", "aqrst"]
rules = send(policy, PROMPTS)
assert rules == ["new", "new", "prefix", "new", "new"]

# %% [markdown]
# Only `abcx` follows. `aqrst` has one block of five in common with `abcd`, and a fifth is less than a quarter.
#
# The router has asked no replica. It has chosen by its own **table**: of each replica, the digests of what was sent
# there. Here it is, with each digest written as the letters that it stands for:

# %%
LETTERS = {digest: text for prompt in PROMPTS for digest, text in zip(key(prompt), accumulate(prompt), strict=True)}


def table(policy: Policy) -> dict[str, list[str]]:
    """What each replica should hold, the least recently used first."""
    return {name: [LETTERS[digest] for digest in replica.held] for name, replica in policy.replicas.items()}


for name, held in table(policy).items():
    print(name, held)
assert table(policy)["A"] == ["abcd", "abcx", "abc", "ab", "a"]

# %% [markdown]
# The beginning that `abcd` and `abcx` have in common is in the table once. In each row, the end of a prompt comes
# before its beginning. That matters when the table is full, because it forgets from the left.
#
# Now a table of five blocks for a single replica. `abcd` comes, then `abcx`, then `efgh`.
#
# *Predict: which five digests are left?*

# %%
small = Policy("prefix", max_blocks=5, seed=0)
small.update(["A"])
send(small, ["abcd", "abcx", "efgh"])
print(table(small))
assert table(small) == {"A": ["a", "efgh", "efg", "ef", "e"]}

# %% [markdown]
# Of `abcd` and `abcx` only `a` is left. A block behind a forgotten one could never be found, so the ends go first. The
# replica's own cache does the same ([v0.6](v0_6.py)).
#
# ## A popular prompt
#
# Four replicas, and one system prompt for everybody. A request arrives at each tick of the clock, 90 in all, and its
# answer takes 24 ticks. So 24 requests run at the same time. (On a real replica a request takes longer when many run
# beside it. Here it doesn't, to keep the pictures simple.)
#
# A request may follow its prefix as long as that replica has at most `threshold` requests more than the least busy one.
#
# *Predict: how do the 24 spread with a threshold of 0, of 8, and of infinity? How often is the system prompt computed
# in each case?*

# %%
import math

POPULAR = key("system")


def spread(threshold: float) -> tuple[list[list[int]], int]:
    """The requests of each replica after each tick, and how many requests found nothing of their prompt."""
    policy = Policy("prefix", threshold=threshold, seed=18)
    policy.update(["A", "B", "C", "D"])
    loads, num_computed = [], 0
    for tick in range(120):
        policy.end(f"{tick - 24}")
        if tick < 90:
            choice = policy.choose(POPULAR)
            policy.start(f"{tick}", choice.replica, POPULAR)
            num_computed += choice.num_held == 0
        loads.append([replica.load for replica in policy.replicas.values()])
    return loads, num_computed


THRESHOLDS = (0, 8, math.inf)
spreads = {threshold: spread(threshold) for threshold in THRESHOLDS}
for threshold, (loads, num_computed) in spreads.items():
    print(f"threshold {threshold}: requests at tick 80 {loads[80]}, system prompt computed: {num_computed}")
assert [sorted(spreads[threshold][0][80]) for threshold in THRESHOLDS] == [[6, 6, 6, 6], [0, 8, 8, 8], [0, 0, 0, 24]]
assert [spreads[threshold][1] for threshold in THRESHOLDS] == [4, 3, 1]

# %%
import matplotlib.pyplot as plt

figure, panels = plt.subplots(1, 3, sharey=True, figsize=(6, 2.6))
for axes, (threshold, (loads, _)) in zip(panels, spreads.items(), strict=True):
    for name, style, of_one in zip("ABCD", ("-", "--", "-.", ":"), zip(*loads, strict=True), strict=True):
        axes.plot(of_one, style, label=name)
    axes.set(xlabel="tick", title=f"threshold {threshold}".replace("inf", "∞"))
panels[0].set_ylabel("requests")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
plt.show()

# %% [markdown]
# With 0, each replica has computed the prompt after a few ticks, and the load is even. With infinity the prompt is
# computed once, and three replicas never do anything. With 8, the default, a second replica gets requests when the
# first is 9 ahead, and then a third one. Why not the fourth? Three replicas have 8 requests each by then. The fourth
# has none, and a difference of 8 isn't *more* than 8.
#
# So the threshold is a trade. The lower it is, the more even the load, and the more often a prompt is computed.
#
# ## From 2 to 16 replicas
#
# The policy alone doesn't say what is really found in the caches. The simulation of
# `v0_10_scale_out/measurements/simulation.py` does: each simulated replica has the real scheduler and the real block
# manager, with a pool of 400 blocks (6,400 tokens). Only the model is missing. A step takes as long as four constants
# say.
#
# The constants are rounded from `costs` in `v0_10_scale_out/measurements/routing.json`, where they were measured on two
# replicas that share two cores: 28 ms for a step, 1 ms more for each request in it, 1.2 ms for each token of a prompt,
# and 20 ms a request for HTTP and routing.

# %%
import random
import statistics

from v0_10_scale_out.measurements.simulation import Costs, Simulation
from v0_10_scale_out.measurements.workloads import Turn

COSTS = Costs(step=0.028, request=0.001, token=0.0012, around=0.020)  # seconds


def questions(seed: int, num_users: int, num_prompts: int) -> list[list[Turn]]:
    """Each user asks four short questions, one after the other, each behind one of some system prompts."""
    rng = random.Random(seed)

    def text(num_tokens: int) -> list[int]:
        return [rng.randrange(100, 40000) for _ in range(num_tokens)]

    prompts = [text(2000) for _ in range(num_prompts)]
    return [[Turn(rng.choice(prompts), text(30), num_tokens=32) for _ in range(4)] for _ in range(num_users)]


# %% [markdown]
# With each replica come four users and two system prompts. So however many replicas there are, a system prompt is asked
# about 8 times. A pool has room for three system prompts.
#
# *Predict: which share of all prompt tokens is found in a cache, if each system prompt is computed once? And what
# happens by lot, with 16 replicas? Think of where the 8 questions behind one system prompt go.*

# %%
SIZES = (2, 4, 8, 16)
ROUTINGS = ("prefix", "balanced", "random")


def simulated(routing: str, num_replicas: int) -> dict[str, float]:
    """Medians of three rounds with different prompts."""
    rounds = [
        Simulation(routing, num_replicas, questions(seed, 4 * num_replicas, 2 * num_replicas), COSTS, seed).run()
        for seed in range(3)
    ]
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


figures = {(routing, size): simulated(routing, size) for routing in ROUTINGS for size in SIZES}
print("routing   replicas  found  busiest / mean  tokens/s")
for (routing, size), of in figures.items():
    print(f"{routing:8}  {size:8}  {of['cached']:5.0%}  {of['busiest']:14.2f}  {of['rate']:8.0f}")
for size in SIZES:
    assert figures["prefix", size]["cached"] > 0.7
    assert figures["prefix", size]["cached"] > max(figures[other, size]["cached"] for other in ROUTINGS[1:])
assert figures["random", 16]["cached"] < 0.15
assert figures["balanced", 16]["busiest"] < figures["prefix", 16]["busiest"]

# %%
figure, panels = plt.subplots(1, 2)
for routing, marker in zip(ROUTINGS, "osx", strict=True):
    for axes, name in zip(panels, ("cached", "busiest"), strict=True):
        axes.plot(range(len(SIZES)), [figures[routing, size][name] for size in SIZES], marker=marker, label=routing)
panels[0].set(title="share found in a cache", ylim=(0, 1))
panels[1].set(title="busiest replica / mean", ylim=(0.9, 1.7))
for axes in panels:
    axes.set(xlabel="replicas", xticks=range(len(SIZES)), xticklabels=SIZES)
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
plt.show()

# %% [markdown]
# If each system prompt is computed once, 7 of 8 questions find its 2,000 tokens and compute their own 30. That's
# 7/8 × 2000/2030 = 86%, and prefix routing comes close to it. By lot, 8 questions go to 6 or 7 different replicas of
# 16, so nearly each of them is the first one there. And what a replica has computed it soon evicts, as it is sent
# every system prompt, not three. Balanced routing doesn't look at the prompt, and finds as little.
#
# With 16 replicas, prefix routing finds less than with 2. Among many replicas it happens more often that one is 9
# requests ahead of the least busy one. Then a request goes elsewhere, and its system prompt is computed once more.
#
# What does it cost? See the right panel. With balanced routing, the busiest replica gets at most 1.25 times the mean
# number of requests. With prefix routing it gets up to 1.5 times the mean. The tokens per second say that it's worth it
# here: a request that finds its prompt takes a fraction of the time.
#
# Eight times the replicas don't bring eight times the tokens per second, though. A run ends with its last answer. With
# 16 replicas a larger part of the prompts is computed, and some replicas idle while the busiest one still works.
#
# ## Lose a replica
#
# Four replicas, and 40 prompts that are asked again and again, in any order. No pool is too small here, so what the
# table says is what is found. After 600 requests, A is lost, and E takes its place with an empty cache.
#
# *Predict: by how much does the hit rate drop with prefix routing, and by how much by lot? Which recovers first? How
# many prompts have to be computed again in each case?*

# %%
LOST, END, NUM_ROUNDS = 600, 1200, 20


def lose_one(routing: str, seed: int) -> list[float]:
    """The share that each request finds."""
    rng = random.Random(seed)
    keys = [chain(rng.randbytes(10 * BLOCK_BYTES)) for _ in range(40)]
    policy = Policy(routing, seed=seed)
    policy.update(["A", "B", "C", "D"])
    found = []
    for number in range(END):
        if number == LOST:
            policy.update(["B", "C", "D", "E"])
        policy.end(f"{number - 6}")  # six run at the same time
        prompt = rng.choice(keys)
        choice = policy.choose(prompt)
        policy.start(f"{number}", choice.replica, prompt)
        found.append(choice.num_held / len(prompt))
    return found


WIDTH = 20
figure, axes = plt.subplots()
misses = {}
for routing, style in (("prefix", "-"), ("random", "--")):
    rounds = [lose_one(routing, seed) for seed in range(NUM_ROUNDS)]
    means = [statistics.mean(of_one) for of_one in zip(*rounds, strict=True)]
    smooth = [statistics.mean(means[start : start + WIDTH]) for start in range(0, END, WIDTH)]
    axes.plot([start + WIDTH / 2 for start in range(0, END, WIDTH)], smooth, style, label=routing)
    misses[routing] = statistics.mean(sum(share == 0 for share in found[LOST:]) for found in rounds)
    before, after = smooth[LOST // WIDTH - 1], smooth[LOST // WIDTH]
    print(f"{routing}: {before:.0%} just before, {after:.0%} just after, then {misses[routing]:.0f} prompts computed")
axes.axvline(LOST, color="grey", linewidth=0.8)
axes.set(xlabel="requests", ylabel=f"share found (means of {WIDTH})", ylim=(0, 1.02))
axes.legend(loc="lower right")
plt.show()
assert 8 < misses["prefix"] < 12
assert misses["random"] > 3 * misses["prefix"]

# %% [markdown]
# Both drop by about a quarter, for different reasons. With prefix routing a quarter of the *prompts* is lost with A.
# Each is computed once more, wherever it goes now, and that's all: 10 prompts. By lot a quarter of the *requests* goes
# to E, which has to see every one of the 40 prompts. So by lot it takes about four times as long, just as in the
# beginning, on the left of the picture.
#
# ## Try it yourself
#
# 1. **The best threshold.** Eight simulated replicas with 64 users, whose questions all stand behind *one* system
#    prompt. Set `simulation.policy.threshold` to 0, 8 and infinity before `run()`. Which one brings the most tokens per
#    second? And if there are 16 system prompts?
# 2. **A greeting.** Forty unrelated prompts of ten blocks begin with the same block. Route them with `min_share=0` and
#    with the default of 0.25, four running at the same time. How many go to each of four replicas?
# 3. **A table that is too long.** Give each of four replicas a `BlockManager` with 200 blocks of 16 tokens, and send 40
#    prompts of 400 tokens in any order. Which share does the router believe in, and which share is found? What does
#    `max_blocks=200` change?
#
# Predict before you write it. The solutions follow.
#
# ## Solution 1: the best threshold

# %%
for num_prompts in (1, 16):
    rates = {}
    for threshold in THRESHOLDS:
        simulation = Simulation("prefix", 8, questions(0, 64, num_prompts), COSTS, seed=0)
        simulation.policy.threshold = threshold
        result = simulation.run()
        rates[threshold] = result["rate"]
        print(
            f"{num_prompts:2} system prompts, threshold {threshold:3}: {result['rate']:5.0f} tokens/s,"
            f" {result['cached']:.0%} found, busiest / mean {result['busiest']:.1f}"
        )
    assert max(rates, key=rates.get) == (0 if num_prompts == 1 else math.inf)

# %% [markdown]
# With one system prompt infinity is the worst, because seven replicas idle. With 16 it's the best: each replica gets
# two of them, and the load is even enough by itself. There a threshold of 0 is the worst: it sends prompts away for the
# smallest difference, and each time 2,000 tokens are computed again. The default of 8 is the best in neither case, and
# far from the worst in both.
#
# ## Solution 2: a greeting

# %%
from collections import Counter

for min_share in (0, 0.25):
    policy = Policy("prefix", min_share=min_share, seed=0)
    policy.update(["A", "B", "C", "D"])
    rng = random.Random(0)
    places = Counter(dict.fromkeys(policy.replicas, 0))
    for number in range(40):
        policy.end(f"{number - 4}")
        prompt = chain(b"Hello!".ljust(BLOCK_BYTES) + rng.randbytes(9 * BLOCK_BYTES))
        choice = policy.choose(prompt)
        policy.start(f"{number}", choice.replica, prompt)
        places[choice.replica] += 1
    print(f"min_share {min_share}: {dict(places)}")
    assert (max(places.values()) == 40) == (min_share == 0)

# %% [markdown]
# Without a least share, all 40 follow the first one for the sake of one block in ten. The threshold doesn't help: with
# four running, the replica is never 9 ahead.
#
# ## Solution 3: a table that is too long

# %%
from array import array

from v0_10_scale_out.block_manager import BlockManager


def compute(manager: BlockManager, name: str, ids: list[int]) -> int:
    """Take what is cached, and pretend to compute the rest; returns how many blocks were found."""
    prefix = manager.find_prefix(lambda start, end: ids[start:end], len(ids) - 1)
    manager.allocate(name, len(ids), prefix)
    manager.publish(name, lambda start, end: ids[start:end])
    manager.free(name)
    return len(prefix)


for max_blocks in (65536, 200):
    rng = random.Random(0)
    prompts = [[rng.randrange(40000) for _ in range(400)] for _ in range(40)]
    policy = Policy("prefix", max_blocks=max_blocks, seed=0)
    policy.update(["A", "B", "C", "D"])
    pools = {name: BlockManager(num_blocks=200, block_size=16) for name in policy.replicas}
    believed = found = num_blocks = 0
    for number in range(1200):
        policy.end(f"{number - 6}")
        ids = [*rng.choice(prompts), rng.randrange(40000)]
        prompt = chain(array("i", ids).tobytes())
        choice = policy.choose(prompt)
        policy.start(f"{number}", choice.replica, prompt)
        num_found = compute(pools[choice.replica], f"{number}", ids)
        if number >= 400:  # by then each prompt was there
            believed, found, num_blocks = believed + choice.num_held, found + num_found, num_blocks + len(prompt)
    print(f"a table of {max_blocks:5} blocks: {believed / num_blocks:.0%} believed, {found / num_blocks:.0%} found")
    if max_blocks == 200:
        assert abs(believed - found) / num_blocks < 0.05
    else:
        assert (believed - found) / num_blocks > 0.1

# %% [markdown]
# A replica has room for 8 of these prompts, and is sent 10. The long table remembers all of them, so the router
# believes in blocks that were evicted long ago. A table as long as the pool forgets about the same blocks as the pool
# does. The share that is found hardly changes: what was evicted is computed again in any case, here or elsewhere. But
# such a prompt is *new* now, so the less busy of two replicas computes it.
#
# ## Poke on
#
# - `Policy("balanced")` in the part on losing a replica. Is its curve nearer to prefix or to random?
# - In the same part, let two replicas be lost at once, or let one be lost and none take its place.
# - Replace `questions` in the simulation by `chats` from `v0_10_scale_out/measurements/workloads.py`.
