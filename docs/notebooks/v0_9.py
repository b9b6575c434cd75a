# %% [markdown]
# # v0.9: poke at a kernel
#
# [v0.9](../milestones/v0_9.md) computes in C. This notebook takes one of its products apart: the order of the weights,
# what two threads and 16 bits do to it, and how far it is from what the machine can do. Then attention, by hand.
#
# On your machine: `python docs/notebooks/v0_9.py`, or `make notebooks` and then Jupyter. You need a C compiler. Every
# figure that depends on the machine is another one on yours.

# %%
import statistics
import time

import torch

from v0_9_fast.kernels import bindings

kernels = bindings.load()
assert not isinstance(kernels, str), kernels
print("columns in a panel:", kernels.panel_width)

# %% [markdown]
# ## A panel
#
# A matrix of 20 rows and 3 columns, whose element in row *r* and column *c* is *100 c + r*. **Predict first**: which
# numbers lie side by side in its first panel?

# %%
rows, columns = torch.arange(20.0)[:, None], torch.arange(3.0)[None]
weight = 100 * columns + rows
panels = kernels.pack(weight, torch.float32)
print("panels, depth, columns of a panel:", tuple(panels.shape))
print("the first numbers in memory:", panels.flatten()[:5].tolist())
start = kernels.panel_width  # numbers further on, the next k begins
print("behind the first k:         ", panels.flatten()[start : start + 5].tolist())
assert panels.flatten()[:5].tolist() == [0, 1, 2, 3, 4]
assert panels.flatten()[start] == 100

# %% [markdown]
# The first weight of each row, then the second one of each row. The last panel has rows to spare, which are zeros.
#
# Is the product right? It's compared with PyTorch's, in double precision, for a matrix whose width is no multiple of
# anything.

# %%
torch.manual_seed(0)
x, odd = torch.randn(7, 501), torch.randn(203, 501)
ours = kernels.product(x, kernels.pack(odd, torch.float32), 203)
exact = x.double() @ odd.double().T
print(f"largest difference: {(ours - exact).abs().max():.0e}")
assert (ours - exact).abs().max() < 1e-3

# %% [markdown]
# And a row doesn't depend on who shares its step. It's equal to the last bit, alone or among seven:

# %%
alone = kernels.product(x[3:4], kernels.pack(odd, torch.float32), 203)
print("the same bits:", torch.equal(alone[0], ours[3]))
assert torch.equal(alone[0], ours[3])

# %% [markdown]
# ## What 16 bits do
#
# How much does a weight change? bfloat16 keeps 8 digits of a binary number, float16 keeps 11. **Predict first**: by
# what factor do the two errors differ?

# %%
errors = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    product = kernels.product(x, kernels.pack(odd, dtype), 203)
    errors[dtype] = float((product - exact).abs().mean() / exact.abs().mean())
    print(f"{dtype!s:15} mean error of an output: {errors[dtype]:.1e}")
assert 4 < errors[torch.bfloat16] / errors[torch.float16] < 16

# %% [markdown]
# Three more digits, 2³ = 8 times as exact. But bfloat16 has float32's range, which some models need.
#
# ## The roof
#
# Two limits hold for every product. It can't be faster than its weights are read, and not faster than the processor
# multiplies. First, what are they here? The sum of a long tensor reads it once. A product of two large matrices does
# nothing but multiply.

# %%


def seconds(function, repeats=5):
    """The median of a few runs, after one that doesn't count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


# %% tags=["timed"]
read = 2**28 / seconds(torch.ones(2**26).sum)
square = torch.randn(1024, 1024)
multiply = 2 * 1024**3 / seconds(lambda: square @ square)
print(f"reads {read / 1e9:.0f} GB/s, computes {multiply / 1e9:.0f} GFLOP/s")
print(f"to multiply as fast as it reads, each float32 has to be used {multiply / read * 4 / 2:.0f} times")

# %% [markdown]
# The last number is the number of rows at which a product turns from one kind into the other. Below, it waits for
# memory, and a further row is free. Above, each row costs. Here are eight layers' worth of one matrix, so that no cache
# holds them, in two forms and with more and more rows:

# %% tags=["timed"]
import matplotlib.pyplot as plt

WIDTH, DEPTH, LAYERS = 3072, 576, 8
matrices = [torch.randn(WIDTH, DEPTH) for _ in range(LAYERS)]
counts = (1, 2, 4, 8, 16, 32, 64)
figure, axes = plt.subplots()
kernels.use_threads(torch.get_num_threads())
times = {}
for dtype in (torch.float32, torch.float16):
    packed = [kernels.pack(matrix, dtype) for matrix in matrices]
    for count in counts:
        x = torch.randn(count, DEPTH)
        times[dtype, count] = seconds(lambda: [kernels.product(x, panels, WIDTH) for panels in packed])  # noqa: B023
    axes.plot(counts, [1e3 * times[dtype, count] for count in counts], marker="o", label=str(dtype))
num_weights = WIDTH * DEPTH * LAYERS
roof = [1e3 * max(4 * num_weights / read, 2 * count * num_weights / multiply) for count in counts]
axes.plot(counts, roof, "--", label="what this machine allows, float32")
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xlabel("rows")
axes.set_ylabel("ms")
axes.legend()
plt.show()
print(f"1 row: 16 bits are {times[torch.float32, 1] / times[torch.float16, 1]:.1f} times as fast")
print(f"64 rows: {times[torch.float32, 64] / times[torch.float16, 64]:.1f} times")

# %% [markdown]
# On the left, where reading is what takes the time, half the bytes are nearly half of it. On the right both lines meet:
# the same multiplications.
#
# ## Attention, block by block
#
# Now by hand what `attention.c` does. One query meets 40 keys, in blocks of 16. The softmax over all 40 scores needs
# the largest of them, and that may be in the last block. So keep two numbers: the largest score so far and the sum so
# far.

# %%
q, keys, values = torch.randn(8), torch.randn(40, 8), torch.randn(40, 8)
keys[20] = q  # the key that fits best is in the second block
largest, total, output = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(8)
for start in range(0, 40, 16):
    scores = keys[start : start + 16] @ q / 8**0.5
    new_largest = torch.maximum(largest, scores.max())
    scale = (largest - new_largest).exp()  # what has been summed up counts so much less now
    weights = (scores - new_largest).exp()
    total = total * scale + weights.sum()
    output = output * scale + weights @ values[start : start + 16]
    largest = new_largest
    print(f"after {min(start + 16, 40)} keys: largest {largest:.2f}, what was before is scaled by {scale:.2f}")
whole = torch.softmax(keys @ q / 8**0.5, dim=0) @ values
print("difference from the softmax over all at once:", f"{(output / total - whole).abs().max():.0e}")
assert torch.allclose(output / total, whole, atol=1e-5)

# %% [markdown]
# That's all there is to an online softmax. Leave the scaling out (`scale = 1`), and the last assertion tells you.
#
# Next: read `v0_9_fast/kernels/attention.c`. You have just written its inner part.
