"""Amounts, as people write and read them: of memory, and of things. Torch-free, changes in no milestone."""

import re

from common.errors import ModelError

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(amount: str | int, name: str) -> int:
    """Bytes of `"1GiB"`, `"512 MiB"`, `"2GB"` (decimal) or a plain number.

    Raises:
        ModelError: it is none of these, or not above zero; `name` says which argument it was.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(amount).strip())
    if match is None or match[2].upper() not in UNITS:
        raise ModelError(f"{name} must be an amount such as 1GiB, 512MiB or 1000000 (bytes), got {amount!r}.")
    num_bytes = float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= num_bytes < 2**63:
        raise ModelError(f"{name} must be above zero and within what a computer can address, got {amount!r:.40}.")
    return int(num_bytes)


def check_count(name: str, value: object) -> None:
    """Raise a `ModelError` unless `value` is an integer of at least 1; `name` says which argument it was."""
    if type(value) is not int or value < 1:
        raise ModelError(f"{name} must be at least 1, got {value!r}.")


def format_bytes(num_bytes: float) -> str:
    """`"1.50 GiB"`: the largest binary unit that leaves at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
