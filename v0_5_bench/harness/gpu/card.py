"""What all parts of the GPU checks need, and the first of them: what the card can do.

Each part runs in a process of its own, and calls `report` for each of its items: a line of JSON is printed as soon as
the item is done, so that what a later one breaks, or a time limit cuts off, costs nothing that was measured before.
"""

import dataclasses
import importlib
import json
import subprocess
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from common import loading

from ..compare.peers import package_and_flags
from ..compare.rates import bandwidth, matrix_rate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure: `model` (real weights), else the bundled `shape`; the lengths are in tokens."""

    engine: str  # of a part that measures one: a name that `compare/peers.py` has
    device: str
    shape: str
    model: str | None
    repeats: int

    @property
    def is_tiny(self) -> bool:
        """Whether it is to be done in seconds, on a CPU."""
        return self.model is None and self.shape == "tiny"

    def llm(self, *args: Any, **arguments: Any) -> Any:
        """The engine's `LLM`, on the device, without a prefix cache: repeats would find what they are to compute."""
        package, own = package_and_flags(self.engine, prefix_caching=False)
        device = loading.select_device(self.device).type
        return importlib.import_module(package).LLM(*args, **{"device": device} | own | arguments)

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
