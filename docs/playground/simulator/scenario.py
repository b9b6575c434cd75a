"""A setting of the playground, and the requests that follow from it. The same setting gives the same requests anywhere.

Requests are drawn with a seed. `requests` names them one by one instead: "37+20, 26+16@0.5" is one of 37 prompt tokens
that gets an answer of 20, and one of 26 and 16 that comes after half a second.
"""

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

ARRIVALS = {
    "all": "all at once",
    "poisson": "one by one, at random moments",
    "bursts": "in bursts",
    "long": "one long prompt among short ones",
}
BURST = 4  # requests that come together
ONE = re.compile(r"(\d+)\s*\+\s*(\d+)(?:\s*@\s*(\d+(?:\.\d+)?))?")


class SettingError(ValueError):
    """A setting that nothing can be run with; the message says which value, and what it may be."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the reader can choose. Lengths are in tokens; `rate` is arrivals (or bursts) a second.

    With `arrival="long"`, one request of `long_prompt` tokens comes `long_after` seconds after all others.
    `shared_prefix` tokens come before each prompt and are the same for all of a group; the requests take turns through
    `prefix_groups` groups. A share `acceptance` of the answers' tokens is guessed right by the stand-in drafter; of
    every second request it is `other_acceptance`, unless that is negative.
    """

    milestone: str = "v0_3_scheduler"
    arrival: str = "all"
    num_requests: int = 8
    rate: float = 4.0
    min_prompt: int = 20
    max_prompt: int = 60
    min_answer: int = 10
    max_answer: int = 40
    long_prompt: int = 1000
    long_after: float = 0.5
    requests: str = ""
    num_choices: int = 1
    shared_prefix: int = 0
    prefix_groups: int = 1
    token_budget: int = 512
    max_num_seqs: int = 32
    num_blocks: int = 128
    block_size: int = 16
    prefix_caching: bool = True
    num_speculative_tokens: int = 0
    acceptance: float = 0.6
    other_acceptance: float = -1.0
    seed: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Settings":
        """From JSON; names that are not here are left out, numbers must be in their ranges.

        Raises:
            SettingError: one is not, or all together make no run.
        """
        kept: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in values:
                kept[field.name] = _value(field.name, values[field.name], type(field.default))
        settings = cls(**kept)
        if settings.arrival not in ARRIVALS:
            raise SettingError(f"arrival is one of {', '.join(ARRIVALS)}, not {settings.arrival!r}.")
        for low, high in (("min_prompt", "max_prompt"), ("min_answer", "max_answer")):
            if getattr(settings, low) > getattr(settings, high):
                raise SettingError(f"{low} ({getattr(settings, low)}) is above {high} ({getattr(settings, high)}).")
        return settings


RANGES = {
    "num_requests": (1, 64),
    "rate": (0.1, 100),
    "min_prompt": (1, 4000),
    "max_prompt": (1, 4000),
    "min_answer": (1, 500),
    "max_answer": (1, 500),
    "long_prompt": (1, 8000),
    "long_after": (0, 60),
    "num_choices": (1, 8),
    "shared_prefix": (0, 4000),
    "prefix_groups": (1, 8),
    "token_budget": (1, 8192),
    "max_num_seqs": (1, 256),
    "num_blocks": (1, 1024),
    "block_size": (1, 256),
    "num_speculative_tokens": (0, 16),
    "acceptance": (0, 1),
    "other_acceptance": (-1, 1),
    "seed": (0, 999_999),
}


def _value(name: str, value: Any, kind: type) -> Any:
    if kind is str:
        return str(value)[:2000]
    if kind is bool:
        return value if isinstance(value, bool) else str(value).lower() in ("1", "true", "yes", "on")
    low, high = RANGES[name]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high or (kind is int and number != int(number)):
        what = "a whole number" if kind is int else "a number"
        raise SettingError(f"{name} is {what} from {low} to {high}, not {value!r}.")
    return kind(number)


@dataclass(frozen=True, slots=True)
class Script:
    """One request as it will go: when it comes, its prompt, how long its answer gets, which tokens can be guessed."""

    name: str
    arrival: float
    prompt: list[int]
    num_shared: int
    answer_len: int
    guessable: list[bool]
    num_choices: int = 1

    def token(self, choice: int, position: int) -> int:
        """The answer's token at a position: no two requests have the same."""
        return self.prompt[-1] + 1_000_000 * (choice + 1) + position


def scripts(settings: Settings) -> list[Script]:
    """The requests of a setting, in order of arrival."""
    rng = random.Random(settings.seed)
    found = _listed(settings.requests) if settings.requests.strip() else _drawn(settings, rng)
    found.sort(key=lambda each: each[0])
    result = []
    for index, (arrival, prompt_len, answer_len) in enumerate(found):
        group = index % settings.prefix_groups
        shared = range(5_000 * group + 1, 5_000 * group + 1 + settings.shared_prefix)
        own = range(100_000 * (index + 1), 100_000 * (index + 1) + prompt_len)
        guesses = random.Random(settings.seed * 1000 + index)
        is_other = index % 2 == 1 and settings.other_acceptance >= 0
        share = settings.other_acceptance if is_other else settings.acceptance
        guessable = [guesses.random() < share for _ in range(answer_len)]
        prompt = [*shared, *own]
        name, choices = label(index), settings.num_choices
        result.append(Script(name, arrival, prompt, len(shared), answer_len, guessable, choices))
    return result


def label(index: int) -> str:
    """A to Z, then AA, AB, ..., as the visualizer names requests in their order."""
    name, rest = "", index + 1
    while rest > 0:
        rest, letter = divmod(rest - 1, 26)
        name = chr(65 + letter) + name
    return name


def _drawn(settings: Settings, rng: random.Random) -> list[tuple[float, int, int]]:
    found, moment = [], 0.0
    for index in range(settings.num_requests):
        prompt_len = rng.randint(settings.min_prompt, settings.max_prompt)
        answer_len = rng.randint(settings.min_answer, settings.max_answer)
        gap = -math.log(1.0 - rng.random()) / settings.rate
        if settings.arrival == "poisson" and index > 0:
            moment = round(moment + gap, 4)  # rounded, as the last bits of a logarithm depend on the machine
        elif settings.arrival == "bursts":
            moment = round(index // BURST / settings.rate, 4)
        found.append((moment, prompt_len, answer_len))
    if settings.arrival == "long":
        _, _, answer_len = found.pop() if len(found) > 1 else (0, 0, settings.min_answer)
        found.append((settings.long_after, settings.long_prompt, answer_len))
    return found


def _listed(text: str) -> list[tuple[float, int, int]]:
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = ONE.fullmatch(part)
        if match is None:
            raise SettingError(f"requests are like '37+20, 26+16@0.5' (prompt + answer @ second), not {part!r}.")
        prompt_len, answer_len, moment = int(match[1]), int(match[2]), float(match[3] or 0)
        if not (1 <= prompt_len <= 8000 and 1 <= answer_len <= 500 and moment <= 600):
            raise SettingError(f"{part!r}: prompts go to 8000 tokens, answers to 500, moments to 600 seconds.")
        found.append((moment, prompt_len, answer_len))
    if not 1 <= len(found) <= 64:
        raise SettingError(f"requests are 1 to 64, not {len(found)}.")
    return found
