"""The promises, written once: what every milestone keeps from the one on that made it.

A module here holds tests that ask for the `milestone` fixture (or for `load` and `script_llm`, which use it) and says
in `SINCE` which milestone made the promise. `tests/v0_N/test_contracts.py` collects all that are due:

    globals().update(promises("v0_3"))
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


def promises(milestone: str) -> dict[str, Callable[..., Any]]:
    """All tests of the promises made up to `milestone` (`"v0_3"`), by name."""
    tests: dict[str, Callable[..., Any]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if _version(module.SINCE) > _version(milestone):
            continue
        for name, value in vars(module).items():
            if name.startswith("test_"):
                assert name not in tests, f"two contracts have a test {name}: one would hide the other"
                tests[name] = value
    return tests


def _version(milestone: str) -> tuple[int, ...]:
    return tuple(int(part) for part in milestone.removeprefix("v").split("_"))
