# %% [markdown]
# # v0.7: poke at guesses
#
# A drafter guesses, the model checks ([v0.7](../milestones/v0_7.md)). Here you look at guesses one by one, write a
# drafter that is always right and one that is always wrong, and find out which of the real ones pay. The first half
# needs no model.
#
# On your machine: `python docs/notebooks/v0_7.py`, or `make notebooks` and then Jupyter.

# %% [markdown]
# ## Looking up what came next
#
# The n-gram drafter knows only the request's own tokens. It looks for the last few of them further up, and proposes
# what followed.
#
# *Predict: what does it propose behind each of these texts? At most 4 letters, and at least 2 must match.*

# %%
from common.sampling_params import SamplingParams, SamplingState
from v0_7_speculative.drafter import NgramDrafter
from v0_7_speculative.request import Request


def guess(text: str, most: int = 4, ngram_min: int = 2, ngram_max: int = 4) -> str:
    """What the drafter proposes behind a text of ASCII letters."""
    state = SamplingState.create(SamplingParams(), [*text.encode()], (), seed=0)
    request = Request("R", state)
    NgramDrafter(ngram_min, ngram_max).count(request, most)
    return bytes(request.draft_token_ids).decode()


guesses = {text: guess(text) for text in ("abcdefXY abcd", "abcX abcY abc", "ababab", "abcdef", "a cat, a dog, a")}
for text, found in guesses.items():
    print(f"{text!r:20} -> {found!r}")
assert guesses["abcdefXY abcd"] == "efXY"
assert guesses["abcX abcY abc"] == "Y ab", "of two equal matches the later one"
assert guesses["abcdef"] == "", "nothing was here before"

# %% [markdown]
# In `ababab` the last match overlaps with the end of the text, so that few letters follow it.
#
# ## One step
#
# Request R of the lesson, with a scheduler, a drafter, and no model. In its place stands one line: every row draws the
# letter after its own. What follows that line is how drafts are checked.
#
# *Predict: with K = 2 instead of 4, which steps change?*

# %%
from v0_7_speculative.block_manager import BlockManager
from v0_7_speculative.drafter import Drafter
from v0_7_speculative.scheduler import Scheduler, SchedulerOutput

Steps = list[tuple[int, int]]


def run(drafter: Drafter, num_drafts: int, prompt: bytes = b"Say: abcdefXY, and again: abc") -> tuple[bytes, Steps]:
    """The answer of 8 letters, and of each step behind the prompt's how many drafts it had and how many were right."""
    scheduler = Scheduler(
        BlockManager(num_blocks=8, block_size=16),
        max_num_batched_tokens=512,
        max_num_seqs=8,
        max_request_len=129,
        num_speculative_tokens=num_drafts,
        count_drafts=drafter.count,
    )
    request = Request("R", SamplingState.create(SamplingParams(max_tokens=8), [*prompt], (), seed=0))
    scheduler.add(request)
    steps: Steps = []
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule()
        drafter.draft(scheduled)
        drafts = request.draft_token_ids if scheduled.num_draft_tokens[0] else []
        rows = [*request.token_ids(request.num_tokens - 1, request.num_tokens), *drafts]
        draws = [row + 1 for row in rows]
        num_accepted = next((i for i, draft in enumerate(drafts) if draft != draws[i]), len(drafts))
        scheduler.update(scheduled, {"R": draws[: num_accepted + 1]})
        scheduler.check_integrity()
        steps.append((len(drafts), num_accepted))
    return bytes(request.sampling.output_token_ids), steps[1:]


for num in (4, 2, 1):
    answer, steps = run(NgramDrafter(2, 4), num)
    print(f"K = {num}: {answer.decode()}  {steps}")
    assert answer == b"defghijk"

# %% [markdown]
# The answer is the same each time. Two drafts instead of four lose nothing here, as only two were right.
#
# ## Write a drafter
#
# A drafter has two methods: `count` says how many drafts it will have, `draft` puts them into the requests. This one
# knows the model's secret.
#
# *Predict: how many steps does it take for 8 letters with K = 4? And if it is always wrong?*


# %%
class Oracle:
    """Proposes the letters that follow, or others."""

    def __init__(self, right: bool) -> None:
        self.right = right

    def count(self, request: Request, most: int) -> int:
        return most

    def draft(self, scheduled: SchedulerOutput) -> None:
        for request, num_drafts in zip(scheduled.requests, scheduled.num_draft_tokens, strict=True):
            [last] = request.token_ids(request.num_tokens - 1, request.num_tokens)
            request.draft_token_ids = [last + 1 + i if self.right else 33 for i in range(num_drafts)]


