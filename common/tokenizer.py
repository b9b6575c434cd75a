"""Text to token ids and back, and the chat template: a thin room around a Hugging Face fast tokenizer.

Besides the usual three (encode, decode, chat) it knows the exact *bytes* of every token, which is what `detokenizer.py`
and OpenAI's log-probabilities are made of. transformers is imported when a folder is loaded, not before. Not for use
from two threads at once. Changes in no milestone.
"""

import inspect
import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from common.chat import normalize_messages
from common.errors import ModelError, RequestError, shown
from common.token_length import LengthBound
from common.tokenizer_info import describe_tokenizer

if TYPE_CHECKING:
    import tokenizers

NOTHING: Mapping[str, Any] = MappingProxyType({})
MAX_LINE = 200  # characters of what a chat template says is wrong
BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a token that is one raw byte


def _byte_level_alphabet() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


# GPT-2's alphabet for byte-level tokens: a printable byte is written as itself, the others as U+0100 and up, in order.
BYTE_OF_CHAR = _byte_level_alphabet()


class Tokenizer:
    """A Hugging Face fast tokenizer, with token bytes, and with errors in the caller's words.

    Attributes:
        backend: the `tokenizers.Tokenizer` inside.
        special_token_ids: what `skip_special_tokens` leaves out.
        bos_token_id, eos_token_id: the tokenizer's own, `None` where it has none. A model may have more end tokens.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"{type(hf_tokenizer).__name__} is not a fast tokenizer: convert it to a tokenizer.json.")
        # Some tokenizer.json files ask for both; a prompt must not be shortened or filled up behind the caller's back.
        backend.no_truncation()
        backend.no_padding()
        self._hf = hf_tokenizer
        self.backend: tokenizers.Tokenizer = backend
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Load `tokenizer.json`, or convert `tokenizer.model`, with the configuration and the template beside it.

        Raises:
            ModelError: neither is there, or it cannot be read.
        """
        try:
            if (folder / "tokenizer.json").is_file():
                # AutoTokenizer would look for a class first, which takes two more seconds, and in transformers 5 that
                # class may rebuild the tokenizer; this one takes tokenizer.json at its word.
                from transformers import PreTrainedTokenizerFast

                return cls(PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True))
            if (folder / "tokenizer.model").is_file():
                from transformers import AutoTokenizer

                return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except ModelError:
            raise
        except Exception as error:  # each kind of file fails in its own way: JSON, Rust, sentencepiece not installed
            raise ModelError(f"The tokenizer in {folder} cannot be loaded: {error}") from error
        raise ModelError(f"No tokenizer in {folder}: it needs a tokenizer.json (or a tokenizer.model), so download it.")

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id + 1, added tokens included; a model's last matrix may have more rows than that."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def length_bound(self) -> LengthBound | None:
        """What a text's length says about its tokens; `None` where the tokenizer may drop text."""
        return LengthBound.of(self.backend, BYTE_OF_CHAR)

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a prompt, with the BOS that the model's tokenizer adds unless `add_special_tokens` is false.

        `param` is what errors call the text.
        """
        return self._encode(text, add_special_tokens, param)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; unlike in transformers, spaces are never "cleaned up"."""
        # As a batch, which leaves the interpreter's lock to other threads meanwhile.
        return self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def render_chat(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = NOTHING,
    ) -> str:
        """The prompt that the model's chat template makes of OpenAI's messages.

        Args:
            messages: see `normalize_messages`.
            add_generation_prompt: end with the header of a new assistant turn.
            continue_final_message: leave the last, an assistant's, turn open, so that the model goes on with it.
            template_kwargs: further variables of the template (`enable_thinking`, ...); what it does not read says
                nothing.

        Raises:
            RequestError: what `normalize_messages` refuses, no template, or the template's own refusal in its words.
        """
        chat = normalize_messages(messages)
        if not self._hf.chat_template:
            raise RequestError(
                "This model has no chat template, which a chat needs: use an instruction-tuned model, or completions.",
                param="messages",
            )
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other: the first goes on with the "
                    "last turn, the second opens a new one.",
                    param="continue_final_message",
                )
            if chat[-1]["role"] != "assistant":
                raise RequestError(
                    f"continue_final_message needs an assistant's message at the end, not one of role "
                    f"{shown(chat[-1]['role'])}.",
                    param="continue_final_message",
                )
        for name in template_kwargs:
            if name in self._template_arguments:
                raise RequestError(
                    f"chat_template_kwargs may not have {name}: the server gives it to the template itself.",
                    param="chat_template_kwargs",
                )
        return self._render(chat, add_generation_prompt, continue_final_message, template_kwargs)

    def chat_token_ids(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = NOTHING,
    ) -> list[int]:
        """Token ids of `render_chat`. The template prints the BOS, so that none is added here."""
        text = self.render_chat(messages, add_generation_prompt, continue_final_message, template_kwargs)
        return self._encode(text, False, "messages")

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun, as UTF-8; a part of a character where it ends within one.

        The text of a sequence is its tokens' bytes joined and decoded, but for a decoder that strips a leading space
        (see `first_token_bytes`). A special token gives its name, an id without a token nothing.
        """
        if token_id not in self._token_bytes:
            raw = self._raw_bytes(token_id)
            if raw is None:
                before = self.backend.decode(self._anchor, skip_special_tokens=False)
                text = self.backend.decode([*self._anchor, token_id], skip_special_tokens=False)
                raw = text[len(before) :].encode()
            self._token_bytes[token_id] = raw
        return self._token_bytes[token_id]

    def first_token_bytes(self, token_id: int) -> bytes:
        """`token_bytes` at the very start of a text, where SentencePiece decoders strip the space of `▁Hello`."""
        raw = self._raw_bytes(token_id)
        if raw is not None:
            return raw
        after = b"".join(self.token_bytes(anchor) for anchor in self._anchor).decode()
        text = self.backend.decode([token_id, *self._anchor], skip_special_tokens=False)
        return text[: len(text) - len(after)].encode()

    def token_text(self, token_id: int) -> str:
        """The token alone, for reports; U+FFFD stands for a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def pieces(self, token_ids: list[int]) -> list[str]:
        """The tokens as the vocabulary writes them (`Ġis`, `▁is`); `""` for an id without one."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def use_chat_template(self, template: str) -> None:
        """Render chats with this Jinja template from now on; raises `ModelError` where it is none."""
        from jinja2 import TemplateSyntaxError

        try:
            self._hf.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=template, tokenize=False)
        except TemplateSyntaxError as error:
            raise ModelError(f"The chat template is no Jinja template: line {error.lineno}: {error.message}.") from None
        except Exception:
            pass
        self._hf.chat_template = template

    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration, as in `tokenizer_config.json`, with the special tokens and the template."""
        return describe_tokenizer(self._hf)

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"{param} must be a string, got {shown(text)}.", param=param)
        try:
            text.encode()  # half of a surrogate pair, which JSON can write ("\ud83d"), is no text
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} is not valid Unicode: it has the lone surrogate U+{ord(text[error.start]):04X}.", param=param
            ) from None
        # As a batch of one: `encode` holds the interpreter's lock to its end, which may be seconds, for a long text.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _render(
        self,
        chat: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        from jinja2 import TemplateError

        try:
            return self._hf.apply_chat_template(
                chat,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
        except TemplateError as error:  # what a template's raise_exception(...) raises, too
            message = f"The model's chat template does not accept these messages: {_line(error)}"
        except Exception as error:
            # A template is a program: it may divide by zero or call itself for ever. And transformers has errors of its
            # own: the first sentence says why, what follows may be the whole chat.
            message = f"The model's chat template failed on these messages ({type(error).__name__}): {_line(error)}"
        raise RequestError(message, param="messages")

    def _raw_bytes(self, token_id: int) -> bytes | None:
        """The token's bytes where its piece says them, else `None`: the decoder must be asked."""
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            # As the decoder does it: an added token with any character outside the alphabet is plain text.
            is_encoded = all(char in BYTE_OF_CHAR for char in piece)
            return bytes(BYTE_OF_CHAR[char] for char in piece) if is_encoded else piece.encode()
        match = BYTE_PIECE.fullmatch(piece) if "ByteFallback" in self._decoders else None
        if match and int(match[1], 16) >= 0x80:  # alone it decodes to U+FFFD; ASCII bytes decode as they are
            return bytes.fromhex(match[1])
        return None

    @cached_property
    def _template_arguments(self) -> frozenset[str]:
        """Names that mean something to transformers or Jinja, and so are no variables that a caller may set."""
        own = inspect.signature(self._hf.apply_chat_template).parameters
        return frozenset(own) | {"self", "args", "messages", "conversations"}

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The types of the decoders in a row."""
        if self.backend.decoder is None:
            return frozenset()
        state = json.loads(self.backend.decoder.__getstate__())
        return frozenset(decoder["type"] for decoder in state.get("decoders", [state]))

    @cached_property
    def _anchor(self) -> list[int]:
        """A plain token to decode others beside, so that they do not stand at the start; `[]` if there is none."""
        for token_id in range(self.vocab_size):
            piece = (self.backend.id_to_token(token_id) or "").removeprefix("▁")
            if piece.isascii() and piece.isalnum() and token_id not in self.special_token_ids:
                return [token_id]
        return []


def _line(error: Exception) -> str:
    """What an error says, in one line and not long."""
    words = " ".join(str(error).split("! ")[0].split()) or "it does not say why"
    return words if len(words) <= MAX_LINE else f"{words[:MAX_LINE]}..."
