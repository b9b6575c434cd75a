"""What a measurement needs beside its number: where, on what and with which code it was made. Torch-free.

Every results file of this repository begins with `recipe()`. Changes in no milestone.
"""

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def recipe(**settings: Any) -> dict[str, Any]:
    """Command, commit, date, machine and versions; `settings` is what the measurement chose (dtype, seed, repeats)."""
    return {
        # An absolute path is one machine's affair: its last part is enough to know what was meant.
        "command": " ".join(
            ["python", "-m", _module_name(), *(Path(a).name if a.startswith("/") else a for a in sys.argv[1:])]
        ),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "settings": settings,
    }


def machine() -> dict[str, Any]:
    """The processor with its widest vector instructions, the cores, the memory and the system."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), "memory_gib": _memory_gib(), "system": platform.system()}


def spread(values: list[float]) -> dict[str, float]:
    """How repeated measurements are reported: median, smallest and largest, to three decimals."""
    summary = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in summary.items()}


def documents(root: Path = ROOT) -> list[Path]:
    """The Markdown files that quote measurements: those at the top, and the site's."""
    return sorted(root.glob("*.md")) + sorted((root / "docs").rglob("*.md"))


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else sys.argv[0]


def _commit() -> str:
    """The commit of the working tree, with `+changes` where it has uncommitted ones; `unknown` outside git."""
    try:
        options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **options).stdout.strip()  # type: ignore[call-overload]
        # Results and documents change without the code that was measured.
        code = ["--", "*.py", "*.c", "*.h", "pyproject.toml"]
        dirty = subprocess.run(["git", "status", "--porcelain", *code], **options).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+changes" if dirty else commit


def _cpu() -> str:
    """The processor's name, with the widest vector instructions it has: these decide how fast matrices multiply."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    vectors = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags), "")
    return f"{name} {vectors}".strip()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None
