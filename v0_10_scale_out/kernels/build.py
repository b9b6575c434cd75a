"""Builds the kernels with the system's C compiler: once, a few seconds, into the cache. Torch-free.

They are compiled for the very processor that they run on (`-march=native`): nothing here lists instruction sets. The
library's name says what it was made from: another source, compiler or processor makes another library.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from common.cache_directory import cache_directory
from common.errors import ModelError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp", "-Wall", "-Wextra")
COMPILERS = ("cc", "gcc", "clang")


class BuildError(Exception):
    """There are no kernels here; the message says why, in a sentence."""


def library(openmp: str | None) -> Path:
    """The kernels as a shared library, built now if they never were.

    A process that comes while another one builds waits for it, and a file has its name only when it is complete.

    Args:
        openmp: the OpenMP runtime that the process has loaded already, and that the library is linked with: two of them
            in one process would each keep threads of their own busy. `None` builds for one thread.

    Raises:
        BuildError: there is no compiler, it fails, or there is no place for the result.
    """
    compiler = _compiler()
    flags = FLAGS if openmp else tuple(flag for flag in FLAGS if flag != "-fopenmp")
    try:
        file = cache_directory() / f"kernels-{_key(compiler, flags, openmp)}.so"
        if file.is_file():
            return file
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if not file.is_file():  # else it was made by the process that held the lock
                logger.info("Compiling the kernels, once, to %s", file)
                _compile(compiler, flags, openmp, file)
    except (OSError, ModelError) as error:
        raise BuildError(f"the kernels cannot be built into the cache ({error})") from error
    return file


def processor() -> str:
    """What this processor is and can do, as far as the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(line for line in lines if line.startswith(("model", "cpu family", "vendor", "flags", "Features")))


def _compiler() -> str:
    """`$CC`, where it is set, or the first one that there is."""
    names = [os.environ["CC"]] if os.environ.get("CC") else COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(f"there is no C compiler ({', '.join(names)})")
    return found


def _key(compiler: str, flags: tuple[str, ...], openmp: str | None) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [version, *flags, str(openmp), processor(), *(file.read_text("utf-8") for file in _sources("*.[ch]"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def _compile(compiler: str, flags: tuple[str, ...], openmp: str | None, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        objects = {source: str(Path(folder, source.name).with_suffix(".o")) for source in _sources("*.c")}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda source: _run([compiler, *flags, "-c", str(source), "-o", objects[source]]), objects))
        made = Path(folder, file.name)
        # Without -fopenmp here, which would bring the compiler's own runtime along.
        _run([compiler, "-shared", "-o", str(made), *objects.values(), *([openmp] if openmp else []), "-lm"])
        made.replace(file)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
        raise BuildError(f"the C compiler failed ({reason.strip()})")
