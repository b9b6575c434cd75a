# %% [markdown]
# # v0.6: poke at shared blocks
#
# Which blocks can two requests share, how are they found, and what happens when one of them wants to write?
# [v0.6](../milestones/v0_6.md) answers with a block manager that knows neither tensors nor text. So most of this
# notebook runs without a model, and the last part has a short chat with one.
#
# On your machine: `python docs/notebooks/v0_6.py`, or `make notebooks` and then Jupyter.

# %%
from unittest.mock import patch

from v0_6_prefix_cache import hash_chain
from v0_6_prefix_cache.block_manager import BlockManager, TokenIds


def tokens(ids: list[int]) -> TokenIds:
    """What the block manager asks for: a request's tokens from one position up to another."""
    return lambda start, end: ids[start:end]


def compute(manager: BlockManager, name: str, ids: list[int]) -> int:
    """Take what is cached, pretend to compute the rest, and publish it; returns how many tokens were cached."""
    prefix = manager.find_prefix(tokens(ids), len(ids) - 1)
    manager.allocate(name, len(ids), prefix)
    manager.publish(name, tokens(ids))
    return len(prefix) * manager.block_size


# %% [markdown]
# ## Who shares what
#
# Blocks of 4 tokens, so that everything fits on a line. Four prompts of 10 tokens. A and B begin alike. C has the
# same tokens as A in its *second* block only. D is A again.
#
# *Predict: how many tokens are found for each?*

