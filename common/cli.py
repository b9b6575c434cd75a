"""Command-line flags from dataclasses, and the small habits that all command lines share. Torch-free.

A field `max_model_len: int | None = field(default=None, metadata={"help": ...})` becomes `--max-model-len`; a field
without a help text gets no flag. So a flag, its default, its type and its documentation are written in one place, and
`--help` answers without loading anything heavy. Changes in no milestone.
"""

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import signal
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ModelError, RequestError

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser, cls: type, *, title: str, **defaults: Any) -> None:
    """Add a group with a flag for each documented field of the dataclass `cls`; `defaults` replace the fields' own."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "help" not in field.metadata:
            continue
        flag = "--" + field.name.replace("_", "-")
        default = defaults.get(field.name, field.default)
        text = field.metadata["help"].replace("%", "%%")
        hint = hints[field.name]
        union = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        options = [t for t in union if t is not types.NoneType]
        if bool in options:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
            continue
        if len(options) > 1 or typing.get_origin(options[0]):  # a sequence: the flag may be given several times
            item = int if field.name.endswith("_ids") else str
            group.add_argument(flag, action="append", type=item, default=None, metavar=item.__name__.upper(), help=text)
            continue
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            flag,
            type=field.metadata.get("type", options[0]),
            default=default,
            choices=field.metadata.get("choices"),
            metavar=None if "choices" in field.metadata else options[0].__name__.upper(),
            help=text + shown,
        )


def from_arguments(cls: type[T], namespace: argparse.Namespace) -> T:
    """Make a `cls` from the flags that `add_arguments` added; flags that were not given keep the field's default."""
    values = {
        field.name: getattr(namespace, field.name)
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if "help" in field.metadata
    }
    return cls(**{name: value for name, value in values.items() if value is not None})


def read_prompt() -> str:
    """The prompt on standard input, as it is but for the last newline.

    Raises:
        RequestError: it is not UTF-8, or nobody is going to write one.
    """
    try:
        prompt = "" if sys.stdin.isatty() else sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"Standard input is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}."
        ) from None
    if not prompt.strip():
        raise RequestError("There is no prompt: give one as an argument, or on standard input.")
    return prompt


def read_lines(name: str) -> list[str]:
    """The lines of a file (`-` is standard input) that are not blank, one prompt each.

    Raises:
        RequestError: the file cannot be read, is not UTF-8, or has none.
    """
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        lines = [line for line in content.decode().split("\n") if line.strip()]
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise RequestError(f"{name} is not UTF-8 text.") from None
    if not lines:
        raise RequestError(f"{name} has no prompts: write one a line.")
    return lines


def busy() -> str | None:
    """What to say where other work keeps this machine's cores busy; `None` where nothing does, or who asks knows it.

    OpenMP's threads wait for the slowest of them after every operation. On a core that is shared, each wait takes as
    long as the other program's turn: with as many threads as cores an answer may take ten times as long as with one.
    """
    cores = os.cpu_count() or 1
    if not hasattr(os, "getloadavg") or "OMP_NUM_THREADS" in os.environ or os.getloadavg()[0] <= cores:
        return None
    return (
        f"This machine is busy (load {os.getloadavg()[0]:.1f} on {cores} cores), so threads may wait for each other. "
        "If this is slow, set OMP_NUM_THREADS=1."
    )


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """What is imported and loaded in this block: Ctrl-C ends it in any case.

    A `KeyboardInterrupt` may be lost there, as in a callback of the import system, where Python only prints it. So it
    is noted, too, and raised once more at the end.
    """
    interrupts: list[int] = []

    def note(signum: int, frame: types.FrameType | None) -> None:
        interrupts.append(signum)
        signal.default_int_handler(signum, frame)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # somebody else's affair
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt


def run(main: Callable[[], None]) -> int:
    """Call `main`; turn what the caller can put right into one sentence on stderr, and Ctrl-C into a quiet end.

    What the loaders have to say (a conversion, a warning) goes to stderr, too, after a word on a machine that is busy.

    Returns:
        The exit code: 0, 1 for the caller's mistakes, 130 after Ctrl-C, 141 when the reader of a pipe has gone.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("common").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    if (warning := busy()) is not None:
        print(warning, file=sys.stderr)
    try:
        main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except (ModelError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # At its exit the interpreter flushes stdout again, and would complain again.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if isinstance(error, BrokenPipeError):  # nobody reads any more (`... | head`)
            return 141
        file = f"{error.filename}: " if error.filename else ""
        print(f"error: {file}{error.strerror or error}", file=sys.stderr)
        return 1
    return 0
