# %% [markdown]
# # v0.2: poke at the blocks
#
# The block manager of [v0.2](../milestones/v0_2.md) is small enough to be driven by hand. The first half of this
# notebook needs no model at all: it hands out blocks, fills them, runs out of them and takes them back. The
# second half runs the model on blocks that lie all over the pool.
#
# On your machine: `python docs/notebooks/v0_2.py`, or `make notebooks` and then Jupyter.

# %%
import random

import matplotlib.pyplot as plt

from v0_2_block_manager.block_manager import BlockManager

manager = BlockManager(num_blocks=8, block_size=4)
print(manager.num_free_blocks, "free blocks of", manager.block_size, "tokens")

# %% [markdown]
# ## A table that grows
#
# A prompt of 6 tokens comes in, and then one token at a time. One sign below is one slot: full, or empty and
# taken all the same.
#
# *Predict: at which of the tokens 7, 8, 9, 10 does the table get longer?*

# %%


def draw(manager: BlockManager, request_id: str) -> str:
    """A request's table, and its slots block by block."""
    num_tokens, table = manager.num_tokens(request_id), manager.block_table(request_id)
    size = manager.block_size
    slots = "■" * num_tokens + "·" * (len(table) * size - num_tokens)
    by_block = [slots[i : i + size] for i in range(0, len(slots), size)]
    return f"{num_tokens:>3} tokens  {table!s:<16} " + " ".join(by_block)


manager.allocate("A", 6)
print(draw(manager, "A"))
for _ in range(7):
    manager.append("A")
    print(draw(manager, "A"))
assert manager.block_table("A") == [0, 1, 2, 3]
assert manager.num_tokens("A") == 13

# %% [markdown]
# At 9: tokens 7 and 8 fill the second block. A block comes when the last one is full *and* another token needs a
# slot, not before.
#
# ## The tail's waste
#
# What a request wastes is the empty end of its last block. So the most it can waste does not depend on its
# length.
#
# *Predict: how many slots is that, for blocks of 4?*

# %%
wasted = []
for num_tokens in range(1, 33):
    wasted.append(manager.num_blocks_for(num_tokens) * manager.block_size - num_tokens)
print(wasted)
assert max(wasted) == manager.block_size - 1

# %% [markdown]
# ## Neighbours
#
# A second request comes while the first one grows. Blocks go to whoever needs the next one.

# %%
manager = BlockManager(num_blocks=8, block_size=4)
for request_id in ("A", "B"):
    manager.allocate(request_id, 4)
for _ in range(8):
    manager.append("A")
    manager.append("B")
for request_id in ("A", "B"):
    print(request_id, draw(manager, request_id))
assert manager.block_table("A") == [0, 2, 4]
assert manager.block_table("B") == [1, 3, 5]

# %% [markdown]
# Neither has two blocks side by side, and neither needs them. A token's place is found by two divisions, from the
# table alone: token `i` lies in block `table[i // 4]`, at offset `i % 4`.
#
# *Predict: in which of the pool's 32 slots is token 9 of request B?*

# %%


