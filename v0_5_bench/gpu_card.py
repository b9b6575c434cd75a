"""What all parts of `gpu_checks` need, and the first of them: what the card can do.

Each part runs in a process of its own, and calls `report` for each of its items: a line of JSON is printed as soon as
the item is done, so that what a later one breaks, or a time limit cuts off, costs nothing that was measured before.
"""

import dataclasses
import json
import subprocess
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common import loading
from common.recipe import spread


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure: `model` (real weights), else the bundled `shape`; the lengths are in tokens."""

    device: str
    shape: str
    model: str | None
    repeats: int

    @property
    def is_tiny(self) -> bool:
        """Whether it is to be done in seconds, on a CPU."""
        return self.model is None and self.shape == "tiny"

    @property
    def num_requests(self) -> tuple[int, ...]:
        """So many at once."""
        return (1, 4) if self.is_tiny else (1, 8, 32, 128)

    @property
    def lengths(self) -> tuple[int, int]:
        """Of a short prompt, and of its answer."""
        return (30, 8) if self.is_tiny else (30, 64)

    @property
    def long_prompts(self) -> tuple[int, ...]:
        """Lengths of prompts whose first token is waited for."""
        return (64, 128) if self.is_tiny else (2000, 4000)


def report(item: str, measure: Callable[..., Any], *args: Any) -> None:
    """Do one item and print its result, or how it failed; either way the next one can go on."""
    line: dict[str, Any] = {"item": item}
    start = time.perf_counter()
    try:
        line["result"] = measure(*args)
    except Exception as error:
        line |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    line["seconds"] = round(time.perf_counter() - start, 3)
    print(json.dumps(line), flush=True)


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


def machine(settings: Settings) -> None:
    """Versions, and what the card reaches: GB/s of its memory, TFLOP/s of a matrix product."""
    device = loading.select_device(settings.device)
    num_bytes, size = (4 * 2**30, 8192) if device.type == "cuda" else (64 * 2**20, 512)
    report("versions", _versions, device)
    report("copy_gb_s", bandwidth, device, num_bytes, settings.repeats, True)
    report("read_gb_s", bandwidth, device, num_bytes, settings.repeats, False)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        report(f"{name}_tflop_s", matrix_rate, device, dtype, size, settings.repeats)


def _versions(device: torch.device) -> dict[str, Any]:
    versions: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        versions |= {"card": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
            versions["driver"] = done.stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            versions["driver"] = "unknown"
    return versions


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
