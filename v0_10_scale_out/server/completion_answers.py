"""From the engine's deltas to the bodies of POST /v1/completions, streamed and whole; chats are in `answers.py`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from common.outputs import Logprob, RequestOutput
from common.tokenizer import Tokenizer

from .answers import Extras
from .echo import Echo, joined
from .offsets import Offsets
from .responses import Completion, CompletionChoice, CompletionLogprobs, FinishReason, by_text, finite, prompt_logprobs
from .totals import Totals


@dataclass(slots=True)
class _Choice:
    """One choice of a stream, and what has not been sent of it: of tokens whose text is still held back."""

    offsets: Offsets
    is_new: bool = True
    num_sent: int = 0  # characters
    held: list[tuple[int, dict[int, Logprob]]] = field(default_factory=list)  # offset and log-probabilities
    held_ids: list[int] = field(default_factory=list)


class CompletionAnswer:
    """POST /v1/completions.

    Args:
        request_id: the answer's `id`, in every chunk.
        model: the name that it was asked for by.
        totals: fed with the same outputs.
        echoes: what is put before the answers to each prompt.
        tokenizer: for the places of tokens in the text.
        skip_special_tokens: whether the text leaves them out.
        extras: what is wanted besides.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        totals: Totals,
        echoes: list[Echo],
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        extras: Extras,
    ) -> None:
        self.id, self.model, self.totals, self.created = request_id, model, totals, int(time.time())
        self._echoes, self._extras = echoes, extras
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._choices: dict[int, _Choice] = {}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Completion]:
        """The text; the reason rides on a choice's last one, which is empty only if no text was left to send."""
        for delta in output.outputs:
            index, text = prompt_index * self.totals.num_choices + delta.index, delta.text
            echoed = None
            if index not in self._choices:
                self._choices[index] = _Choice(self._offsets(index))
                text, echoed = self._echoes[prompt_index].text + text, self._echoed(prompt_index)
            state, ends = self._choices[index], delta.finish_reason is not None
            state.num_sent += len(text)
            state.held_ids += delta.token_ids
            if delta.logprobs is not None:
                state.held += zip(map(state.offsets.append, delta.token_ids), delta.logprobs, strict=True)
            if not text and not ends and echoed is None:
                continue
            choice = CompletionChoice(index=index, text=text, logprobs=echoed, finish_reason=None, stop_reason=None)
            if delta.logprobs is not None:
                # A token that begins after this text goes with the text that it begins in, or with the last chunk.
                shown = [entry for entry in state.held if ends or entry[0] <= state.num_sent]
                state.held = state.held[len(shown) :]
                choice["logprobs"] = joined(echoed, _completion_logprobs(shown, state.num_sent))
            if ends:
                choice["finish_reason"] = cast(FinishReason, delta.finish_reason)
                choice["stop_reason"] = delta.stop_reason
            if self._extras.token_ids:
                if state.is_new:
                    choice["prompt_token_ids"] = output.prompt_token_ids
                choice["token_ids"], state.held_ids = state.held_ids, []
            state.is_new = False
            chunk = self._body([choice])
            if self._extras.usage:
                chunk["usage"] = self.totals.usage_so_far(index)
            yield chunk

    def usage_chunk(self) -> Completion:
        """Without choices."""
        return {**self._body([]), "usage": self.totals.usage()}

    def whole(self) -> Completion:
        """All choices of all prompts."""
        choices = [self._whole_choice(index) for index in sorted(self.totals.choices)]
        return {**self._body(choices), "usage": self.totals.usage()}

    def _whole_choice(self, index: int) -> CompletionChoice:
        choice, prompt_index = self.totals.choices[index], index // self.totals.num_choices
        text = self._echoes[prompt_index].text + choice.text
        whole = CompletionChoice(
            index=index,
            text=text,
            logprobs=self._echoed(prompt_index),
            finish_reason=cast(FinishReason, choice.finish_reason),
            stop_reason=choice.stop_reason,
        )
        if choice.logprobs is not None:
            offsets = map(self._offsets(index).append, choice.token_ids)
            entries = list(zip(offsets, choice.logprobs, strict=True))
            whole["logprobs"] = joined(whole["logprobs"], _completion_logprobs(entries, len(text)))
        if self._extras.token_ids:
            whole["prompt_token_ids"] = self.totals.prompt_token_ids[prompt_index]
            whole["token_ids"] = choice.token_ids
        if self._extras.prompt_logprobs is not None:
            scores = self.totals.prompt_logprobs[prompt_index]
            whole["prompt_logprobs"] = prompt_logprobs(scores, self._extras.prompt_logprobs)
        return whole

    def _body(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.id, object="text_completion", created=self.created, model=self.model, choices=choices)

    def _echoed(self, prompt_index: int) -> CompletionLogprobs | None:
        """Log-probabilities of a prompt that is put before its answers, where they were asked for."""
        scores = self.totals.prompt_logprobs.get(prompt_index)
        return None if scores is None else self._echoes[prompt_index].logprobs(scores)

    def _offsets(self, index: int) -> Offsets:
        prompt_index = index // self.totals.num_choices
        start = len(self._echoes[prompt_index].text)
        return Offsets(self._tokenizer, self.totals.prompt_token_ids[prompt_index], self._skip_special_tokens, start)


def _completion_logprobs(entries: Sequence[tuple[int, dict[int, Logprob]]], num_chars: int) -> CompletionLogprobs:
    """OpenAI's older form; no offset is past the text, which may end before a stop string's tokens do."""
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for offset, candidates in entries:
        sampled = next(iter(candidates.values()))  # the sampled token comes first
        result["text_offset"].append(min(offset, num_chars))
        result["tokens"].append(sampled.decoded_token)
        result["token_logprobs"].append(finite(sampled.logprob))
        result["top_logprobs"].append(by_text(candidates))
    return result