def slot(manager: BlockManager, request_id: str, i: int) -> int:
    """Where in the pool token `i` of a request lies."""
    size = manager.block_size
    return manager.block_table(request_id)[i // size] * size + i % size


print("token 9 of B is in slot", slot(manager, "B", 9))
assert slot(manager, "B", 9) == 5 * 4 + 1
all_slots = [slot(manager, request_id, i) for request_id in ("A", "B") for i in range(12)]
assert len(set(all_slots)) == 24, "no two tokens share a slot"

# %% [markdown]
# ## Out of blocks
#
# Two blocks are left. A third request would like three. `can_allocate` is the question, and no is a normal
# answer. To act without asking is a fault of the engine, and the error names it.

# %%
print("room for 8 tokens?", manager.can_allocate(8))
print("room for 9 tokens?", manager.can_allocate(9))
try:
    manager.allocate("C", 9)
except ValueError as error:
    print("ValueError:", error)
else:
    raise AssertionError("it should have been refused")
assert manager.num_free_blocks == 2, "what is refused takes nothing"
manager.check_integrity()

# %% [markdown]
# The same happens to a request in the middle of its answer, when others have taken the rest.
#
# *Predict: B has 12 tokens in three full blocks and no block is free. Can A, with 11 tokens, go on? Can B?*

# %%
manager = BlockManager(num_blocks=6, block_size=4)
manager.allocate("A", 11)
manager.allocate("B", 12)
print(manager.num_free_blocks, "free blocks")
print("can A append?", manager.can_append("A"))
print("can B append?", manager.can_append("B"))
assert manager.can_append("A")
assert not manager.can_append("B")

# %% [markdown]
# A has a slot in its last block, B has none. Who should wait, and who should give blocks back? That is a question
# of policy, and the block manager has no opinion. v0.3 is about it.
#
# ## Back to the free list
#
# Blocks that come back go to the end of the free list, a request's last block first. New ones are taken from its
# front.
#
# *Predict: six blocks, A has [0, 1, 2] and B has [3, 4], so 5 is free. A ends. Which blocks does a request get
# that takes all there are?*

# %%
manager = BlockManager(num_blocks=6, block_size=4)
manager.allocate("A", 12)
manager.allocate("B", 8)
manager.free("A")
print(manager.num_free_blocks, "free blocks")
manager.allocate("C", 16)
print("C", draw(manager, "C"))
assert manager.block_table("C") == [5, 2, 1, 0]
manager.check_integrity()

# %% [markdown]
# Two mistakes that a real engine must not make, and what they are answered with: to free twice, and to begin a
# table twice.

# %%
for mistake in (lambda: manager.free("A"), lambda: manager.allocate("B", 1)):
    try:
        mistake()
    except ValueError as error:
        print("ValueError:", error)
    else:
        raise AssertionError("it should have been refused")
manager.check_integrity()

# %% [markdown]
# ## How large should a block be?
#
# Take 500 requests of 20 to 800 tokens. Large blocks waste more in the tail; small ones make long tables, and
# more pieces to gather.
#
# *Predict: what share of the memory is wasted with blocks of 16? And of 256?*

# %%
lengths = random.Random(0).choices(range(20, 801), k=500)
sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
waste, table_length = [], []
for block_size in sizes:
    pool = BlockManager(num_blocks=1, block_size=block_size)  # it is only asked to count
    num_blocks = [pool.num_blocks_for(length) for length in lengths]
    waste.append(1 - sum(lengths) / (sum(num_blocks) * block_size))
    table_length.append(sum(num_blocks) / len(num_blocks))
for row in zip(sizes, waste, table_length, strict=True):
    print("blocks of {:>3}: {:6.1%} wasted, {:6.1f} blocks in a table".format(*row))

figure, left = plt.subplots()
left.plot(sizes, [100 * share for share in waste], "o-", color="#d32f2f")
left.set_xscale("log", base=2)
left.set_xticks(sizes, sizes)
left.set_xlabel("block size")
left.set_ylabel("% wasted", color="#d32f2f")
right = left.twinx()
right.plot(sizes, table_length, "s--", color="#5c6bc0")
right.set_ylabel("blocks in a table", color="#5c6bc0")

assert waste == sorted(waste), "larger blocks waste more"
assert waste[sizes.index(16)] < 0.03

# %% [markdown]
# From 8 to 32 both are small; 16 is vLLM's usual size and ours. And a slab of 8,192 slots, as in v0.1, would
# waste more than nine tenths.

# %%
slab_waste = 1 - sum(lengths) / (len(lengths) * 8192)
print(f"slab of 8,192: {slab_waste:.1%} wasted")
assert slab_waste > 0.9

# %% [markdown]
# ## The model on blocks
#
# Now the engine, with a pool of 12 blocks. `stream` gives an output for each token; look at the table each time.

# %%
from v0_2_block_manager import LLM, SamplingParams

llm = LLM(num_blocks=12)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPT = "The sky is blue because"

in_order = []
table: list[int] = []
for output in llm.stream(PROMPT, GREEDY):
    if llm.block_manager.block_table(output.request_id) != table:
        table = llm.block_manager.block_table(output.request_id)
        print(draw(llm.block_manager, output.request_id))
    in_order += output.outputs[0].token_ids
print(llm.tokenizer.decode(in_order))
assert table == [0, 1]
assert llm.block_manager.num_free_blocks == 12, "all came back"

# %% [markdown]
# Does it matter *where* the blocks are? Take every block, give some back in a wild order, and ask again.
#
# *Predict: which tokens come out when the request's blocks are 9 and 3?*

# %%
blocks = llm.block_manager
order = []
for i in range(12):
    blocks.allocate(f"holder {i}", 1)
    order += blocks.block_table(f"holder {i}")
for block in (9, 3, 7):
    blocks.free(f"holder {order.index(block)}")

scattered, slots = [], []
for output in llm.stream(PROMPT, GREEDY):
    scattered += output.outputs[0].token_ids
    table = blocks.block_table(output.request_id)
    slots += llm.kv_cache.slot_mapping.tolist()
print("table", table)
print("slots written:", slots)
assert table == [9, 3]
assert slots == [table[i // 16] * 16 + i % 16 for i in range(len(slots))]
assert scattered == in_order, "the same tokens"

# %% [markdown]
# The same ones. The table is all that attention knows of the pool.
#
# ## Full, in the engine's words
#
# Three blocks are free now, room for 48 tokens. Two kinds of "no room" are told apart. A request that the pool
# could *never* hold is refused at once, with the numbers. One that only finds the pool taken, by a stream that
# somebody has left open, is told so.

# %%
from common.errors import RequestError

try:
    llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=500))
except RequestError as error:
    print("RequestError:", error)
else:
    raise AssertionError("it should have been refused")

open_stream = llm.stream("Once upon a time " * 8, SamplingParams(temperature=0.0, max_tokens=40))
next(open_stream)
print(blocks.num_free_blocks, "free block while the stream is open")
try:
    llm.generate([PROMPT], GREEDY)
except RequestError as error:
    print("RequestError:", error)
else:
    raise AssertionError("it should have been refused")

# %% [markdown]
# Closing the stream gives its blocks back, however far it was.

# %%
open_stream.close()
print(blocks.num_free_blocks, "free blocks")
assert blocks.num_free_blocks == 3
blocks.check_integrity()

# %% [markdown]
# ## Poke on
#
# - In `BlockManager.free`, leave out `reversed`. Which of the asserts above fails?
# - Make `num_blocks_for` round down. Where is it noticed first, and what would happen to the KV of two requests
#   if it were not?
# - Make the engine `LLM(num_blocks=192, block_size=1)`, which is the same memory. Which asserts fail? Does the
#   text change?
#
# Next: [v0.3 lets many requests share the pool](v0_3.py).
