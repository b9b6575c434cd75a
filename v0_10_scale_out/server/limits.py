"""What cannot fit into the context, seen before anything is rendered or encoded: that may take seconds.

What may fit is counted in tokens later, exactly: `common.sampling_params.check_request`.
"""

from dataclasses import dataclass
from typing import Any

from common.errors import RequestError
from common.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one model. Its checks raise a `RequestError` with the code `context_length_exceeded`."""

    tokenizer: Tokenizer
    max_model_len: int

    def check_messages(self, messages: Any) -> None:
        """Of a chat: each message makes a token at least."""
        if isinstance(messages, list):
            self._check(len(messages), f"The chat has {len(messages)} messages", "messages")

    def check_prompt(self, prompt: Any) -> None:
        """Of a completion: a text, or token ids."""
        if isinstance(prompt, str):
            self.check_text(prompt, "prompt")
        else:
            self.check_ids(prompt, "prompt")

    def check_ids(self, token_ids: Any, param: str) -> None:
        """By their number."""
        if isinstance(token_ids, list):
            what = "There are" if param == "tokens" else "The prompt has"
            self._check(len(token_ids), f"{what} {len(token_ids)} tokens", param)

    def check_text(self, text: str, param: str) -> None:
        """By the fewest tokens that so many characters can make."""
        bound = self.tokenizer.length_bound
        if bound is not None:
            num_tokens = bound.fewest_tokens(text)
            what = f"The {'prompt' if param == 'prompt' else 'chat'} has {len(text)} characters"
            self._check(num_tokens, f"{what}, at least {num_tokens} tokens", param)

    def _check(self, num_tokens: int, what: str, param: str) -> None:
        if num_tokens > self.max_model_len:
            raise RequestError(
                f"{what}, but the context holds {self.max_model_len} tokens (max_model_len): shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )
