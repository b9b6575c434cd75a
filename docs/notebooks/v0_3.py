# %% [markdown]
# # v0.3: poke at the scheduler
#
# Who computes how many tokens in the next step? [v0.3](../milestones/v0_3.md) answers with a scheduler of some
# 100 lines that knows neither tensors nor text. So the first half of this notebook runs it without a model, and
# starves it. The second half lets the model compute, a step at a time.
#
# On your machine: `python docs/notebooks/v0_3.py`, or `make notebooks` and then Jupyter.

# %%
import sys
from dataclasses import replace

from common.sampling_params import SamplingParams, SamplingState
from v0_3_scheduler import trace
from v0_3_scheduler.block_manager import BlockManager
from v0_3_scheduler.request import Request
from v0_3_scheduler.scheduler import Scheduler, SchedulerOutput

print("torch is loaded:", "torch" in sys.modules)
assert "torch" not in sys.modules, "the policy needs no torch (in a fresh kernel)"

# %% [markdown]
# ## A scheduler without a model
#
# A request is a list of prompt tokens and a wish: so many new ones. A step is decided by `schedule()`, computed
# by somebody, and taken in by `update()`. Who computes does not matter to the scheduler. Here nobody does: each
# request whose known tokens are complete just gets the token 7.

# %%


def new_scheduler(num_blocks: int, token_budget: int, block_size: int = 4) -> Scheduler:
    """A scheduler over an empty pool."""
    return Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_batched_tokens=token_budget,
        max_num_seqs=8,
        max_request_len=num_blocks * block_size + 1,
    )


def new_request(name: str, num_prompt_tokens: int, max_tokens: int) -> Request:
    """A request with a made-up prompt."""
    params = SamplingParams(max_tokens=max_tokens)
    prompt_token_ids = [1] * num_prompt_tokens
    return Request(name, SamplingState.create(params, prompt_token_ids, eos_token_ids=(), seed=0))


def step(scheduler: Scheduler) -> SchedulerOutput:
    """One step without a model."""
    scheduled = scheduler.schedule()
    sampled = {}
    for request, num_tokens in zip(scheduled.requests, scheduled.num_scheduled_tokens, strict=True):
        if request.num_computed_tokens + num_tokens == request.num_tokens:
            sampled[request.request_id] = 7
    scheduler.update(scheduled, sampled)
    scheduler.check_integrity()
    return scheduled


def tokens_of(scheduled: SchedulerOutput) -> dict[str, int]:
    """Who computed how many tokens."""
    names = [request.request_id for request in scheduled.requests]
    return dict(zip(names, scheduled.num_scheduled_tokens, strict=True))


# %% [markdown]
# ## One budget, no phases
#
# Three prompts of 5, 20 and 3 tokens, a budget of 16 tokens a step, and three new tokens each.
#
# *Predict: what does each of the first three steps compute?*

# %%
scheduler = new_scheduler(num_blocks=16, token_budget=16)
for name, num_prompt_tokens in (("A", 5), ("B", 20), ("C", 3)):
    scheduler.add(new_request(name, num_prompt_tokens, max_tokens=3))

steps = []
while scheduler.has_unfinished_requests():
    steps.append(tokens_of(step(scheduler)))
    print(f"step {len(steps)}: {steps[-1]}")
assert steps[0] == {"A": 5, "B": 11}, "B gets what is left of the budget: a chunk"
assert steps[1] == {"A": 1, "B": 9, "C": 3}, "a decode, a rest and a prompt, side by side"
assert steps[2] == {"A": 1, "B": 1, "C": 1}
assert all(sum(tokens.values()) <= 16 for tokens in steps)

# %% [markdown]
# Nothing in the scheduler says "prefill" or "decode". Each request is asked for `num_tokens -
# num_computed_tokens`, as far as the budget goes. And C came in before B's prompt was through: that is
# *continuous* batching.
#
# ## Starve it
#
# Now a pool of 6 blocks of 4 tokens. Two requests with prompts of 7 want 12 new tokens each, so both together would
# need 36 slots at the end. There are 24.
#
# *Predict: both are let in. Who loses his blocks, A or B? In which step?*

