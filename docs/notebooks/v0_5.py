# %% [markdown]
# # v0.5: poke at the measurements
#
# [v0.5](../milestones/v0_5.md) measures. This notebook takes its tools apart: what a latency is when tokens come in
# chunks, what the way of sending does to a server, where the time of a step goes, and how far away the machine's own
# limit is.
#
# On your machine: `python docs/notebooks/v0_5.py`, or `make notebooks` and then Jupyter. Every figure that depends on
# the machine is another one on yours.

# %%
import itertools
import statistics

from v0_5_bench.harness.load.client import Load, RequestResult, arrival_moments
from v0_5_bench.harness.load.summary import summarise

# %% [markdown]
# ## A chunk is not a token
#
# Two servers answer with 31 tokens. One sends each token by itself, one every 10 ms. The other sends three at a time,
# every 30 ms. **Predict first**: whose time per token is shorter?

# %%
one_by_one = RequestResult(end=0.5, chunk_times=[0.2 + 0.01 * i for i in range(31)], num_output_tokens=31)
in_threes = RequestResult(end=0.5, chunk_times=[0.2 + 0.03 * i for i in range(11)], num_output_tokens=31)
for name, result in (("one by one", one_by_one), ("in threes", in_threes)):
    gaps = [after - before for before, after in itertools.pairwise(result.chunk_times)]
    print(
        f"{name:10}  gap between chunks {statistics.mean(gaps) * 1e3:.0f} ms,"
        f"  TPOT {result.tpot * 1e3:.0f} ms,  ITL {statistics.mean(result.itls) * 1e3:.0f} ms"
    )
assert round(one_by_one.tpot, 6) == round(in_threes.tpot, 6) == 0.01

# %% [markdown]
# The gap between chunks says how bumpy a stream is. The time per token needs the number of tokens, and that is taken
# from the server's `usage`, never counted in chunks.
#
# ## A failure is not fast
#
# A server that is full refuses at once. **Predict first**: what is the mean end-to-end latency of these three?

# %%
refused = RequestResult(end=0.001, error="HTTP 503: the queue is full")
summary = summarise([one_by_one, refused, refused])
print("completed", summary["completed"], " failed", summary["failed"], summary["errors"])
print(f"mean end-to-end latency {summary['e2el_ms']['mean']:.0f} ms")
assert summary["e2el_ms"]["mean"] == 500

# %% [markdown]
# ## Open and closed loops
#
# A server with eight places needs one second for each answer, so it can answer eight a second and no more. Users come
# at random, seven a second on average, whether or not it keeps up. How long does each wait for a place?

# %%
import matplotlib.pyplot as plt


def waits(arrivals: list[float], places: int = 8, seconds: float = 1.0) -> list[float]:
    """How long each one waits until one of the places is free."""
    free_at, found = [0.0] * places, []
    for arrival in arrivals:
        place = min(range(places), key=lambda i: free_at[i])
        begin = max(arrival, free_at[place])
        free_at[place] = begin + seconds
        found.append(begin - arrival)
    return found


figure, axes = plt.subplots()
means = {}
for rate in (4, 7, 10):
    arrivals = arrival_moments(200, Load(base_url="", model="", request_rate=rate, seed=3))
    found = waits(arrivals)
    means[rate] = statistics.mean(found)
    axes.plot(arrivals, found, label=f"{rate} a second: mean wait {means[rate]:.1f} s")
axes.set_xlabel("seconds since the first one came")
axes.set_ylabel("seconds of waiting")
axes.legend()
plt.show()
assert means[4] < means[7] < means[10]

# %% [markdown]
# Past eight a second the wait grows without end: whatever mean such a run reports is that of the moment at which it
# was stopped. In a closed loop with eight under way nobody ever waits, whatever the server's speed: it is asked less.
#
# ## Where a step's time goes
#
# The profiler replaces the functions that are parts of a step by ones that look at the clock. **Predict first**: which
# part is the largest with one request, and which grows most from one request to 16?

# %% tags=["timed"]
from v0_5_bench import LLM, SamplingParams
from v0_5_bench.harness.explain.profiler import Profiler
from v0_5_bench.harness.load.workloads import random_ids

llm = LLM()
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
llm.generate(random_ids(2, 30), params, use_tqdm=False)  # what is done once belongs to nobody
profiles = {}
for num in (1, 16):
    with Profiler(llm.engine) as profiler:
        llm.generate(random_ids(num, 30), params, use_tqdm=False)
    profiles[num] = profiler.summary()
    print(f"{num:2} requests: {profiles[num]['ms_per_step']:6.1f} ms a step, {profiles[num]['num_steps']} steps")

figure, axes = plt.subplots(figsize=(6, 2.6))
left = [0.0, 0.0]
for part in sorted(profiles[16]["parts_ms"], key=lambda part: -profiles[16]["parts_ms"][part])[:5]:
    values = [profiles[num]["parts_ms"][part] for num in profiles]
    axes.barh(["1 request", "16 requests"], values, left=left, label=part)
    left = [a + b for a, b in zip(left, values, strict=True)]
axes.set_xlabel("ms of a step")
axes.legend(fontsize=8)
plt.show()
assert all(profile["num_steps"] == 12 for profile in profiles.values())
assert profiles[16]["ms_per_step"] < 16 * profiles[1]["ms_per_step"], "sixteen in one step are cheaper than one by one"

# %% [markdown]
# Outside of the `with` the engine is as it was: there is nothing to switch off.

# %%
assert "step" not in vars(llm.engine)

# %% [markdown]
# ## How far away is the limit?
#
# A decode step must read every matrix once, whatever the engine. How many bytes is that, and how long does this
# machine need to read them?

# %% tags=["timed"]
import torch

from v0_5_bench.harness.compare.rates import bandwidth

elements = llm.engine.model.lm_head.numel() + sum(
    matrix.numel()
    for layer in llm.engine.model.layers
    for matrix in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
)
gb_s = bandwidth(torch.device("cpu"), 256 * 2**20, 3, False)["median"]
least_ms = 4 * elements / gb_s / 1e6
print(f"{elements:,} elements of 4 bytes, read at {gb_s:.1f} GB/s: no step takes less than about {least_ms:.0f} ms")
print(f"measured with one request: {profiles[1]['ms_per_step']:.0f} ms")
assert elements == 134_479_872

# %% [markdown]
# With sixteen requests the same bytes serve sixteen tokens: that is what batching is. How many requests until the
# products, and not the reading, take the time? Each byte of a matrix is worth half an operation a request (two
# operations for four bytes); [the roofline](../benchmarks.md) has the machine's own rates.
#
# ## Poke on
#
# - Give `waits` a server whose answers take longer the more of them are under way.
# - Profile a prompt of 2,000 tokens. Which part has grown most?
# - `Profiler(llm.engine, trace_file="trace.json")` writes a trace for [ui.perfetto.dev](https://ui.perfetto.dev).
#   Where are the gaps between the operators?
