"""What a completion says of its prompt: `echo` gives back its text, and with `logprobs` those of its tokens.

text    Hi é          what was sent, or what /detokenize says of token ids
tokens  H  i  ␣  �  �  one entry each, the first without a log-probability
offset  0  1  2  3  3  where in `text` the token begins; one within a character, where that begins
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import RequestError
from common.outputs import Logprob
from common.tokenizer import Tokenizer

from .responses import CompletionLogprobs, by_text, finite, likeliest

MAX_SCORES = 250_000  # log-probabilities of prompts in one answer: about 15 MB, which keep the server busy for a second
PromptCandidates = Sequence[dict[int, Logprob] | None]  # one for each token of the prompt, `None` for the first


@dataclass(frozen=True)
class Echo:
    """What is put before the answers to one prompt; without `echo`, nothing."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    num_top: int | None = None  # `logprobs`

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        text: str | None,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        num_top: int | None,
    ) -> "Echo":
        """Of a prompt that was `text`, or of token ids, whose special tokens may be left out.

        The BOS that a tokenizer adds to a text is a token of the prompt, but no part of the text.
        """
        echo = tokenizer.decode(token_ids, skip_special_tokens) if text is None else text
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tokens = [tokenizer.token_text(token_id) for token_id in token_ids]
        offsets, length = [], 0
        for token_id, token in zip(token_ids, tokens, strict=True):
            offsets.append(min(length, len(echo)))
            if token_id in tokenizer.special_token_ids and not echo.startswith(token, length):
                continue  # left out, or added
            raw = tokenizer.token_bytes(token_id) if length else tokenizer.first_token_bytes(token_id)
            length += len(utf8.decode(raw))
        return cls(echo, tokens, offsets, num_top)

    def logprobs(self, candidates: PromptCandidates) -> CompletionLogprobs | None:
        """OpenAI's older form, for the tokens of the prompt; `None` where it was not asked for."""
        if self.num_top is None:
            return None
        entry = CompletionLogprobs(text_offset=self.offsets, token_logprobs=[], tokens=self.tokens, top_logprobs=[])
        for position in candidates:
            if position is None:
                entry["token_logprobs"].append(None)
                entry["top_logprobs"].append(None)
                continue
            top = likeliest(position, self.num_top)
            own = next(iter(top.values()))
            entry["token_logprobs"].append(finite(own.logprob))
            entry["top_logprobs"].append(by_text(top))
        return entry


def joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """The prompt's and the answer's as one."""
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        text_offset=first["text_offset"] + second["text_offset"],
        token_logprobs=first["token_logprobs"] + second["token_logprobs"],
        tokens=first["tokens"] + second["tokens"],
        top_logprobs=first["top_logprobs"] + second["top_logprobs"],
    )


def check_scores(num_tokens: int, asked: Mapping[str, int | None]) -> None:
    """Refuse an answer that would be too long.

    Args:
        num_tokens: of all prompts, counted once for each choice, which repeats them.
        asked: by field, how many of the likeliest tokens there are to be beside each token's own.
    """
    nums = {name: num for name, num in asked.items() if num is not None}
    total = num_tokens * sum(num + 1 for num in nums.values())
    if total > MAX_SCORES:
        raise RequestError(
            f"The answer would hold {total} log-probabilities of prompt tokens (tokens, times n, times those that are "
            f"reported of each), but at most {MAX_SCORES}: ask for fewer at once.",
            param=next(iter(nums)),
        )
