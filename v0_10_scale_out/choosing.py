"""Which product computes how many rows of a matrix, ours or oneDNN's: found out by trying, once.

oneDNN's is a library's: it is made for matrices of all sizes, and may be the faster one on another processor, or in its
next version. So nobody has to know. Both are timed on the model's own matrices, with the threads that PyTorch has
meanwhile. Tests and measurements that have to be repeatable name one by `--linear-backend`.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from common.cache_directory import cache_directory
from common.errors import ModelError
from common.llama import linear, pack

from .kernels.bindings import Kernels
from .kernels.build import processor

logger = logging.getLogger(__name__)

NUM_ROWS = (1, 4, 16, 64)
ROUNDS = 3  # of which the fastest counts: what else runs on the machine only ever slows down
MOST_WEIGHTS = 16 * 2**20  # that are timed together: more than most caches hold, as in a real step
CLEARLY = 1.05  # times as fast has oneDNN to be: two packed copies of a matrix take twice the memory


def most_rows(kernels: Kernels, weights: Sequence[Tensor]) -> float:
    """Up to how many rows our product computes matrices of this shape: 0, one of `NUM_ROWS`, or infinity for all.

    Args:
        kernels: ours.
        weights: one or several float32 matrices of one shape, such as that of each layer.
    """
    width, depth = weights[0].shape
    key = [width, depth, torch.get_num_threads(), torch.__version__, kernels.name, processor()]
    file = None
    try:
        file = cache_directory() / f"product-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
        return float(json.loads(file.read_text(encoding="utf-8"))["most_rows"])
    except (OSError, ValueError, KeyError, TypeError, ModelError):  # nobody has asked before, or it was half written
        found = measured(kernels, weights)
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"most_rows": found, "key": key}), encoding="utf-8")
    except OSError as error:
        logger.debug("What was measured cannot be kept: %s", error)
    return found


def measured(kernels: Kernels, weights: Sequence[Tensor]) -> float:
    """`most_rows`, found out now."""
    width, depth = weights[0].shape
    width = min(width, MOST_WEIGHTS // depth)  # of a head with many rows, a part
    some = [weight[:width] for weight in weights[: max(1, MOST_WEIGHTS // (width * depth))]]
    ours = [kernels.pack(weight, torch.float32) for weight in some]
    theirs = [pack(weight) for weight in some]
    kernels.use_threads(torch.get_num_threads())
    slower = []  # for which numbers of rows ours is
    for num_rows in NUM_ROWS:
        x = torch.ones(num_rows, depth)
        best = [math.inf, math.inf]
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for panels in ours:
                kernels.product(x, panels, width)
            middle = time.perf_counter()
            for reordered in theirs:
                linear(x, reordered)
            best = [min(best[0], middle - start), min(best[1], time.perf_counter() - middle)]
        slower.append(best[0] > CLEARLY * best[1])
    return chosen(slower)


def chosen(slower: Sequence[bool]) -> float:
    """From "ours is slower", for each of `NUM_ROWS`, to the most rows that it computes: all after the last `False`."""
    num_ours = max((i + 1 for i, is_slower in enumerate(slower) if not is_slower), default=0)
    return 0 if num_ours == 0 else math.inf if num_ours == len(slower) else NUM_ROWS[num_ours - 1]