# %%
A = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
B = [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
C = [0, 2, 3, 4, 5, 6, 7, 8, 9, 9]

manager = BlockManager(num_blocks=16, block_size=4)
found = {name: compute(manager, name, ids) for name, ids in (("A", A), ("B", B), ("C", C), ("D", A))}
for name, num_tokens in found.items():
    print(f"{name}: {num_tokens:2d} tokens cached, blocks {manager.block_table(name)}")
assert found == {"A": 0, "B": 8, "C": 0, "D": 8}
assert manager.ref_count(0) == 3, "A, B and D own the first block"

# %% [markdown]
# C finds nothing, although its second block has A's tokens: its keys and values would be others, as the token 0 in
# front of them has been mixed in.
#
# ## The chain
#
# A block's name is made of its parent's name and its own tokens. Here are the names of A's and C's two full blocks,
# cut to eight digits.


# %%
def names(ids: list[int]) -> list[str]:
    """The digests of a prompt's full blocks."""
    link, digests = hash_chain.root(None), []
    for start in range(0, len(ids) - 3, 4):
        link = hash_chain.extend(link, ids[start : start + 4])
        digests.append(link.digest.hex()[:8])
    return digests


print("A", names(A), " B", names(B), " C", names(C))
assert names(A) == names(B)
assert A[4:8] == C[4:8]
assert names(A)[1] != names(C)[1], "the same tokens behind another past"

# %% [markdown]
# ## Collide the hashes
#
# SHA-256 doesn't collide. What if it did? Below, every digest is cut down to a single bit, so there are two names
# for everything in the world. A new block manager computes A, and then looks for prompts it has never seen.
#
# *Predict: what is found for C and for B?*


# %%
def one_bit(parent: bytes, content: bytes) -> bytes:
    """A hash function that nobody should use."""
    return bytes([(sum(parent) + sum(content)) % 2])


with patch.object(hash_chain, "digest", one_bit):
    manager = BlockManager(num_blocks=16, block_size=4)
    found = {name: compute(manager, name, ids) for name, ids in (("A", A), ("C", C), ("B", B))}
    manager.check_integrity()
print(found)
assert found["C"] == 0, "a name alone is not enough: the tokens are compared"
assert found["B"] == 4, "its second block could not be published: the name was taken"

# %% [markdown]
# C is still not given A's blocks. A collision costs a hit at times (two blocks can't both be found under one name),
# but never a wrong answer.
#
# ## What is forgotten first
#
# A pool of 6 blocks. A needs three of them, then it is done. B needs three, then it is done, too. Then come two
# new tokens at a time, in requests that share nothing, and take one block each.
#
# *Predict: which of A's blocks is forgotten first?*

# %%
manager = BlockManager(num_blocks=6, block_size=4)
OTHER = [7, 7, 7, 7, 7, 7, 7, 7, 7, 7]
for name, ids in (("A", A), ("other", OTHER)):
    compute(manager, name, ids)
    manager.free(name)
cached = []
for number in range(7):
    num_blocks = [len(manager.find_prefix(tokens(ids), 9)) for ids in (A, OTHER)]
    cached.append(num_blocks)
    print(f"{number} small requests: {num_blocks[0]} blocks of A are found, {num_blocks[1]} of the other")
    if number < 6:
        manager.allocate(f"small {number}", 2)
assert cached[0] == [2, 2]
assert cached[-1] == [0, 0]
assert [1, 2] in cached, "the end of A goes before its beginning"

# %% [markdown]
# First the two blocks that were never full, then A's second block, then its first, then the other's. The oldest goes
# first, and within a request the last.
#
# ## Copy on write
#
# A prompt of 6 tokens, and two forks of it: three choices. Each wants to write its first token.
#
# *Predict: how many blocks are copied? And with a prompt of 8 tokens?*

# %%
for num_tokens in (6, 8):
    manager = BlockManager(num_blocks=16, block_size=4)
    manager.allocate("D/0", num_tokens)
    manager.fork("D/0", "D/1")
    manager.fork("D/0", "D/2")
    copies = [manager.append(f"D/{choice}") for choice in range(3)]
    print(f"{num_tokens} tokens: copies {copies}, tables {[manager.block_table(f'D/{choice}') for choice in range(3)]}")
    manager.check_integrity()
    assert len([copy for copy in copies if copy is not None]) == (2 if num_tokens == 6 else 0)

# %% [markdown]
# With 6 tokens the second block is half full and has three owners. Two get copies, the last one keeps the original.
# With 8 tokens there is nothing to write into: each takes a new block.
#
# ## A chat
#
# Now with the model: a conversation, which a client sends again as a whole in each turn.

# %%
from v0_6_prefix_cache import LLM, SamplingParams

llm = LLM(num_blocks=256)
params = SamplingParams(temperature=0.0, max_tokens=24)


def chat(questions: list[str]) -> list[tuple[int, int]]:
    """Of each turn: the tokens of its prompt, and how many of them were cached."""
    messages: list[dict[str, str]] = []
    turns = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        [output] = llm.chat(messages, params)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        turns.append((len(output.prompt_token_ids), output.num_cached_tokens))
    return turns


QUESTIONS = ["Name a river in France.", "How long is it?", "Which cities lie on it?", "Which of them is the largest?"]
turns = chat(QUESTIONS)
for number, (num_prompt_tokens, num_cached) in enumerate(turns, 1):
    print(f"turn {number}: {num_prompt_tokens:3d} tokens, {num_cached:3d} cached")
assert turns[0][1] == 0
assert all(num_cached > 0 for _, num_cached in turns[1:])
assert all(num_prompt_tokens - num_cached < 64 for num_prompt_tokens, num_cached in turns[1:])

# %% [markdown]
# From the second turn on only the end is computed: the last block of the answer, and the new question. The answers
# were computed when they were written, and their blocks are found like any others.
#
# And the same with a cache that has been emptied, and again with what it has learnt:

# %%
llm.reset_prefix_cache()
cold, warm = chat(QUESTIONS), chat(QUESTIONS)
print("cold:", [num_cached for _, num_cached in cold])
print("warm:", [num_cached for _, num_cached in warm])
assert cold == turns
assert all(a[1] <= b[1] for a, b in zip(cold, warm, strict=True))
assert warm[0][1] > 0

# %% [markdown]
# ## Poke on
#
# - Let `BlockManager.free` release the blocks from the first to the last (drop the `reversed`), and run the part on
#   what is forgotten again. What is found after three small requests, and what is it worth?
# - Give A and B different salts (`find_prefix(..., salt="a")`, and `allocate` too). What do they share?
# - In the collision, which of A's and B's blocks have the same name? Print the digests.
# - `params` with `n=4`: watch `manager.num_free_blocks` of `llm.engine.scheduler.block_manager` from step to step.
