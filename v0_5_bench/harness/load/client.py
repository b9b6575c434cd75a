"""The load generator: sends requests to an OpenAI-compatible server, and notes when what came back. Torch-free.

Two ways to send. *Closed loop*: so many requests are under way at any time, and each that ends is followed by the next.
*Open loop*: requests are sent at random moments (a Poisson process of a given rate), whether or not earlier ones have
ended, as independent users would. There is no cap on connections: a client that queues measures itself.

What it takes for a token: the server's own count (`usage`), never chunks of a stream, which may hold several tokens or
none, and never the text encoded again.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .workloads import BenchRequest


@dataclass(slots=True)
class RequestResult:
    """How one request went. Times are seconds on the client's clock, from the start of the run.

    `chunk_times` are those of chunks with text, the first one included. `planned` is when it was to be sent; how much
    later `start` is says whether the client kept up.
    """

    planned: float = 0.0
    start: float = 0.0
    end: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """From sending to the first text, in seconds."""
        return self.chunk_times[0] - self.start

    @property
    def e2el(self) -> float:
        """From sending to the end of the answer, in seconds."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; `None` for an answer of one token, which has none."""
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    @property
    def itls(self) -> Iterator[float]:
        """Seconds between two tokens, `n - 1` gaps for `n` tokens at most.

        A chunk's tokens came together. How many it holds is not said, so that a gap between chunks is shared by as many
        tokens as a chunk has on average.
        """
        num_gaps = len(self.chunk_times) - 1
        if num_gaps > 0:
            tokens_a_gap = max(1.0, (self.num_output_tokens - 1) / num_gaps)
            for before, after in itertools.pairwise(self.chunk_times):
                yield (after - before) / tokens_a_gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests are sent: `request_rate` a second at random, or `concurrency` at any time, or all at once."""

    base_url: str
    model: str
    concurrency: int | None = None
    request_rate: float | None = None
    seed: int = 0
    ignore_eos: bool = True
    temperature: float = 0.0
    api_key: str | None = None


async def run_load(
    load: Load, requests: list[BenchRequest], on_end: Callable[[RequestResult], None] = lambda _: None
) -> list[RequestResult]:
    """Send all requests; results in their order. A request that fails has an `error`, and stops nobody else."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        begin = time.perf_counter()
        slots = asyncio.Semaphore(load.concurrency or len(requests) or 1)
        moments = arrival_moments(len(requests), load)

        async def one(request: BenchRequest, planned: float) -> RequestResult:
            async with slots:
                if load.concurrency is not None:
                    planned = time.perf_counter() - begin  # in a closed loop the moment is when a place is free
                result = await _send(session, load, request, begin, planned)
            on_end(result)
            return result

        tasks = []
        for request, moment in zip(requests, moments, strict=True):
            await asyncio.sleep(max(0.0, moment - (time.perf_counter() - begin)))
            tasks.append(asyncio.create_task(one(request, moment)))
        return await asyncio.gather(*tasks)


def arrival_moments(num_requests: int, load: Load) -> list[float]:
    """When each request is to be sent, in seconds from the start."""
    if load.request_rate is None:
        return [0.0] * num_requests
    rng, now, moments = random.Random(load.seed), 0.0, []
    for _ in range(num_requests):
        moments.append(now)
        now += rng.expovariate(load.request_rate)
    return moments


async def _send(
    session: aiohttp.ClientSession, load: Load, request: BenchRequest, begin: float, planned: float
) -> RequestResult:
    """One streamed request."""
    result = RequestResult(planned=planned, start=time.perf_counter() - begin)
    body: dict[str, Any] = {
        "model": load.model,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    if request.messages is not None:
        path = "/v1/chat/completions"
        body |= {"messages": request.messages, "max_completion_tokens": request.num_output_tokens}
    else:
        path = "/v1/completions"
        body |= {"prompt": request.prompt, "max_tokens": request.num_output_tokens}
    try:
        async with session.post(load.base_url.rstrip("/") + path, json=body) as response:
            if response.status != 200:
                result.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                done = False
                async for line in response.content:
                    done = _read(line, result, time.perf_counter() - begin) or done
                if not done and result.error is None:
                    result.error = "the stream ended before [DONE]"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    except (LookupError, TypeError, AttributeError) as error:
        result.error = f"a chunk of the stream is not OpenAI's ({type(error).__name__}: {error})"
    result.end = time.perf_counter() - begin
    if result.error is None and not result.chunk_times:
        result.error = "no text came"
    if result.error is None and not result.num_output_tokens:
        result.error = "the server did not say how many tokens it generated (usage)"
    return result


def _read(line: bytes, result: RequestResult, now: float) -> bool:
    """Take a line of a stream in; true at its end."""
    if not line.startswith(b"data:"):
        return False
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return True
    chunk = json.loads(data)
    if error := chunk.get("error"):
        result.error = str(error.get("message", error) if isinstance(error, dict) else error)[:200]
        return False
    usage = chunk.get("usage")
    if usage:  # of its own, or (as some servers do) on every chunk, each with the count so far
        result.num_prompt_tokens = usage["prompt_tokens"]
        result.num_output_tokens = usage["completion_tokens"]
    for choice in chunk.get("choices") or []:
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:  # the chunk with the role has none, and is not the first token
            result.chunk_times.append(now)
            break
    return False
