"""From the engine's deltas to OpenAI's bodies: chat and completions, streamed and whole.

An `Answer` belongs to one HTTP request. It is fed every output of its stream, and gives either the chunks for each or
one body at the end. Knows no HTTP and no engine.
"""

import time
from collections.abc import Iterator
from typing import Any, Protocol, cast

from common.outputs import CompletionOutput, Logprob, RequestOutput
from common.tokenizer import Tokenizer

from .responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    Message,
    chat_logprobs,
    finite,
    usage,
)

Candidates = list[dict[int, Logprob]]


class Answer(Protocol):
    """What `serving.py` needs of a chat's answer or a completion's."""

    id: str
    totals: "Totals"

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Any]:
        """The events that one output of the engine makes."""
        ...

    def usage_chunk(self) -> Any:
        """The event with the token counts, which has no choices."""
        ...

    def whole(self) -> Any:
        """Everything that was added, as one body."""
        ...


class Totals:
    """What all outputs of a request add up to: its choices, and what the log and `usage` say of them."""

    def __init__(self, num_prompts: int, num_choices: int) -> None:
        self.num_prompts, self.num_choices = num_prompts, num_choices  # choices of each prompt
        self.choices: dict[int, CompletionOutput] = {}
        self.num_prompt_tokens: dict[int, int] = {}
        self.num_preemptions = 0
        self.failed = False  # by a fault of the server's

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take an output in."""
        self.num_prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        for delta in output.outputs:
            index = prompt_index * self.num_choices + delta.index
            self.choices.setdefault(index, CompletionOutput(index)).extend(delta)
        if output.finished:
            self.num_preemptions += output.metrics.num_preemptions

    @property
    def num_output_tokens(self) -> int:
        """Of all choices, end tokens included."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def finish_reasons(self) -> list[str]:
        """How all choices have ended, each reason once; empty while one of them has not."""
        reasons = [choice.finish_reason for choice in self.choices.values() if choice.finish_reason is not None]
        return sorted(set(reasons)) if len(reasons) == self.num_prompts * self.num_choices else []

    def usage(self) -> Any:
        """OpenAI's token counts."""
        return usage(sum(self.num_prompt_tokens.values()), self.num_output_tokens)


class ChatAnswer:
    """POST /v1/chat/completions.

    Args:
        request_id: the answer's `id`, in every chunk.
        model: the name that it was asked for by.
        totals: fed with the same outputs.
        num_top: `top_logprobs`.
        tokenizer: for the bytes of tokens.
    """

    def __init__(self, request_id: str, model: str, totals: Totals, num_top: int, tokenizer: Tokenizer) -> None:
        self.id, self.model, self.totals, self.created = request_id, model, totals, int(time.time())
        self._num_top, self._tokenizer = num_top, tokenizer
        self._started: set[int] = set()
        self._held: dict[int, Candidates] = {}  # log-probabilities of tokens whose text is still held back

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[ChatCompletionChunk]:
        """The role before a choice's first token, its text, and an empty delta with the reason at its end."""
        for delta in output.outputs:
            index = delta.index
            if index not in self._started:
                self._started.add(index)
                yield self._chunk(index, Delta(role="assistant", content=""))
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
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.totals.usage(),
        )

    def _frame(self) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, object="chat.completion.chunk", created=self.created, model=self.model, choices=[]
        )

    def _chunk(self, index: int, delta: Delta, logprobs: ChatLogprobs | None = None) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)
        return {**self._frame(), "choices": [choice]}

    def _logprobs(self, candidates: Candidates | None) -> ChatLogprobs | None:
        return None if candidates is None else chat_logprobs(candidates, self._num_top, self._tokenizer)


class CompletionAnswer:
    """POST /v1/completions.

    Args:
        request_id: the answer's `id`, in every chunk.
        model: the name that it was asked for by.
        totals: fed with the same outputs.
        echoes: what is put before the answers to each prompt; empty texts without `echo`.
    """

    def __init__(self, request_id: str, model: str, totals: Totals, echoes: list[str]) -> None:
        self.id, self.model, self.totals, self.created = request_id, model, totals, int(time.time())
        self._echoes = echoes
        self._started: set[int] = set()
        self._held: dict[int, Candidates] = {}
        self._offsets: dict[int, int] = {}  # characters of the tokens so far, for `text_offset`

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Completion]:
        """The text, and an empty one with the reason at a choice's end."""
        for delta in output.outputs:
            index = prompt_index * self.totals.num_choices + delta.index
            text = delta.text
            if index not in self._started:
                self._started.add(index)
                text = self._echoes[prompt_index] + text
            if delta.logprobs is not None:
                self._held.setdefault(index, []).extend(delta.logprobs)
            if text:
                yield self._body([self._choice(index, text, self._held.pop(index, None))])
            if delta.finish_reason is not None:
                last = self._choice(index, "", self._held.pop(index, None))
                last["finish_reason"] = cast(FinishReason, delta.finish_reason)
                last["stop_reason"] = delta.stop_reason
                yield self._body([last])

    def usage_chunk(self) -> Completion:
        """Without choices."""
        return {**self._body([]), "usage": self.totals.usage()}

    def whole(self) -> Completion:
        """All choices of all prompts."""
        choices = []
        for index, choice in sorted(self.totals.choices.items()):
            text = self._echoes[index // self.totals.num_choices] + choice.text
            choices.append(self._choice(index, text, choice.logprobs))
            choices[-1]["finish_reason"] = cast(FinishReason, choice.finish_reason)
            choices[-1]["stop_reason"] = choice.stop_reason
        return {**self._body(choices), "usage": self.totals.usage()}

    def _body(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.id, object="text_completion", created=self.created, model=self.model, choices=choices)

    def _choice(self, index: int, text: str, candidates: Candidates | None) -> CompletionChoice:
        logprobs = None if candidates is None else self._logprobs(index, candidates)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None, stop_reason=None)

    def _logprobs(self, index: int, candidates: Candidates) -> CompletionLogprobs:
        entry = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for position in candidates:
            sampled = next(iter(position.values()))  # the sampled token comes first
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(sampled.decoded_token)
            entry["text_offset"].append(offset)
            entry["tokens"].append(sampled.decoded_token)
            entry["token_logprobs"].append(finite(sampled.logprob))
            # Two tokens may have the same text (parts of characters are all U+FFFD): the likelier one is told.
            by_likelihood = sorted(position.values(), key=lambda candidate: candidate.logprob)
            entry["top_logprobs"].append({c.decoded_token: finite(c.logprob) for c in by_likelihood})
        return entry
