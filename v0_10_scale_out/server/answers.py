"""From the engine's deltas to OpenAI's bodies, streamed and whole. Completions are in `completion_answers.py`.

An `Answer` belongs to one HTTP request. It is fed every output of its stream, and gives either the chunks for each or
one body at the end. Knows no HTTP and no engine.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

from common.outputs import Logprob, RequestOutput
from common.tokenizer import Tokenizer

from .responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Delta,
    FinishReason,
    Message,
    chat_logprobs,
    prompt_logprobs,
    usage,
)
from .totals import Totals

Candidates = list[dict[int, Logprob]]


@dataclass(frozen=True, slots=True)
class Extras:
    """What the caller wants beside the answer, as in vLLM.

    Args:
        token_ids: the prompt's and the answer's. In a stream the prompt's come once, in a choice's first chunk.
        usage: in every chunk, what its choice has come to.
        prompt_logprobs: those of the prompt, with so many likely tokens at each place; `None` for none at all.
    """

    token_ids: bool = False
    usage: bool = False
    prompt_logprobs: int | None = None


class Answer(Protocol):
    """What `serving.py` needs of a chat's answer or a completion's."""

    id: str
    totals: Totals

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Any]:
        """The events that one output of the engine makes."""
        ...

    def usage_chunk(self) -> Any:
        """The event with the token counts, which has no choices."""
        ...

    def whole(self) -> Any:
        """Everything that was added, as one body."""
        ...


class ChatAnswer:
    """POST /v1/chat/completions.

    Args:
        request_id: the answer's `id`, in every chunk.
        model: the name that it was asked for by.
        totals: fed with the same outputs.
        num_top: `top_logprobs`.
        tokenizer: for the bytes of tokens.
        extras: what is wanted besides.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        totals: Totals,
        num_top: int,
        tokenizer: Tokenizer,
        extras: Extras,
    ) -> None:
        self.id, self.model, self.totals, self.created = request_id, model, totals, int(time.time())
        self._num_top, self._tokenizer, self._extras = num_top, tokenizer, extras
        self._started: set[int] = set()
        # Of tokens whose text is still held back:
        self._held: dict[int, Candidates] = {}
        self._held_ids: dict[int, list[int]] = {}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[ChatCompletionChunk]:
        """The role before a choice's first token, its text, and an empty delta with the reason at its end."""
        for delta in output.outputs:
            index = delta.index
            if index not in self._started:
                self._started.add(index)
                yield self._first_chunk(index, output)
            self._held_ids.setdefault(index, []).extend(delta.token_ids)
            if delta.logprobs is not None:
                self._held.setdefault(index, []).extend(delta.logprobs)
            if delta.text:
                yield self._chunk(index, Delta(content=delta.text), self._logprobs(self._held.pop(index, None)))
            if delta.finish_reason is not None:
                last = self._chunk(index, Delta(), self._logprobs(self._held.pop(index, None)))
                last["choices"][0]["finish_reason"] = cast(FinishReason, delta.finish_reason)
                last["choices"][0]["stop_reason"] = delta.stop_reason
                yield last

    def usage_chunk(self) -> ChatCompletionChunk:
        """Without choices."""
        return {**self._frame(), "usage": self.totals.usage()}

    def whole(self) -> ChatCompletion:
        """All choices."""
        choices = [
            ChatChoice(
                index=index,
                message=Message(role="assistant", content=choice.text),
                logprobs=self._logprobs(choice.logprobs),
                finish_reason=cast(FinishReason, choice.finish_reason),
                stop_reason=choice.stop_reason,
            )
            for index, choice in sorted(self.totals.choices.items())
        ]
        body = ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.totals.usage(),
        )
        if self._extras.token_ids:
            body["prompt_token_ids"] = self.totals.prompt_token_ids[0]
            for index, choice in self.totals.choices.items():
                choices[index]["token_ids"] = choice.token_ids
        if self._extras.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.totals.prompt_logprobs[0], self._extras.prompt_logprobs)
        return body

    def _frame(self) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, object="chat.completion.chunk", created=self.created, model=self.model, choices=[]
        )

    def _first_chunk(self, index: int, output: RequestOutput) -> ChatCompletionChunk:
        """The role, before any token."""
        choice = ChatChunkChoice(
            index=index, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None
        )
        chunk: ChatCompletionChunk = {**self._frame(), "choices": [choice]}
        if self._extras.token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        if self._extras.usage:
            chunk["usage"] = usage(len(output.prompt_token_ids), 0, output.num_cached_tokens)
        return chunk

    def _chunk(self, index: int, delta: Delta, logprobs: ChatLogprobs | None = None) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)
        if self._extras.token_ids:
            choice["token_ids"] = self._held_ids.pop(index, [])
        chunk: ChatCompletionChunk = {**self._frame(), "choices": [choice]}
        if self._extras.usage:
            chunk["usage"] = self.totals.usage_so_far(index)
        return chunk

    def _logprobs(self, candidates: Candidates | None) -> ChatLogprobs | None:
        return None if candidates is None else chat_logprobs(candidates, self._num_top, self._tokenizer)
