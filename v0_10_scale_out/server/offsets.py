"""Where each token of an answer stands in its text: `text_offset` of completions' log-probabilities."""

from collections.abc import Sequence

from common.detokenizer import Detokenizer
from common.sampling_params import SamplingParams
from common.tokenizer import Tokenizer


class Offsets:
    """Counts the characters of one answer, token by token.

    A token begins where the text before it ends. All tokens of one character stand at its beginning, since it appears
    with the last of them, and a hidden special token, which has no text, stands where the next one does:

        tokens    F0  9F  A6  <eot>  9C  20      text  🦜 and a blank
        offsets    0   0   0    0     0   1

    Args:
        tokenizer: the model's.
        prompt_token_ids: the answer's text depends on where the prompt ends.
        skip_special_tokens: whether the text leaves them out.
        start: characters before the answer (of an `echo`).
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool, start: int = 0
    ) -> None:
        self._text = Detokenizer(
            tokenizer, prompt_token_ids, SamplingParams(skip_special_tokens=skip_special_tokens)
        )  # without stop strings, so that nothing is held back
        self._next = start

    def append(self, token_id: int) -> int:
        """The offset of the answer's next token."""
        offset = self._next
        self._next += len(self._text.append([token_id]))
        return offset
