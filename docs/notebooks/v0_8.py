# %% [markdown]
# # v0.8: poke at events
#
# The engine says what it does, event by event ([v0.8](../milestones/v0_8.md)). Here four prompts run in a pool that is
# too small for them, and a listener of a dozen lines keeps what it is told. Everything else is made from that: a table
# of steps, what the blocks were used for, and which request waited when.
#
# On your machine: `python docs/notebooks/v0_8.py`, or `make notebooks` and then Jupyter.

# %% [markdown]
# ## A listener
#
# A listener has two methods. `on_events` gets what has happened since it was last called: the events of a step, or of
# a request that came or left. `on_reset` says that a step was cut short.

# %%
from collections import Counter
from typing import Any

from v0_8_visualizer import LLM, SamplingParams
from v0_8_visualizer.events import TimedEvents, as_message
from v0_8_visualizer.snapshot import take_snapshot


class Notes:
    """Keeps every event as a dictionary, with its moment and the number of its step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.step = 0

    def on_events(self, events: TimedEvents) -> None:
        for moment, event in events:
            self.rows.append({"step": self.step, "time": moment} | as_message(event))
            self.step += event.type == "step"  # the last event of its step

    def on_reset(self) -> None:
        raise AssertionError("no step fails here")


llm = LLM(num_blocks=12, max_num_batched_tokens=32)
notes = Notes()
before = take_snapshot(llm.engine)
unsubscribe = llm.engine.events.subscribe(notes)

QUESTIONS = ["Why is the sky blue?", "What is a prime number?", "Name three rivers.", "Who wrote Hamlet?"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], GREEDY, use_tqdm=False)
unsubscribe()
print(f"{len(notes.rows)} events in {notes.step} steps")

# %% [markdown]
# ## A table
#
# One row for each event, one column for each field that some event has. With pandas that would be
# `pandas.DataFrame(notes.rows)`; lists will do here.
#
# *Predict: of which type are there the most?*

# %%
counts = Counter(row["type"] for row in notes.rows)
for name, num in counts.most_common():
    print(f"{num:5d}  {name}")
assert counts["step"] == notes.step
assert counts["request_queued"] == counts["request_finished"] == 4
assert counts["first_token"] == 4

# %% [markdown]
# The text of the answers is in the events as well, piece by piece, in the order in which it was written:

# %%
for output, question in zip(outputs, QUESTIONS, strict=True):
    pieces = [row["text"] for row in notes.rows if "text" in row and row["request_id"] == f"{output.request_id}/0"]
    print(f"{question:24} {pieces[:6]} ...")
    assert "".join(pieces) == output.outputs[0].text

# %% [markdown]
# ## Step by step
#
# The event `step` sums a step up. Here are those in which more happened than one decode each, and the last. A step
# computes at most 32 tokens here, and the prompts have some 35 each.
#
# *Predict: four prompts, 12 blocks of 16 tokens, at most 40 new tokens. Who is preempted, and who ends last?*

# %%
steps = [row for row in notes.rows if row["type"] == "step"]
print("step  prefill  decode  running  waiting  free  preempted, refused")
for row in steps:
    prefill = sum(part["num_tokens"] for part in row["scheduled"] if not part["is_decode"])
    decode = sum(part["num_tokens"] for part in row["scheduled"] if part["is_decode"])
    others = [*row["preempted"], f"({row['refused']}: {row['refused_reason']})" if row["refused"] else ""]
    numbers = [prefill, decode, row["num_running"], row["num_waiting"], row["num_free_blocks"]]
    if prefill or row["preempted"] or row is steps[-1]:
        print(f"{row['number']:4d}" + "".join(f"{num:8d}" for num in numbers) + "  " + " ".join(others))
assert [row["number"] for row in steps] == list(range(len(steps)))
assert any(row["preempted"] for row in steps), "the pool is too small for all four"
assert steps[-1]["num_free_blocks"] == 12

# %% [markdown]
# The newest goes first, and comes back last. When both have lost their blocks, nobody is admitted for a while: known
# tokens have to fit as a whole.
#
# ## Where a step's time goes
#
# `step` also has four durations: deciding, computing, taking in the tokens, making text of them.

# %%
PARTS = ("schedule_seconds", "run_seconds", "update_seconds", "output_seconds")
total = sum(row[part] for row in steps for part in PARTS)
for part in PARTS:
    share = sum(row[part] for row in steps) / total
    print(f"{part:17} {share:6.1%}")
assert sum(row["run_seconds"] for row in steps) / total > 0.5

# %% [markdown]
# ## Fold
#
# Whoever knows a state and applies each event to it knows the next state. For blocks and their owners these are five
# rules, and for a request's state four.


# %%
class Fold:
    """Which request is in which state and owns which blocks, and which blocks the prefix cache can find."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self.tables = {request["request_id"]: list(request["block_table"]) for request in snapshot["requests"]}
        self.states = {request["request_id"]: request["state"] for request in snapshot["requests"]}
        self.cached = set(snapshot["cached_blocks"])
        self.num_blocks = snapshot["settings"]["num_blocks"]

    def take(self, row: dict[str, Any]) -> None:
        request = row.get("request_id")
        match row["type"]:
            case "request_queued":
                self.tables[request], self.states[request] = [], "waiting"
            case "request_admitted":
                self.states[request] = "prefill"
            case "first_token" | "decode":
                self.states[request] = "decode"
            case "request_preempted":
                self.states[request] = "preempted"
            case "request_finished":
                del self.tables[request], self.states[request]
            case "block_allocated" | "block_shared":
                self.tables[request].append(row["block"])
            case "block_freed":
                self.tables[request].remove(row["block"])
            case "block_cached":
                self.cached.add(row["block"])
            case "block_evicted":
                self.cached.remove(row["block"])

    def blocks(self) -> dict[str, int]:
        """How many blocks are what."""
        owners = Counter(block for table in self.tables.values() for block in table)
        shared = sum(num > 1 for num in owners.values())
        cached = len(self.cached - owners.keys())
        free = self.num_blocks - len(owners) - cached
        return {"one owner": len(owners) - shared, "shared": shared, "free, findable": cached, "free": free}


