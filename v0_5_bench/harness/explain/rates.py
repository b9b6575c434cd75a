"""What a device reaches: GB/s of its memory, TFLOP/s of a matrix product, on a CPU as on a GPU."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.measuring.recipe import spread


def timed(run: Callable[[], Any], device: torch.device, repeats: int, *, calls: int = 1) -> list[float]:
    """Seconds of a call of `run`, so many times, each the mean of `calls` in a row; a first call is left out."""
    run()
    seconds = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait(device)
        seconds.append((time.perf_counter() - start) / calls)
    return seconds


def wait(device: torch.device) -> None:
    """Until the card has done all that it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device, num_bytes: int, repeats: int, is_copy: bool) -> dict[str, float]:
    """GB/s of a copy, what is read and what is written both counted, or of a sum, which only reads."""
    source = torch.rand(num_bytes // 4, device=device)
    target = torch.empty_like(source) if is_copy else source
    seconds = timed((lambda: target.copy_(source)) if is_copy else source.sum, device, repeats, calls=5)
    return spread([(1 + is_copy) * num_bytes / s / 1e9 for s in seconds])


def matrix_rate(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    repeats: int,
    *,
    prepare: Callable[[Tensor], Tensor] = lambda matrix: matrix,
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> dict[str, float]:
    """TFLOP/s of a square product, of random numbers: zeros are faster, since fewer bits change.

    `prepare` is done once, to the second matrix.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    b = prepare(b)
    seconds = timed(lambda: product(a, b), device, repeats, calls=10)
    return spread([2 * size**3 / s / 1e12 for s in seconds])
