"""The text of one request, token by token: whole characters only, and an end at the first stop string.

Nothing shown is ever taken back, and the deltas joined are the same text however it was cut into tokens. Streamed and
whole answers both come from here, so that they cannot differ. Changes in no milestone; v0.7 appends several tokens at
once and asks `num_tokens` how many of them count.

Why not `tokenizers.decoders.DecodeStream`, which vLLM builds on, or the usual pair of offsets into `decode(ids)`? Both
see an unfinished character only as a U+FFFD at the end of decoded text, and so cannot tell it from a broken byte or
from a U+FFFD that the model really wrote. Measured with tokenizers 0.23: a written U+FFFD is held until the next token,
or lost at the end; a prompt that ends in one, or within a character, is shown again as output; a run of broken bytes is
held as long as it lasts, and decoded anew with each token; and since SentencePiece's decoder turns a whole run of byte
tokens to U+FFFD once one is broken, the text before is no prefix of the text after and every later step raises. Bytes
have none of this: each token adds its own, and Python's incremental UTF-8 decoder knows when a character is complete.
"""

import codecs
from collections.abc import Sequence

from common.sampling_params import FinishReason, SamplingParams
from common.tokenizer import Tokenizer


class Detokenizer:
    """Turns the new tokens of one request into the text that may be shown.

    Its text is `decode(prompt + output)` less `decode(prompt)`: a SentencePiece continuation keeps its leading space,
    and a character that the prompt began is shown once complete. An unfinished one at the end is dropped.

        all text so far   |<------ shown ------>|<- held ->|   held: the longest end that a stop string begins with
        + bytes of a character that is not complete yet, in the decoder

    Args:
        tokenizer: the model's.
        prompt_token_ids: context only; its last few tokens are looked at, however long it is.
        params: `stop`, `include_stop_str_in_output`, `min_tokens` and `skip_special_tokens` are read.

    Attributes:
        stop_reason: the stop string that ended the text, else `None`.
        num_tokens: tokens taken so far. Once a stop string matched, the one that completed it is the last.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stop = tuple(params.stop or ())
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._hidden = tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
        self._held = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = self._tail_bytes(prompt_token_ids)
        self._at_start = not tail  # nothing to see yet: the decoder may strip a leading space
        self._utf8.decode(tail)
        self._prompt_is_unfinished = bool(self._utf8.getstate()[0])

    def append(self, token_ids: Sequence[int], *, ends_by_token: bool = False) -> str:
        """Take the newly generated tokens in order; the text that may be shown now, often `""`.

        Tokens after the one that completes a stop string are not taken.

        Args:
            token_ids: one, or several of a step.
            ends_by_token: the last one is an end token that ends the request. Its text stays out, unless
                `include_stop_str_in_output`.
        """
        shown = ""
        for index, token_id in enumerate(token_ids):
            if self.stop_reason is not None:
                break
            self.num_tokens += 1
            is_end = ends_by_token and index == len(token_ids) - 1
            if not is_end or self._include_stop:
                shown += self._show(self._new_text(token_id))
        return shown

    def step(self, token_ids: Sequence[int], finish: FinishReason | None) -> tuple[str, FinishReason | None]:
        """What one step shows, and whether it ends the request.

        Args:
            token_ids: the new ones.
            finish: how the last of them ends the request, by its id or by the length, if it does. A stop string in the
                text comes first; if none does, what was held back is shown.
        """
        text = self.append(token_ids, ends_by_token=finish is not None and finish[0] == "stop")
        if self.stop_reason is not None:
            return text, ("stop", self.stop_reason)
        return (text if finish is None else text + self.finish()), finish

    def finish(self) -> str:
        """What was held back, as the request ended by an end token or its length; `""` after a stop string."""
        held, self._held = self._held, ""
        return held

    def _tail_bytes(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Enough of the prompt's end to know its unfinished character, which has at most 3 of its 4 bytes."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= 3:
                break
            if token_id not in self._hidden:
                tail = self._tokenizer.token_bytes(token_id) + tail
        return tail

    def _new_text(self, token_id: int) -> str:
        """The characters that this token completes."""
        new = b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)
        if not new:
            return ""
        if self._at_start:
            self._at_start = False
            new = self._tokenizer.first_token_bytes(token_id)
        elif self._prompt_is_unfinished:
            self._prompt_is_unfinished = False
            if not 0x80 <= new[0] < 0xC0:  # does not go on with the prompt's character: its U+FFFD is the prompt's
                self._utf8.reset()
        return self._utf8.decode(new)

    def _show(self, new: str) -> str:
        """Add characters; what may be shown of them and of what was held."""
        text = self._held + new
        # vLLM's rule: text of the first `min_tokens` tokens completes no stop string, but may be the beginning of one.
        match = self._first_match(text, len(self._held)) if self.num_tokens > self._min_tokens else None
        if match is not None:
            end, start, self.stop_reason = match
            self._held = ""
            return text[: end if self._include_stop else start]
        num_shown = self._num_shown(text)
        self._held = text[num_shown:]
        return text[:num_shown]

    def _first_match(self, text: str, num_old: int) -> tuple[int, int, str] | None:
        """`(end, start, stop string)` of the match that is complete first, the longest of those that end together.

        That depends on the characters alone, while the match that *starts* first may hang on text still to come. A
        match ends after the first `num_old` characters, which have been searched before.
        """
        matches = []
        for stop in self._stop:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches, default=None)

    def _num_shown(self, text: str) -> int:
        """Characters before the longest end of `text` that is a proper prefix of a stop string."""
        for start in range(len(text)):
            rest = text[start:]
            if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stop):
                return start
        return len(text)