# %%
scheduler = new_scheduler(num_blocks=6, token_budget=16)
for name in ("A", "B"):
    scheduler.add(new_request(name, num_prompt_tokens=7, max_tokens=12))

entries = []
print_line = trace.tracer(scheduler, sys.stdout, None)
while scheduler.has_unfinished_requests():
    scheduled = step(scheduler)
    print_line(scheduled)
    entries.append(trace.record(len(entries), scheduler, scheduled))

preemptions = [(entry["step"], entry["preempted"]) for entry in entries if entry["preempted"]]
print("preemptions:", preemptions)
assert preemptions == [(6, ["B"])]

# %% [markdown]
# B, the newest. When A needs a fourth block in step 6, none is free: B gives all three back, and goes to the head
# of the queue. Then look at `prefill`. When A has ended, B comes back with 13 tokens at once: its prompt, and the
# six that it had written. Those are not sampled again. They are computed again, as if they had always been a
# prompt.
#
# Preempting costs work. How much? Every token that was computed twice.

# %%
num_computed = sum(entry["prefill"] + entry["decode"] for entry in entries)
num_needed = 2 * (7 + 12 - 1)
print(f"{num_computed} tokens computed, {num_needed} would do with more blocks")
assert num_computed - num_needed == 12

# %% [markdown]
# What can never fit must not come in: it would wait for ever, and everybody behind it. The scheduler leaves that
# to whoever adds requests. You will see the engine refuse one below.
#
# ## With the model
#
# `LLMEngine` is the loop around the scheduler. `add_request` puts something into the queue, `step` computes one
# step and returns what each request got in it.

# %%
import matplotlib.pyplot as plt

from v0_3_scheduler import LLMEngine

engine = LLMEngine(num_blocks=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)

engine.add_request("sky", "The sky is blue because", GREEDY)
for number in range(1, 10):
    if number == 3:
        engine.add_request("whale", "Whales are not fish. They are", GREEDY)
    outputs = {output.request_id: output.outputs[0].text for output in engine.step()}
    print(f"step {number}: {outputs}")
    if number == 3:
        assert outputs.keys() == {"sky", "whale"}
assert not engine.has_unfinished_requests()

# %% [markdown]
# The whale came in the third step, computed its whole prompt beside the sky's decode, and nobody waited.
#
# ## Alone, together, starved: the same tokens
#
# This is the promise that makes all of it safe. Take five prompts, and three engines around the same weights. One
# serves them one by one. One has room for all. One has 7 blocks and a budget of 8 tokens a step.
#
# *Predict: how many of the 100 tokens differ?*

# %%
PROMPTS = [
    "Once upon a time there was a",
    "The three primary colours are",
    "To boil an egg, first",
    "A short list of prime numbers: 2, 3, 5,",
    "The capital of France is",
]
params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def serve(engine: LLMEngine, prompts: dict[str, str]) -> tuple[dict[str, list[int]], int]:
    """The tokens of each request, and the number of preemptions."""
    token_ids: dict[str, list[int]] = {name: [] for name in prompts}
    num_preemptions = 0
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            token_ids[output.request_id] += output.outputs[0].token_ids
            if output.finished:
                num_preemptions += output.metrics.num_preemptions
        engine.scheduler.check_integrity()
    return token_ids, num_preemptions


def new_engine(**options: int) -> LLMEngine:
    """Another engine around the weights that are loaded."""
    return LLMEngine(engine.model, tokenizer=engine.tokenizer, **options)


prompts = {f"request {i}": prompt for i, prompt in enumerate(PROMPTS)}
alone = {}
for name, prompt in prompts.items():
    alone |= serve(engine, {name: prompt})[0]
together, _ = serve(engine, prompts)
tight = new_engine(num_blocks=7, max_num_batched_tokens=8, max_model_len=64)
starved, num_preemptions = serve(tight, prompts)

print(f"preemptions in the small pool: {num_preemptions}")
print(engine.tokenizer.decode(starved["request 4"]))
assert num_preemptions > 0
assert alone == together == starved

