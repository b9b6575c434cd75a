# %% [markdown]
# # v0.1: poke at one request
#
# This notebook takes the engine of [v0.1](../milestones/v0_1.md) apart by hand: text to token ids, token ids to
# logits, logits to the next token, and the KV cache in between. Each cell asserts what the text above it claims.
# Where it says *predict*, write down a number before you look at the output.
#
# On your machine: `python docs/notebooks/v0_1.py`, or `make notebooks` and then Jupyter.

# %%
import time

import matplotlib.pyplot as plt
import torch

from v0_1_single_request import LLM, SamplingParams
from v0_1_single_request.kv_cache import KVCache

llm = LLM(max_model_len=256)
model, tokenizer = llm.model, llm.tokenizer
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
print(f"{model.config.num_layers} layers, {llm.vocab_size:,} tokens in the vocabulary, {model.dtype}")

# %% [markdown]
# ## Tokens in
#
# A model reads no letters. The tokenizer cuts a text into pieces that it knows, and the model sees their numbers.
#
# *Predict: how many tokens is `Why is the sky blue?` And `Rayleigh scattering`?*

# %%
for text in ("Why is the sky blue?", "Rayleigh scattering"):
    token_ids = tokenizer.encode(text)
    pieces = [tokenizer.token_text(token_id) for token_id in token_ids]
    print(len(token_ids), list(zip(pieces, token_ids, strict=True)))
    assert "".join(pieces) == text

# %% [markdown]
# Frequent words are one token, with the space before them. Rare ones are several. Nothing is lost: the pieces
# joined are the text again.
#
# A chat is a text too. The model's template puts the question between marks that it was trained on, and these are
# tokens like any other. So a question of six tokens becomes a prompt of 36.

# %%
question = [{"role": "user", "content": "Why is the sky blue?"}]
prompt = tokenizer.chat_token_ids(question)
print(tokenizer.decode(prompt, skip_special_tokens=False))
print(len(prompt), "tokens")
assert len(prompt) == 36

# %% [markdown]
# ## Tokens out
#
# The engine in one call. Keep its tokens: below you make the same ones by hand.

# %%
[output] = llm.generate([prompt], GREEDY)
answer = output.outputs[0]
for token_id in answer.token_ids:
    print(f"{token_id:>6}  {tokenizer.token_text(token_id)!r}")
assert len(answer.token_ids) == 12
assert answer.finish_reason == "length"

# %% [markdown]
# ## Logits
#
# What does the model give for a prompt? One row of *logits* for each position: a score for every token of the
# vocabulary that could come next.
#
# *Predict: what shape do the logits of the whole prompt have? Which of the rows does the engine use?*

# %%


def new_kv_cache() -> KVCache:
    """An empty slab for one request, marked: a row that was never written is NaN."""
    kv_cache = KVCache(model.config, llm.max_model_len, model.device, model.dtype, llm.attention)
    kv_cache.kv.fill_(float("nan"))
    return kv_cache


@torch.inference_mode()
def compute(kv_cache: KVCache, new_token_ids: list[int]) -> torch.Tensor:
    """One pass of the model over the tokens that it has not seen: a row of logits for each."""
    start = kv_cache.context_len
    kv_cache.begin_step(len(new_token_ids))
    positions = torch.arange(start, start + len(new_token_ids))
    return model.logits(model.forward(torch.tensor(new_token_ids), positions, kv_cache))


logits = compute(new_kv_cache(), prompt)
print("logits:", tuple(logits.shape))
assert logits.shape == (len(prompt), model.config.vocab_size)

# %% [markdown]
# Only the last row says what comes after the prompt. (The engine knows this, and has the other rows left out:
# that is the argument `rows` of `Llama.forward`.) Its softmax gives probabilities, and *greedy* takes the
# largest.

# %%
probabilities = logits[-1].softmax(dim=-1)
top = probabilities.topk(5)
for probability, token_id in zip(top.values.tolist(), top.indices.tolist(), strict=True):
    print(f"{probability:6.1%}  {tokenizer.token_text(token_id)!r}")
assert top.indices[0] == answer.token_ids[0]

# %% [markdown]
# The other rows are not nonsense. Row `i` is what the model expected after token `i`, so the prompt can be
# compared with it. This is all that training looks at.

# %%
expected = logits.argmax(dim=-1).tolist()
for i in range(24, 30):
    read, guess, came = prompt[i], expected[i], prompt[i + 1]
    texts = [repr(tokenizer.token_text(token_id)) for token_id in (read, guess, came)]
    print(f"after {texts[0]:<10} it expects {texts[1]:<10} and there comes {texts[2]}")

# %% [markdown]
# ## The loop, by hand
#
# Take the last row's best token, append it, ask again. The first pass computes the whole prompt (*prefill*), each
# later pass one token (*decode*). It is one loop: "compute what the model has not seen yet".
#
# *Predict: after 12 new tokens, how many rows of the slab are filled?*

