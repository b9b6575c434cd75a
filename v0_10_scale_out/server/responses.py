"""The bodies that clients get: OpenAI's shapes, with vLLM's few additions (`stop_reason`, token ids).

They are `TypedDict`s: the code that makes them is checked by mypy, the OpenAPI document describes them, and nothing is
validated or copied while tokens flow. What builds them is in `answers.py`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from starlette.responses import Response
from typing_extensions import TypedDict

from common.outputs import Logprob
from common.tokenizer import Tokenizer

# Legal in JSON and in server-sent events, but line ends to Python's `splitlines`, which simple clients use.
LINE_SEPARATORS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(TypedDict):
    """How much of the prompt was in the prefix cache."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts; the prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(TypedDict):
    """A candidate for one place. `bytes` are the token's own, also where they are a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry for every token."""

    content: list[TokenLogprob]


class PromptLogprob(TypedDict):
    """vLLM's form of a candidate for one place of the prompt; `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


# One entry for each token of the prompt, by token id (JSON makes it a string); the first token has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class Message(TypedDict):
    """The whole answer."""

    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    """One of `n` answers."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Delta(TypedDict):
    """What a chunk adds: the role first, then text, nothing at the end."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """What a chunk adds to one of `n` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """One event of a streamed chat; the one with the `usage` of all choices has none."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]
    prompt_token_ids: NotRequired[list[int]]


class CompletionLogprobs(TypedDict):
    """OpenAI's older form: lists with one entry for every token."""

    text_offset: list[int]
    token_logprobs: list[float | None]  # None for the first token of an echoed prompt: nothing comes before it
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """One answer, or what a chunk adds to it; choices of the second prompt follow those of the first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """Answer of POST /v1/completions, and each event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]


class ModelCard(TypedDict):
    """A name that the model is served by."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Success(TypedDict):
    """It was done."""

    success: bool


class Pace(TypedDict):
    """POST /events/control: how the engine steps now; `delay` is in seconds."""

    paused: bool
    delay: float


class Text(TypedDict):
    """POST /detokenize."""

    prompt: str


class Version(TypedDict):
    """GET /version."""

    version: str


class Health(TypedDict):
    """GET /health."""

    status: Literal["ok"]


class ErrorObject(TypedDict):
    """What went wrong; `param` is the field at fault, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Every answer that is not 200."""

    error: ErrorObject


def to_json(body: Any) -> str:
    """As little as JSON allows, on one line; characters as they are, but for those that some clients split lines at."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    for char, escape in LINE_SEPARATORS.items():  # `translate` takes a second and more for ten million characters
        text = text.replace(char, escape)
    return text


def respond(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A whole answer."""
    return Response(to_json(body), status, headers, "application/json")


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> Usage:
    """The sum is OpenAI's habit."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )


def chat_logprobs(logprobs: Sequence[dict[int, Logprob]], num_top: int, tokenizer: Tokenizer) -> ChatLogprobs:
    """OpenAI's form of the engine's: the sampled token, and beside it the `num_top` likeliest."""

    def entry(token_id: int, logprob: Logprob) -> TopLogprob:
        raw = list(tokenizer.token_bytes(token_id))
        return TopLogprob(token=logprob.decoded_token, logprob=finite(logprob.logprob), bytes=raw)

    content: list[TokenLogprob] = []
    for candidates in logprobs:
        entries = [entry(*candidate) for candidate in candidates.items()]  # the sampled token first
        top = sorted(entries, key=lambda candidate: -candidate["logprob"])[:num_top]
        content.append({**entries[0], "top_logprobs": top})
    return ChatLogprobs(content=content)


def prompt_logprobs(logprobs: Sequence[dict[int, Logprob] | None], num_top: int) -> PromptLogprobs:
    """vLLM's form: the prompt's own token, and the `num_top` likeliest."""
    entries: PromptLogprobs = []
    for candidates in logprobs:
        if candidates is None:
            entries.append(None)
            continue
        entries.append(
            {
                token_id: PromptLogprob(logprob=finite(c.logprob), rank=c.rank, decoded_token=c.decoded_token)
                for token_id, c in likeliest(candidates, num_top).items()
            }
        )
    return entries


def likeliest(candidates: dict[int, Logprob], num_top: int) -> dict[int, Logprob]:
    """The token that is there, which comes first, and the `num_top` likeliest; more may have been computed."""
    return {
        token_id: candidate
        for index, (token_id, candidate) in enumerate(candidates.items())
        if index == 0 or candidate.rank <= num_top
    }


def by_text(candidates: dict[int, Logprob]) -> dict[str, float]:
    """OpenAI's older form. Of tokens with the same text (parts of characters are all U+FFFD) the likeliest is told."""
    by_likelihood = sorted(candidates.values(), key=lambda candidate: candidate.logprob)
    return {candidate.decoded_token: finite(candidate.logprob) for candidate in by_likelihood}


def finite(logprob: float) -> float:
    """JSON has neither infinities nor NaN; -9999.0 stands for them, as in vLLM."""
    return max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0
