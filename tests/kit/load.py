"""Load for a server: many calls at once, of every kind, some of which leave early and some of which are wrong."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# What is wrong whatever the rest of the body says.
INVALID: tuple[dict[str, Any], ...] = (
    {"temperature": 3},
    {"max_tokens": 0},
    {"n": 0},
    {"top_p": 0},
    {"stop": ""},
    {"min_tokens": 2, "max_tokens": 1},
    {"logit_bias": {"100000": 1}},
    {"stream": "yes"},
    {"max_tokens": 100_000},
    {"seed": 1.5},
    {"response_format": {"type": "json_object"}},
)


@dataclass(frozen=True)
class Call:
    """One request, and how its client behaves.

    Args:
        path: of the route.
        body: is sent as it is.
        is_invalid: whether the body is wrong.
        leave_after: a streaming client leaves after so many events, one that waits for a whole answer after so many
            hundredths of a second; `None` stays to the end.
    """

    path: str
    body: dict[str, Any]
    is_invalid: bool
    leave_after: int | None

    @property
    def is_greedy(self) -> bool:
        """Whether there is one right answer."""
        return self.body["temperature"] == 0 and not self.is_invalid


@dataclass
class Outcome:
    """What a call's client has seen. `texts` are of its choices; `left` says that he did not see the end."""

    call: Call
    status: int | None = None
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: Any = None
    left: bool = False


def make_calls(num: int, *, seed: int, max_prompt: int, max_output: int, num_questions: int) -> list[Call]:
    """Calls in a random order: a tenth are invalid, and of the others a third leave early.

    Args:
        num: how many.
        seed: the same calls each time.
        max_prompt: characters of the longest prompt.
        max_output: tokens of the longest answer.
        num_questions: so many different greedy questions, each asked in several ways.
    """
    rng = random.Random(seed)
    questions = []
    for _ in range(num_questions):
        prompt = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ,.", k=rng.randint(1, max_prompt)))
        questions.append((rng.random() < 0.5, prompt, rng.randint(1, max_output), rng.random() < 0.7))
    kinds = ["invalid"] * (num // 10)
    kinds += ["leaves"] * ((num - len(kinds)) // 3)
    kinds += ["stays"] * (num - len(kinds))
    rng.shuffle(kinds)
    calls = []
    for kind in kinds:
        is_chat, prompt, max_tokens, ignore_eos = rng.choice(questions)
        body: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        body["stream"] = rng.random() < 0.5
        if rng.random() < 0.25:
            body |= {"temperature": 0.9, "seed": rng.randrange(2**40), "n": rng.randint(1, 3)}
        if kind == "invalid":
            body |= rng.choice(INVALID)
        leave_after = rng.randint(0, max_tokens if body["stream"] else 40) if kind == "leaves" else None
        calls.append(Call(CHAT if is_chat else COMPLETIONS, body, kind == "invalid", leave_after))
    return calls


def run_load(url: str, calls: list[Call], *, at_once: int = 64) -> tuple[list[Outcome], list[tuple[int, float]]]:
    """Make all calls, so many at once.

    Returns:
        What became of each, and status and seconds of each look at `/health` meanwhile.
    """
    return asyncio.run(_run_load(url, calls, at_once))


async def _run_load(url: str, calls: list[Call], at_once: int) -> tuple[list[Outcome], list[tuple[int, float]]]:
    limits = httpx.Limits(max_connections=at_once + 1)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        room = asyncio.Semaphore(at_once)
        polls: list[tuple[int, float]] = []
        poller = asyncio.create_task(_poll(client, polls))
        outcomes = await asyncio.gather(*(_make(client, call, room) for call in calls))
        poller.cancel()
    return outcomes, polls


async def _poll(client: httpx.AsyncClient, polls: list[tuple[int, float]]) -> None:
    while True:
        start = time.perf_counter()
        response = await client.get("/health")
        polls.append((response.status_code, time.perf_counter() - start))
        await asyncio.sleep(0.02)


async def _make(client: httpx.AsyncClient, call: Call, room: asyncio.Semaphore) -> Outcome:
    outcome = Outcome(call)
    async with room:
        if call.body["stream"] is True:
            await _read_stream(client, outcome)
        else:
            seconds = None if call.leave_after is None else call.leave_after / 100
            try:
                async with asyncio.timeout(seconds):
                    response = await client.post(call.path, json=call.body)
                outcome.status = response.status_code
                _take(outcome, response.json())
            except TimeoutError:
                outcome.left = True
    return outcome


async def _read_stream(client: httpx.AsyncClient, outcome: Outcome) -> None:
    num_events, is_done = 0, False
    async with client.stream("POST", outcome.call.path, json=outcome.call.body) as response:
        outcome.status = response.status_code
        if response.status_code != 200:
            await response.aread()
            _take(outcome, response.json())
            return
        async for line in response.aiter_lines():
            if num_events == outcome.call.leave_after:
                outcome.left = True
                return
            if line.startswith("data: "):
                num_events += 1
                is_done = line == "data: [DONE]"
                if not is_done:
                    _take(outcome, json.loads(line.removeprefix("data: ")))
    assert is_done, "a stream has ended without [DONE]"


def _take(outcome: Outcome, body: dict[str, Any]) -> None:
    """Add a whole answer, a chunk or an error to what is known."""
    outcome.error = outcome.error or body.get("error")
    for choice in body.get("choices", []):
        index = choice["index"]
        text = choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", "")
        outcome.texts[index] = outcome.texts.get(index, "") + text
        if choice["finish_reason"] is not None:
            assert index not in outcome.finish_reasons, "a choice has ended twice"
            outcome.finish_reasons[index] = choice["finish_reason"]