# %%
kv_cache = new_kv_cache()
new_token_ids, output_ids, rows_used, seconds = prompt, [], [], []
while len(output_ids) < 12:
    start = time.perf_counter()
    logits = compute(kv_cache, new_token_ids)
    new_token_ids = [int(logits[-1].argmax())]
    seconds.append(time.perf_counter() - start)
    output_ids += new_token_ids
    rows_used.append(kv_cache.context_len)

print("rows after each pass:", rows_used)
print(tokenizer.decode(output_ids))
assert output_ids == answer.token_ids, "by hand as by the engine"
assert rows_used[-1] == len(prompt) + len(output_ids) - 1

# %% [markdown]
# 47, not 48. **The token sampled last has no row.** Its keys and values are computed when it is read, in the pass
# after it, and there is none. Each later milestone counts on this: a prompt of P tokens that has written k has
# `P+k-1` rows.
#
# The slab was filled with NaN at first, so you can see which rows were written. One sign is one row of layer 0.

# %%
is_written = ~kv_cache.kv[0, 0].isnan().any(dim=-1).any(dim=-1)  # [max_model_len]
signs = "".join("■" if written else "·" for written in is_written)
for first in range(0, len(signs), 64):
    print(f"{first:>4}  {signs[first : first + 64]}")
assert is_written.sum() == rows_used[-1]
assert is_written[: rows_used[-1]].all(), "contiguous, from the first row on"

# %% [markdown]
# ## What it reserves, and what it uses
#
# A row is a key and a value in each layer. The slab reserves `max_model_len` rows at once, here 256. The line
# that climbs is what the request has used of them.

# %%
bytes_per_row = kv_cache.kv[:, :, 0].nbytes
print(f"{bytes_per_row:,} bytes a token, {kv_cache.reserved_bytes / 2**20:.2f} MiB reserved")
assert bytes_per_row == 46_080
assert kv_cache.used_bytes == rows_used[-1] * bytes_per_row

figure, axes = plt.subplots()
used = [rows * bytes_per_row / 2**20 for rows in rows_used]
axes.axhline(kv_cache.reserved_bytes / 2**20, color="#d32f2f", label="reserved")
axes.plot(range(1, 13), used, ".-", color="#5c6bc0", label="used")
axes.set(xlabel="pass (the first is the prefill)", ylabel="MiB", ylim=(0, None))
axes.legend(loc="center right")

share = kv_cache.used_bytes / kv_cache.reserved_bytes
print(f"used at the end: {share:.1%}")
print(f"of a slab for 8,192 tokens it would be {rows_used[-1] / 8192:.2%}")
assert share < 0.2

# %% [markdown]
# ## Prefill against decode
#
# *Predict: the prefill computed 36 tokens, a decode one. How many times as long did it take?*

# %% tags=["timed"]
prefill, decode = seconds[0], sorted(seconds[1:])[len(seconds) // 2]
for phase, total, num_tokens in (("prefill", prefill, len(prompt)), ("decode", decode, 1)):
    per_token = total / num_tokens
    print(f"{phase:<8} {total * 1000:5.1f} ms, {num_tokens:>2} tokens: {per_token * 1000:5.2f} ms a token")
assert prefill / len(prompt) < decode, "a token of the prefill is cheaper than one of a decode"

# %% [markdown]
# Far less than 36 times. A decode reads all weights for one row of work; the prefill reads them once for 36.
# Reading is what takes the time, so the rows after the first are nearly free. v0.3 lives on this: it decodes many
# requests in one pass.
#
# ## Without the cache
#
# Does one need the cache? The logits depend on the tokens alone, so it works without: begin anew in each pass,
# with an empty slab and the whole sequence.

# %% tags=["timed"]
token_ids, seconds_without = list(prompt), []
while len(token_ids) < len(prompt) + 12:
    start = time.perf_counter()
    token_ids.append(int(compute(new_kv_cache(), token_ids)[-1].argmax()))
    seconds_without.append(time.perf_counter() - start)
rows_with = len(prompt) + 11
rows_without = sum(len(prompt) + i for i in range(12))

print(f"rows computed: {rows_with} with the cache, {rows_without} without")
print(f"time: {sum(seconds):.2f} s with the cache, {sum(seconds_without):.2f} s without")
assert token_ids[len(prompt) :] == output_ids, "the same tokens"
assert rows_without > 10 * rows_with

# %% [markdown]
# The same tokens, for ten times the rows. The cache changes what is computed twice, never what comes out. And the
# longer the answer, the larger the factor: without the cache the work grows with the square of the length.
#
# ## Poke on
#
# - Set `max_model_len=40` and run all. What does the engine say, and in which cell?
# - In `compute`, let `positions` begin at 0 in each pass. The shapes stay right. What happens to the text, and
#   why is no error raised?
# - Set one row of `kv_cache.kv` to zero in all layers after the prefill, row 30 or row 34, and go on. Which one
#   changes the answer?
#
# Next: [v0.2 cuts the slab into blocks](v0_2.py).
