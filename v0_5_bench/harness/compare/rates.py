"""What a device reaches: GB/s of its memory, TFLOP/s of a matrix product, on a CPU as on a GPU."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.llama import linear, pack
from common.measuring.recipe import spread


def cpu_rates(num_bytes: int, size: int, repeats: int) -> dict[str, Any]:
    """GB/s that a sum over so many bytes reads, TFLOP/s of a float32 product of two matrices of that size.

    The product is taken twice, by PyTorch's `@` and on a matrix packed for oneDNN: which library is the better one is
    a matter of the processor, and a roof that an engine can pass is none.
    """
    cpu = torch.device("cpu")
    rates = {
        "plain": matrix_rate(cpu, torch.float32, size, repeats),
        "packed": matrix_rate(cpu, torch.float32, size, repeats, prepare=pack, product=linear),
    }
    return {
        "read_gb_s": bandwidth(cpu, num_bytes, repeats, False),
        "float32_tflop_s": max(rates.values(), key=lambda rate: rate["median"]),
        "products_tflop_s": rates,
    }


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