for right in (True, False):
    answer, steps = run(Oracle(right), 4)
    print(f"always {'right' if right else 'wrong'}: {answer.decode()}  {steps}")
    assert answer == b"defghijk"
    assert len(steps) == (2 if right else 7)

# %% [markdown]
# The first letter comes with the prompt. Of the other seven, five come from one step (four drafts and one more). Then
# two are left, so K shrinks to 1: one draft and one more.
#
# ## When does it pay?
#
# The formula of the lesson, with costs in plain steps. *d* is one pass of the drafter, and `check[K]` a step with K + 1
# rows. These are the figures that the lesson quotes.
#
# *Predict: a drafter that costs a tenth of a step and is right in 60 % of all cases. Which K is best?*

# %%
import json
from pathlib import Path

import v0_7_speculative

RESULTS = Path(v0_7_speculative.__file__).parent / "measurements" / "experiment.json"
costs = json.loads(RESULTS.read_text())["costs"]
check = {int(rows) - 1: entry["plain_steps"]["median"] for rows, entry in costs["steps"].items()}


def speed_up(acceptance: float, d: float, num_drafts: int) -> float:
    """Tokens of a step over its price, if each guess is right with the same probability."""
    tokens = sum(acceptance**i for i in range(num_drafts + 1))
    return tokens / (num_drafts * d + check[num_drafts])


for acceptance, d in ((0.6, 0.1), (0.9, 0.1), (0.9, 0.0), (0.6, 0.5), (1.0, 1.0)):
    line = ", ".join(f"K={num}: {speed_up(acceptance, d, num):.2f}" for num in (1, 2, 4, 8))
    print(f"right in {acceptance:4.0%}, pass {d:.1f}   {line}")
assert all(speed_up(1.0, 1.0, num) < 1 for num in check if num), "a perfect drafter that is as slow as the model loses"
assert speed_up(0.9, 0.0, 8) > speed_up(0.9, 0.0, 1)

# %% [markdown]
# ## The real model
#
# First one answer without drafts, then with each drafter. Early exit runs the first layers of the model's own 30.
#
# *Predict: how many of the guesses after 5 layers are right? After 28?*

# %%
from v0_7_speculative import LLM

plain = LLM(num_blocks=64)
QUESTION = 'Rewrite this text with the name "Anna" replaced by "Maria": Anna lives in a small house near the river.'
PARAMS = SamplingParams(temperature=0.0, max_tokens=24)
[expected] = plain.chat([[{"role": "user", "content": QUESTION}]], PARAMS, use_tqdm=False)
print(expected.outputs[0].text)


def acceptance(params: SamplingParams = PARAMS, **args: object) -> tuple[list[int], str]:
    """The answer's tokens, and how many of the drafts were right."""
    llm = LLM(plain.engine.model, tokenizer=plain.tokenizer, num_blocks=64, **args)
    drafts: Steps = []

    def note(scheduled: SchedulerOutput) -> None:
        drafts.append((sum(scheduled.num_draft_tokens), sum(scheduled.num_accepted_tokens.values())))

    llm.engine.on_step = note
    [output] = llm.chat([[{"role": "user", "content": QUESTION}]], params, use_tqdm=False)
    right, total = sum(step[1] for step in drafts), sum(step[0] for step in drafts)
    return output.outputs[0].token_ids, f"{right:3d} of {total:3d} right, {len(drafts):2d} steps"


ways: dict[str, dict[str, object]] = {"n-gram": {"speculative_method": "ngram"}}
for layer in (5, 15, 28):
    ways[f"layer {layer}"] = {"speculative_method": "early_exit", "exit_layer": layer, "num_speculative_tokens": 2}
for name, args in ways.items():
    token_ids, seen = acceptance(**args)
    print(f"{name:9} {seen}")
    assert token_ids == expected.outputs[0].token_ids, "a guess must not change the answer"

# %% [markdown]
# ## With a seed
#
# Sampled answers, too, are the same with and without drafts: each position has its own random number.

# %%
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
without, _ = acceptance(SAMPLED)
for name, args in ways.items():
    token_ids, seen = acceptance(SAMPLED, **args)
    print(f"{name:9} {seen}")
    assert token_ids == without

# %% [markdown]
# ## Poke on
#
# - Let the always-wrong `Oracle` be wrong only at the third place. How many tokens does a step bring?
# - `run(NgramDrafter(2, 4), 4, prompt=b"abcabcabc")`: what does it guess, and is it ever right?
# - Set `speculative_disable_below=0.5` for layer 5 and a longer answer, and look at when the drafts stop.
# - In `speed_up`, which acceptance would early exit at layer 15 need with K = 2? Solve it by trying.