# %% [markdown]
# None. It holds for sampled tokens too, with a seed: each output position draws its own random number, whatever
# happened before. Put `temperature=0.9, seed=2` into `params` and run the cell again.
#
# With `seed=1`, on the machine that this was written on, one request goes another way at its thirteenth token
# when it is batched. Its random number lies within a ten-millionth of the border between two tokens, and a batch
# adds up its sums in another order. The promise is as exact as float32 is.
#
# ## What the budget does
#
# A long prompt comes while three others write. How long are they held up? A step is as long as what it computes,
# so the budget decides. First 64 tokens a step, then 16.
#
# *Predict: the long prompt has 181 tokens. In how many steps is it computed, for each of the budgets?*

# %%
LONG = "The rain in Spain stays mainly in the plain. " * 18
assert len(engine.tokenizer.encode(LONG)) == 181


def record(token_budget: int) -> list[dict]:
    """The trace of three short requests, and a long one that comes in step 5."""
    engine = new_engine(num_blocks=64, max_num_batched_tokens=token_budget)
    entries: list[dict] = []

    def on_step(scheduled: SchedulerOutput) -> None:
        entries.append(trace.record(len(entries), engine.scheduler, scheduled))

    engine.on_step = on_step
    for i in range(3):
        engine.add_request(f"short {i}", PROMPTS[i], replace(params, max_tokens=30))
    while engine.has_unfinished_requests():
        if len(entries) == 5:
            engine.add_request("long", LONG, replace(params, max_tokens=8))
        engine.step()
    return entries


traces = {token_budget: record(token_budget) for token_budget in (64, 16)}
figure, rows = plt.subplots(2, figsize=(6, 5), sharex=True)
for axes, (token_budget, entries) in zip(rows, traces.items(), strict=True):
    numbers = [entry["step"] for entry in entries]
    decodes, prefills = ([entry[kind] for entry in entries] for kind in ("decode", "prefill"))
    axes.bar(numbers, decodes, color="#ff9800", label="decode")
    axes.bar(numbers, prefills, bottom=decodes, color="#5c6bc0", label="prefill")
    axes.axhline(token_budget, color="#d32f2f", linestyle="--", label=f"budget {token_budget}")
    axes.set(xlabel="step", ylabel="tokens")
    axes.legend(loc="upper right")
    assert all(entry["decode"] + entry["prefill"] <= token_budget for entry in entries)

# %% [markdown]
# No step goes over its budget, and in each step of the long prompt the three decodes come first: nobody's stream
# stops. With 64 the prompt is through in a few steps, each of them long. With 16 each step is short, and the long
# prompt's first token comes late. There is no free choice here, only a price on both sides.

# %%
num_chunks = {}
for token_budget, entries in traces.items():
    chunks = [entry["scheduled"]["long/0"] for entry in entries if "long/0" in entry["scheduled"]]
    chunks = [num_tokens for num_tokens in chunks if num_tokens > 1]
    num_chunks[token_budget] = len(chunks)
    print(f"budget {token_budget}: chunks of {chunks}")
    assert sum(chunks) == 181
    assert all(entry["decode"] == 3 for entry in entries if entry["scheduled"].get("long/0", 0) > 1)
assert num_chunks[16] > 4 * num_chunks[64]

# %% [markdown]
# ## Refused at the door
#
# A pool of 4 blocks holds 64 tokens. The long prompt can never fit, so the engine says so when it is added, and
# nothing has changed for the others.

# %%
from common.errors import RequestError

small = new_engine(num_blocks=4)
try:
    small.add_request("long", LONG, GREEDY)
except RequestError as error:
    print("RequestError:", error)
else:
    raise AssertionError("it should have been refused")
assert not small.has_unfinished_requests()

# %% [markdown]
# ## Poke on
#
# - Let `Scheduler._preempt_newest` take the *oldest* instead (`running.pop(0)`). Which assert fails first?
# - In the starved example, which is the smallest pool that needs no preemption? Count first.
# - Abort a request in the middle (`engine.abort_request`), and look at `num_free_blocks` before and after.
# - Give the five prompts a pool of 3 blocks. Who runs with whom? (Print the trace.)
#
# Next: [v0.4 puts a server around it](v0_4.py).
