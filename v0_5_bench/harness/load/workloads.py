"""What is asked in a benchmark: prompts with the number of tokens that shall be answered. Torch-free.

The same arguments and seed give the same requests, so that every engine is asked the same. No two prompts of a run
begin alike, so that nothing comes from a prefix cache, whichever engine has one. `shared_prefix` is the exception:
there the cache is what is measured.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError, RequestError

LOWEST_ID, HIGHEST_ID = 100, 40_000  # of random prompts: ordinary tokens in the vocabularies of all Llamas

# Questions of our own, each asked in a conversation that grows by its answers and a "why".
CHATS = (
    ("How do I keep a sourdough starter alive when I travel?", "What if I forget it for a month?"),
    ("Explain to a child why the moon changes its shape.", "And why do we never see its other side?"),
    ("What should I look at when I buy a used bicycle?", "Which of these can I mend myself?"),
    ("Summarise the rules of chess in five sentences.", "Which of them do beginners get wrong?"),
    ("Plan a rainy afternoon for two children of six and nine.", "We have no television."),
    ("How does a heat pump get warmth out of cold air?", "At what temperature does it stop to pay?"),
    ("Write a polite letter to a neighbour whose dog barks at night.", "Make it half as long."),
    ("What is the difference between a virus and a bacterium?", "Which of the two does soap kill?"),
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: token ids, a text, or a conversation; and how many tokens to ask for."""

    num_output_tokens: int
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None


def random_prompts(
    num_requests: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    seed: int,
    highest_id: int | None = None,
) -> list[BenchRequest]:
    """Random token ids, up to `HIGHEST_ID` unless told; lengths are uniform in their ranges, both ends included."""
    rng = random.Random(seed)
    highest_id = HIGHEST_ID if highest_id is None else highest_id
    requests = []
    for _ in range(num_requests):
        num_tokens = rng.randint(*input_len)
        prompt = [rng.randint(LOWEST_ID, highest_id) for _ in range(num_tokens)]
        requests.append(BenchRequest(rng.randint(*output_len), prompt=prompt))
    return requests


def random_ids(num_prompts: int, length: int, seed: int = 0, highest_id: int | None = None) -> list[list[int]]:
    """The prompts of such requests alone, all of one length."""
    requests = random_prompts(num_prompts, (length, length), (1, 1), seed, highest_id)
    return [list(request.prompt or []) for request in requests]  # type: ignore[arg-type]


def shared_prefix(
    num_requests: int,
    prefix_len: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    seed: int,
    *,
    prefix_seed: int,
) -> list[BenchRequest]:
    """Requests as of `random_prompts`, all behind the same `prefix_len` tokens: many users of one system prompt.

    The prefix depends on `prefix_seed` only: the same one again, with another `seed`, is what a warm cache knows.
    """
    [prefix] = random_ids(1, prefix_len, prefix_seed)
    requests = random_prompts(num_requests, input_len, output_len, seed)
    return [
        BenchRequest(request.num_output_tokens, prompt=prefix + list(request.prompt or []))  # type: ignore[arg-type]
        for request in requests
    ]


def chats(num_requests: int, output_len: tuple[int, int], seed: int) -> list[BenchRequest]:
    """Conversations of one or two turns from `CHATS`, in random order, each with a number of its own at its start."""
    rng = random.Random(seed)
    requests = []
    for number in range(num_requests):
        first, second = rng.choice(CHATS)
        messages = [{"role": "user", "content": f"(Question {number} of {seed}.) {first}"}]
        if rng.random() < 0.5:
            messages += [
                {"role": "assistant", "content": "That depends on a few things. Let me go through them one by one."},
                {"role": "user", "content": second},
            ]
        requests.append(BenchRequest(rng.randint(*output_len), messages=messages))
    return requests


def from_file(path: Path, default_output_len: int) -> list[BenchRequest]:
    """JSON lines, each with a `prompt` (text or token ids) or `messages`, and perhaps `max_tokens`.

    Raises:
        RequestError: a line is none; it is named by its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}.") from None
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if ("prompt" in entry) == ("messages" in entry):
                raise ValueError("it needs a prompt or messages, one of the two")
            if not (entry.get("prompt") or entry.get("messages")):
                raise ValueError("its prompt is empty")
            requests.append(
                BenchRequest(
                    int(entry.get("max_tokens", default_output_len)),
                    prompt=entry.get("prompt"),
                    messages=entry.get("messages"),
                )
            )
        except (ValueError, TypeError) as error:
            raise RequestError(f"{path}, line {number}, is no request: {error}.") from None
    if not requests:
        raise RequestError(f"{path} has no requests: write one a line, as JSON.")
    return requests


def parse_range(text: str, name: str) -> tuple[int, int]:
    """`"30"` or `"10-50"`, both ends included.

    Raises:
        ModelError: it is neither; `name` says which argument it was.
    """
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ModelError(f"{name} must be a number of tokens or a range such as 10-50, got {text!r}.")
    return low, high
