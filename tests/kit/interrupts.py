"""Ctrl-C at a chosen line: Python raises `KeyboardInterrupt` between any two lines, and so does this."""

import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def num_lines(call: Callable[[], Any], folders: Sequence[str]) -> int:
    """How many lines of these folders' files a call runs, each counted as often as it is run."""
    return _run(call, folders, None)


def interrupt(call: Callable[[], Any], folders: Sequence[str], line: int) -> bool:
    """Run a call, and raise `KeyboardInterrupt` before its `line`-th line, counted from 0; false if it ended before."""
    try:
        _run(call, folders, line)
    except KeyboardInterrupt:
        return True
    return False


def _run(call: Callable[[], Any], folders: Sequence[str], line: int | None) -> int:
    paths = tuple(f"{ROOT / folder}/" for folder in folders)
    count = 0

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count - 1 == line:
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(paths) else None

    before = sys.gettrace()
    gc.collect()  # what earlier calls left may run lines of these files as it goes, a generator's `finally` for one
    gc.disable()
    sys.settrace(on_call)
    try:
        kept = call()  # until the end: what is raised while something is thrown away, in its `__del__`, Python ignores
    finally:
        sys.settrace(before)
        gc.enable()
    del kept
    return count
