"""What a trace tells: who had which block for how long, and what happened when, in words. Dropped in v0.4.

`animate_pool.py` draws it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tenancy:
    """A block in one request's hands, from the step `first` to the end of the step `last`; `levels` of tokens in it."""

    block: int
    owner: str
    first: int
    last: int
    levels: list[int]
    is_preempted: bool


def tenancies(entries: Sequence[dict[str, Any]], block_size: int) -> list[Tenancy]:
    """Who has had which block, in the order of blocks and time."""
    found: list[Tenancy] = []
    open_: dict[int, tuple[str, int, list[int]]] = {}
    computed: dict[str, int] = {}

    def end(block: int, step: int, preempted: Iterable[str]) -> None:
        owner, first, levels = open_.pop(block)
        found.append(Tenancy(block, owner, first, step, levels, owner in preempted))

    for step, entry in enumerate(entries):
        for name in entry["preempted"]:
            computed[name] = 0
        for name, num_tokens in entry["scheduled"].items():
            computed[name] = computed.get(name, 0) + num_tokens
        owners = {block: (name, i) for name, table in entry["tables"].items() for i, block in enumerate(table)}
        for block in [block for block, (owner, _, _) in open_.items() if owners.get(block, ("", 0))[0] != owner]:
            end(block, step - 1, entry["preempted"])
        for block, (name, i) in owners.items():
            _, _, levels = open_.setdefault(block, (name, step, []))
            levels.append(min(max(computed[name] - i * block_size, 0), block_size))
    for block in list(open_):
        end(block, len(entries) - 1, ())
    return sorted(found, key=lambda tenancy: (tenancy.block, tenancy.first))


def captions(entries: Sequence[dict[str, Any]], letters: dict[str, str]) -> dict[int, tuple[str, str]]:
    """What happens in a step where something does, in two lines."""
    said: dict[int, tuple[str, str]] = {}
    before: dict[str, list[int]] = {}
    seen: set[str] = set()
    for step, entry in enumerate(entries):
        tables, scheduled = entry["tables"], entry["scheduled"]
        ended = [name for name in before if name not in tables and name not in entry["preempted"]]
        admitted = [name for name in scheduled if name not in before]
        if entry["preempted"]:
            takers = [name for name, table in tables.items() if len(table) > len(before[name])]
            victims, num_blocks = entry["preempted"], sum(len(before[name]) for name in entry["preempted"])
            go_back = "1 block goes back" if num_blocks == 1 else f"{num_blocks} blocks go back"
            # Without takers a victim has made room for nobody but itself: it was the one that needed a block.
            needing = takers or victims
            said[step] = (
                f"{_names(needing, letters)} {_verb(needing, 'needs', 'need')} a block, and none is free.",
                f"{_names(victims, letters)}, the newest, is preempted: {go_back}.",
            )
        elif admitted:
            again = [name for name in admitted if name in seen]
            waits = [name for name in entry["queue"] if name not in seen]
            second = f"{_names(waits, letters)} {_verb(waits, 'has', 'have')} to wait." if waits else ""
            if again:
                second = f"{_names(again, letters)} {_verb(again, 'computes', 'compute')} prompt and text again."
            said[step] = (f"{_names(admitted, letters)} {_verb(admitted, 'starts', 'start')}.", second)
            if again:
                said[step] = (f"There is room for {_names(admitted, letters)}.", second)
        elif ended:
            num_blocks = sum(len(before[name]) for name in ended)
            whose = f"{_verb(ended, 'Its', 'Their')} {num_blocks} block{'s are' if num_blocks > 1 else ' is'} free."
            said[step] = (f"{_names(ended, letters)} {_verb(ended, 'has', 'have')} ended. {whose}", "")
        seen.update(scheduled)
        before = tables
    said[len(entries) - 1] = ("All are answered. The text is the same", "as in a pool that never runs out of blocks.")
    return said


def _names(names: Sequence[str], letters: dict[str, str]) -> str:
    """A, B and C; a run of four or more is A to D."""
    listed = sorted(letters[name] for name in names)
    if len(listed) > 3 and ord(listed[-1]) - ord(listed[0]) == len(listed) - 1:
        return f"{listed[0]} to {listed[-1]}"
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"


def _verb(names: Sequence[str], one: str, many: str) -> str:
    return one if len(names) == 1 else many