fold = Fold(before)
usage, states = [], []
for row in notes.rows:
    fold.take(row)
    if row["type"] == "step":
        usage.append(fold.blocks())
        states.append(dict(fold.states))
        assert usage[-1]["free, findable"] + usage[-1]["free"] == row["num_free_blocks"]
after = take_snapshot(llm.engine)
assert fold.tables == {}
assert fold.cached == set(after["cached_blocks"])
print("after the last step:", usage[-1])

# %% [markdown]
# The fold has agreed with the engine's own count after each step, and with a snapshot at the end.
#
# ## What the blocks were used for
#
# *Predict: when are blocks shared? (Every chat begins with the same system prompt.)*

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots()
shades = ["tab:blue", "tab:purple", "tab:cyan", "lightgrey"]
heights = [[entry[name] for entry in usage] for name in usage[0]]
axes.stackplot(range(len(usage)), *heights, labels=usage[0], colors=shades)
axes.set(xlabel="step", ylabel="blocks", xlim=(0, len(usage) - 1), ylim=(0, 12))
figure.legend(loc="outside upper center", ncols=4)
plt.show()

# %% [markdown]
# From step 1 on: the first prompt's first block is computed by then, and the others begin with the same tokens. One
# block is all they have in common. When two requests come back after the others have ended, they share it again. "Free,
# findable" is what the prefix cache remembers of requests that own nothing any more.
#
# ## Who waited when
#
# One line for each request, with its state at the end of each step.

# %%
COLOURS = {"waiting": "lightgrey", "prefill": "tab:orange", "decode": "tab:blue", "preempted": "tab:red"}
names = list(dict.fromkeys(row["request_id"] for row in notes.rows if row["type"] == "request_queued"))
figure, axes = plt.subplots(figsize=(6, 2.4))
for number, name in enumerate(names):
    for step, at_end in enumerate(states):
        if name in at_end:
            axes.barh(number, 1, left=step, color=COLOURS[at_end[name]])
axes.set(xlabel="step", xlim=(0, len(states)), yticks=range(len(names)), yticklabels=QUESTIONS)
axes.invert_yaxis()
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
figure.legend(handles, COLOURS, loc="outside upper center", ncols=4)
plt.show()

lost = {name: sum(at_end.get(name) == "preempted" for at_end in states) for name in names}
print("steps without blocks:", lost)
assert lost[names[0]] == 0, "the oldest request is never preempted while another one runs"
assert max(lost.values()) > 0

# %% [markdown]
# ## Poke on
#
# - `LLM(num_blocks=24)`: nobody is preempted. When are blocks shared now?
# - Add `n=3` to the parameters, and look for `request_forked` and `block_copied`.
# - Raise an error in `on_events`. What happens to the answers?
# - Drop every tenth event before the fold. After how many steps does it disagree?
